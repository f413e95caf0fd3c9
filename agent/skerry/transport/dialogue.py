"""What is said over one serial line: by a program in lines of JSON, by a person in plain words, or by both in turn.

Replies to a person's question and commands are text, all others are JSON; no JSON line is ever broken by text. Knows
nothing of ports: bytes come by `feed` and go to a function that takes or drops them.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from enum import StrEnum

from skerry.protocol import (
    Answer,
    Ask,
    Cancel,
    Code,
    Error,
    GetLimits,
    GetStatus,
    Incoming,
    Outgoing,
    ProtocolError,
    Reset,
    TokenText,
    parse,
    to_line,
)
from skerry.service import Service
from skerry.transport.lineedit import PROMPT, Kind, Line, LineEditor, harmless
from skerry.transport.words import HELP, in_words

_SESSION = "chat"
"""The conversation of whoever types; a program on the same port can name it too."""
_TYPED_AHEAD = 8


class Reader(StrEnum):
    PERSON = "person"
    PROGRAM = "program"


class Dialogue:
    """The client that the service sees. `write` queues bytes for one kind of reader; False when it dropped them."""

    transport = "serial"

    def __init__(self, name: str, line_bytes: int, service: Service, write: Callable[[bytes, Reader], bool]) -> None:
        self.name = self.scope = name
        self._line_bytes, self._service, self._write = line_bytes, service, write
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._editor = LineEditor(line_bytes, self._say)
        self._noise = False  # the last line was not text
        # A person's questions; their ids are none that a program can choose (see protocol.Name).
        self._ids = (f"{_SESSION}/{number}" for number in itertools.count(1))
        self._question = ""
        self._serving_person = False
        self._ahead: deque[str] = deque(maxlen=_TYPED_AHEAD)
        self._not_taken = 0  # lines typed during an answer
        self._at_margin = True  # the output ends with a whole line
        self._after_json = False

    def feed(self, data: bytes) -> None:
        """Serve what came in, split anywhere."""
        for line in self._editor.feed(data):
            self._take(line)

    def send(self, message: Outgoing) -> None:
        """Show a message to the person whose question or command it answers, else write it as a line of JSON."""
        if self._closed:
            return
        name = getattr(message, "id", None)
        for_person = name == self._question if name else self._serving_person
        if not for_person:
            self._write_json(message)
        elif isinstance(message, TokenText):
            self._say(in_words(message))
        else:
            self._say_line(in_words(message))
            if name and isinstance(message, Answer | Error):
                self._question = ""
                self._loop.call_soon(self._go_on)  # not now: the service is in the middle of ending the request

    def tell_lost(self, readers: set[Reader]) -> None:
        """Output to these was dropped, and there is room again."""
        if Reader.PROGRAM in readers:
            self._write_json(
                Error(
                    code=Code.FAILED,
                    message="output was lost because it was not read; the requests of this port were ended",
                    hint="read faster, or raise serial.buffer_bytes",
                )
            )
        if Reader.PERSON in readers:
            self._say_line("(some output was lost because it was not read)")
            self._go_on()

    def close(self) -> None:
        """End the requests; nothing more is written."""
        self._closed = True
        self._service.gone(self)

    def _take(self, line: Line) -> None:
        again = self._noise and line.kind == Kind.NOT_TEXT
        self._noise = line.kind == Kind.NOT_TEXT
        match line.kind:
            case Kind.JSON:
                try:
                    self._receive(parse(line.data))
                except ProtocolError as error:
                    self._write_json(error.reply())
            case Kind.JSON_TOO_LONG:
                message = f"the line has more than {self._line_bytes} bytes"
                self._write_json(Error(code=Code.TOO_LARGE, message=message, hint="shorten it (serial.line_bytes)"))
            case Kind.INTERRUPT:
                self._interrupt()
            case Kind.TEXT if self._editor.quiet:
                self._type_ahead(line.data.decode().strip())
            case Kind.TEXT:
                self._serve(line.data.decode().strip())
            case _ if self._editor.quiet:
                self._not_taken += 1
            case Kind.TOO_LONG:
                self._say_line(f"(this line had more than {self._line_bytes} bytes and was dropped)")
                self._editor.prompt()
            case Kind.NOT_TEXT if not again:  # noise is answered once
                self._say_line("(this line was not text in UTF-8 and was dropped)")
                self._editor.prompt()

    def _receive(self, message: Incoming, *, person: bool = False) -> None:
        self._serving_person = person
        self._service.receive(self, message)
        self._serving_person = False

    # -- a person ------------------------------------------------------------------------------------------------------

    def _serve(self, text: str) -> None:
        """A question or a command."""
        match text:
            case "/help":
                self._say_line(HELP)
            case "/status":
                self._receive(GetStatus(), person=True)
            case "/limits":
                self._receive(GetLimits(), person=True)
            case "/reset":
                self._receive(Reset(session=_SESSION), person=True)
            case "/cancel":
                self._say_line("(there is no answer to cancel)")
            case _ if text.startswith("/"):
                self._say_line(f"({harmless(text.split()[0])[:40]}: no such command; /help lists them)")
            case _ if text:
                self._question = next(self._ids)
                self._editor.pause()
                self._receive(Ask(id=self._question, session=_SESSION, text=text), person=True)
                return
        self._go_on()

    def _go_on(self) -> None:
        """Nothing is being answered: serve what was typed meanwhile, else ask for more."""
        if self._question or self._closed:
            return
        if self._not_taken:
            self._say_line(f"({self._not_taken} of the lines typed meanwhile were dropped)")
            self._not_taken = 0
        if self._ahead:
            text = self._ahead.popleft()
            self._say(f"{PROMPT}{harmless(text)}\n")
            self._serve(text)
        else:
            self._editor.prompt()

    def _type_ahead(self, text: str) -> None:
        if text == "/cancel":
            self._interrupt()
        elif text:
            self._not_taken += len(self._ahead) == _TYPED_AHEAD  # the oldest makes room
            self._ahead.append(text)

    def _interrupt(self) -> None:
        self._ahead.clear()
        if self._question:
            self._receive(Cancel(id=self._question), person=True)
        elif not self._editor.quiet:
            self._editor.prompt()

    # -- output --------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Text for a person, with plain line ends."""
        wire = "\r" * self._after_json + text.replace("\n", "\r\n")
        if text and self._write(wire.encode(), Reader.PERSON):
            self._at_margin, self._after_json = text.endswith("\n"), False

    def _say_line(self, text: str) -> None:
        """Lines of their own."""
        self._say("\n" * (not self._at_margin) + text + "\n" * bool(text))

    def _write_json(self, message: Outgoing) -> None:
        if self._write(b"\r\n" * (not self._at_margin) + to_line(message) + b"\n", Reader.PROGRAM):
            self._at_margin = self._after_json = True
            self._editor.cover()
