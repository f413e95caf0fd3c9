"""The conversation of a person at a terminal, with the model in this process or with a board far away."""

import itertools
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from skerry.config import Config
from skerry.core import Done, Message, Reason, Request, Result, Role
from skerry.engine import Engine
from skerry.errors import SkerryError
from skerry.protocol import Answer, Ask, Cancel, Code, Error, GetStatus, Ok, Outgoing, Reset, Status, TokenText
from skerry.remote import Link
from skerry.terminal import Terminal

HELP = """\
/help     this
/reset    forget the conversation
/status   what is in memory
/quit     leave (as does Ctrl-D); Ctrl-C ends an answer"""
_STATUS_PERIOD_S = 0.2
_PATIENCE_S = 120.0
"""How long a board may be silent before its answer is given up."""


class Talker(Protocol):
    """Who answers."""

    def ask(self, text: str) -> Iterator[str | Result]:
        """Pieces of the answer, empty ones while time passes, and its result at last. Raises SkerryError."""

    def cancel(self) -> None:
        """End the answer that is under way; its result still comes."""

    def reset(self) -> None:
        """Forget the conversation."""

    def status(self) -> str:
        """What is in memory, in words."""


class LocalTalker:
    """The engine in this process."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine, self._config = engine, config
        self._history: list[Message] = []
        self._number = 0

    def ask(self, text: str) -> Iterator[str | Result]:
        question = Message(Role.USER, text)
        self._number = self._engine.add(request(self._config, [*self._history, question]))
        while True:
            for event in self._engine.step():
                if not isinstance(event, Done):
                    yield event.text
                elif event.error:
                    raise SkerryError(event.error)
                else:
                    self._history += [question, Message(Role.ASSISTANT, event.result.text)]
                    yield event.result
                    return
            yield ""

    def cancel(self) -> None:
        self._engine.cancel(self._number)

    def reset(self) -> None:
        self._history.clear()

    def status(self) -> str:
        return _arena(self._engine.used(), self._engine.capacity)


class RemoteTalker:
    """A board at the other end of a link; it remembers the conversation."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._session = f"chat-{time.time_ns() % 10**9}"
        self._ids = (f"{self._session}.{number}" for number in itertools.count(1))
        self._id = ""

    def ask(self, text: str) -> Iterator[str | Result]:
        self._id = next(self._ids)
        self._link.send(Ask(id=self._id, text=text, session=self._session))
        heard = time.monotonic()
        while time.monotonic() - heard < _PATIENCE_S:
            match self._link.receive(_STATUS_PERIOD_S):
                case TokenText() as piece if piece.id == self._id:
                    heard = time.monotonic()
                    yield piece.text
                case Answer() as answer if answer.id == self._id:
                    yield answer.result
                    return
                case Error() as error if error.id in (self._id, None):
                    raise _as_error(error)
                case _:
                    yield ""
        raise SkerryError("the board does not answer", "is its service running, and this the right port or node?")

    def cancel(self) -> None:
        self._link.send(Cancel(id=self._id))

    def reset(self) -> None:
        self._link.send(Reset(session=self._session))
        with suppress(_UnknownError):  # nothing was asked yet
            self._wait_for(Ok)

    def status(self) -> str:
        self._link.send(GetStatus())
        status = self._wait_for(Status)
        assert isinstance(status, Status)
        return f"{status.node}: {status.model}, {status.state}, {_arena(list(status.slots), status.slot_tokens)}"

    def _wait_for(self, kind: type[Outgoing]) -> Outgoing:
        end = time.monotonic() + _PATIENCE_S / 10
        while time.monotonic() < end:
            message = self._link.receive(_STATUS_PERIOD_S)
            if isinstance(message, kind):
                return message
            if isinstance(message, Error):
                raise _as_error(message)
        raise SkerryError("the board does not answer", "is its service running, and this the right port or node?")


def request(config: Config, messages: list[Message]) -> Request:
    """A request with the configuration's system prompt and sampling."""
    system = [Message(Role.SYSTEM, config.chat.system_prompt)] if config.chat.system_prompt else []
    return Request((*system, *messages), config.chat.max_tokens, config.sampling, config.chat.stop)


def converse(talker: Talker, terminal: Terminal) -> None:
    """Read questions and show answers until the person leaves. Raises SkerryError when the talker is lost."""
    terminal.catch_interrupts()
    terminal.line("Type a question; /help for more.")
    terminal.status(talker.status())
    while True:
        try:
            text = terminal.read("> ").strip()
        except EOFError:
            terminal.line("")
            return
        except KeyboardInterrupt:
            terminal.line("\n(Ctrl-D or /quit leaves)")
            continue
        try:
            match text:
                case "":
                    continue
                case "/quit":
                    return
                case "/help":
                    terminal.line(HELP)
                case "/reset":
                    talker.reset()
                    terminal.line("(a new conversation)")
                case "/status":
                    terminal.line(talker.status())
                case _ if text.startswith("/"):
                    terminal.line(f"{text.split()[0]}: no such command\n{HELP}")
                case _:
                    _answer(talker, text, terminal)
        except SkerryError as error:
            terminal.line(f"{error}")


def _answer(talker: Talker, text: str, terminal: Terminal) -> None:
    """Stream one answer with a live status; Ctrl-C ends it early."""
    begin = shown = time.monotonic()
    count = 0
    for piece in talker.ask(text):
        if not isinstance(piece, str):
            terminal.line("")
            terminal.status(_summary(piece))
            return
        count += bool(piece)
        terminal.write(piece)
        if (now := time.monotonic()) - shown > _STATUS_PERIOD_S:
            shown = now
            terminal.status(f"{count} pieces in {now - begin:.1f} s, {count / (now - begin):.1f} per second")
        if terminal.interrupted():
            talker.cancel()


def _summary(result: Result) -> str:
    tokens, times = result.tokens, result.timings_ms
    seconds = (times.total - times.first) / 1000
    speed = f"{(tokens.generated - 1) / seconds:.1f} tokens/s" if seconds > 0 and tokens.generated > 1 else "-"
    parts = [
        f"{tokens.generated} tokens",
        speed,
        f"first after {times.first / 1000:.2f} s",
        f"prompt {tokens.prompt} ({tokens.reused} reused)",
        f"conversation {tokens.prompt + tokens.generated} tokens",
    ]
    notes = [] if result.reason == Reason.STOP else [f"ended by {result.reason}"]
    return " | ".join(parts + notes + ["older turns left out"] * result.truncated)


def _arena(used: list[int], capacity: int) -> str:
    return f"arena {', '.join(f'{tokens}/{capacity}' for tokens in used)} tokens"


class _UnknownError(SkerryError):
    """The board does not know what was named."""


def _as_error(error: Error) -> SkerryError:
    again = f"try again in {error.retry_after_s:g} s" if error.retry_after_s else ""
    kind = _UnknownError if error.code == Code.UNKNOWN else SkerryError
    return kind(error.message, "; ".join(part for part in (error.hint, again) if part))
