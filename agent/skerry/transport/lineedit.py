"""The lines of a serial port as they are sent or typed: bytes in, whole lines out, and the echo for a person. Pure.

CR, LF or CRLF ends a line. A line whose first character but blanks is `{` comes from a program: it is not echoed, and
nothing in it but its end, Ctrl-C and Ctrl-U has a meaning. Every other line is typed by a person, who can edit it.
Whatever comes, a line is never kept beyond its limit. Knows nothing of ports, and of what a line is for.
"""

import codecs
import re
import unicodedata
from collections.abc import Callable, Iterator
from enum import StrEnum

from msgspec import Struct

PROMPT = "> "

_TOKENS = re.compile(rb"[^\x00-\x1f\x7f]+|[\x00-\x1f\x7f]")
_TAB, _LF, _CR, _ESC = b"\t", b"\n", b"\r", b"\x1b"
_CTRL_C, _CTRL_U, _CTRL_W, _ERASE = b"\x03", b"\x15", b"\x17", (b"\b", b"\x7f")
# A key's sequence (ECMA-48, and xterm's SS3), here at most 18 bytes long so that noise cannot make one without an end.
_SEQUENCE = re.compile(rb"\x1b(?:\[(?:[ -?]{16}|[ -?]*[^ -?])|O.|[^\[O\x80-\xff]|(?=[\x80-\xff]))")
_HARMFUL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """A text from outside that cannot drive a terminal: without controls but line ends and tabs, without characters
    that turn the direction of what follows."""
    return _HARMFUL.sub("\N{REPLACEMENT CHARACTER}", text)


class Kind(StrEnum):
    JSON = "json"
    TEXT = "text"
    NOT_TEXT = "not text"  # typed, and not UTF-8
    TOO_LONG = "too long"  # typed
    JSON_TOO_LONG = "json too long"
    INTERRUPT = "interrupt"  # Ctrl-C; what was typed of the line is gone


class Line(Struct, frozen=True):
    """`data` is the line without its end and the blanks before it; empty unless it is JSON or TEXT."""

    kind: Kind
    data: bytes = b""


class LineEditor:
    """One line at a time, of at most `limit` bytes. `show` gets the echo; it has `\\n` for a new line and `\\b`."""

    def __init__(self, limit: int, show: Callable[[str], None]) -> None:
        self.quiet = False
        """No echo: something else, such as an answer, has the display."""
        self._limit, self._show = limit, show
        self._after_cr = False
        self._prompted = False
        self._shown = 0  # bytes of the line that are on the display
        self._begin()

    def feed(self, data: bytes) -> Iterator[Line]:
        """Take some bytes, split anywhere; the caller may pause and prompt between two lines."""
        for token in _TOKENS.findall(data):
            after_cr, self._after_cr = self._after_cr, token == _CR
            if token == _CR or (token == _LF and not after_cr):
                yield self._end()
            elif token == _CTRL_C:
                self._echo("^C\n")
                self._begin()
                yield Line(Kind.INTERRUPT)
            elif token == _CTRL_U:
                self._erase(0)
                self._too_long = False
            elif token == _LF or self._too_long:
                pass
            elif self._json:
                self._add(token)
            else:
                self._edit(token)

    def pause(self) -> None:
        """From now on something else has the display."""
        self.quiet = True
        self.cover()

    def prompt(self) -> None:
        """Give the display back to who types: a prompt, and what was typed meanwhile."""
        self.quiet = False
        if not (self._json or self._prompted):
            self._show(PROMPT)
            self._prompted = True
            self._echo_line()

    def cover(self) -> None:
        """Something else was written where the line is shown: show it anew when it goes on."""
        self._prompted = False
        self._shown = 0

    @property
    def _json(self) -> bool:
        return self._line[:1] == b"{"  # blanks before the first character are not kept

    def _begin(self) -> None:
        self._line = bytearray()
        self._too_long = False
        self._sequence = b""  # what came of a key's sequence
        self.cover()

    def _end(self) -> Line:
        line, too_long, json = bytes(self._line), self._too_long, self._json
        if self._prompted:
            self._echo("\n")
        self._begin()
        if too_long:
            return Line(Kind.JSON_TOO_LONG if json else Kind.TOO_LONG)
        if json:
            return Line(Kind.JSON, line)
        return Line(Kind.TEXT, line) if _is_utf8(line) else Line(Kind.NOT_TEXT)

    def _edit(self, token: bytes) -> None:
        """A key, or several characters, in a person's line."""
        if self._sequence or token == _ESC:
            self._sequence += token
            if not (whole := _SEQUENCE.match(self._sequence)):
                return
            token, self._sequence = self._sequence[whole.end() :], b""
        if token in _ERASE:
            self._erase(self._last_character())
        elif token == _CTRL_W:
            self._erase(self._line.rstrip(b" ").rfind(b" ") + 1)
        elif token == _TAB:
            self._add(b" ")
        elif token >= b" ":
            self._add(token)

    def _add(self, text: bytes) -> None:
        if not self._line:
            text = text.lstrip(b" \t")
        room = self._limit - len(self._line)
        self._too_long = len(text) > room
        self._line += text[:room]
        self._echo_line()

    def _erase(self, begin: int) -> None:
        """Delete the line from a byte on."""
        if begin < self._shown:
            self._echo("\b \b" * _columns(self._line[begin : self._shown]))
            self._shown = begin
        del self._line[begin:]

    def _last_character(self) -> int:
        """Where the last character begins, with the marks that stand on it."""
        begin = end = len(self._line)
        while begin > 0:
            begin -= 1
            if self._line[begin] & 0xC0 != 0x80:  # not a byte within a character
                if _columns(self._line[begin:end]):
                    break
                end = begin
        return begin

    def _echo(self, text: str) -> None:
        if not (self.quiet or self._json):
            self._show(text)

    def _echo_line(self) -> None:
        """Show what is new in a person's line, as far as its characters are whole. One that is not UTF-8 is noise."""
        if self.quiet or self._json:
            return
        try:
            text, size = codecs.utf_8_decode(self._line[self._shown :], "strict", False)
        except UnicodeDecodeError:
            return
        if text:
            self._show(harmless(text) if self._prompted else PROMPT + harmless(text))
            self._prompted = True
            self._shown += size


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _columns(shown: bytearray) -> int:
    """How many columns a part of the line takes on the display (Unicode Standard Annex 11)."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf") else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in harmless(shown.decode(errors="replace"))
    )
