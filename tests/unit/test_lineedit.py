"""The lines of a serial port: what is told apart, what a person sees, and that no bytes whatever break it."""

import itertools
import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.transport.lineedit import PROMPT, Kind, Line, LineEditor, harmless


class Typist:
    """Feeds an editor; `lines` is what came out, `display` what a terminal would show of it."""

    def __init__(self, limit: int = 1000) -> None:
        self.lines: list[Line] = []
        self.echo = ""
        self.editor = LineEditor(limit, self._show)

    def _show(self, text: str) -> None:
        self.echo += text

    def type(self, *pieces: bytes) -> "Typist":
        for piece in pieces:
            self.lines += self.editor.feed(piece)
        return self

    @property
    def texts(self) -> list[bytes]:
        return [line.data for line in self.lines if line.kind == Kind.TEXT]

    @property
    def display(self) -> str:
        """The last line of a terminal of wide characters: each takes its columns, \\b steps back one."""
        cells: list[str] = []
        at = 0
        for character in self.echo.rpartition("\n")[2]:
            if character == "\b":
                at -= 1
                continue
            if unicodedata.combining(character):
                cells[at - 1] += character
                continue
            wide = character in "你好🦭"
            cells[at : at + 1 + wide] = [character, ""][: 1 + wide]
            at += 1 + wide
        return "".join(cells).rstrip(" ") if at else ""


def typed(*pieces: bytes, limit: int = 1000) -> Typist:
    return Typist(limit).type(*pieces)


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
def test_every_line_end_ends_one_line(end: bytes) -> None:
    assert typed(b"a" + end + b"b" + end).texts == [b"a", b"b"]
    assert typed(b"a", end[:1], end[1:], b"b" + end).texts == [b"a", b"b"]
    assert typed(b"a" + end + end + b"b" + end).texts == [b"a", b"", b"b"]


def test_machine_and_human_lines_are_told_apart_by_the_first_character() -> None:
    lines = typed(b'{"a": 1}\n hello {\r \t {"b": 2}  \n{\n').lines
    assert lines == [
        Line(Kind.JSON, b'{"a": 1}'),
        Line(Kind.TEXT, b"hello {"),
        Line(Kind.JSON, b'{"b": 2}  '),
        Line(Kind.JSON, b"{"),
    ]


def test_a_person_sees_what_is_typed_and_a_program_does_not() -> None:
    assert typed(b"Hi", b" you").echo == f"{PROMPT}Hi you"
    assert typed(b"Hi\r").echo == f"{PROMPT}Hi\n"
    assert typed(b"  {", b'"a": 1}\n', b"{\x15{").echo == ""
    assert typed(b"\r\n\r\n").echo == ""


def test_characters_are_echoed_whole() -> None:
    whole = "Grüße 你好 🦭".encode()
    typist = Typist()
    for at in range(len(whole)):
        typist.type(whole[at : at + 1])
        typist.echo.encode()  # raises for a half
    assert typist.echo == f"{PROMPT}Grüße 你好 🦭"
    assert typist.type(b"\n").texts == [whole]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (b"Helo\x7flo", "Hello"),
        (b"Helo\b\x08llo", "Hello"),
        (b"\x7f\x7fa", "a"),
        ("你好\x7f".encode(), "你"),
        ("a🦭\x7fb".encode(), "ab"),
        ("e\u0301\x7fx".encode(), "x"),  # a mark goes with the letter it stands on
        (b"one two  \x17three", "one three"),
        (b"one\x17\x17two", "two"),
        (b"all of it\x15new", "new"),
        (b"{\x15new", "new"),
        (b"a\tb", "a b"),
        (b"a\x00\x01\x04\x0c\x1ab", "ab"),
        (b"a\x1b[A\x1b[1;5D\x1bOP\x1b[3~b", "ab"),
        (b"a\x1bxb", "ab"),
        ("a\x1bäb".encode(), "aäb"),
    ],
)
def test_editing(keys: bytes, text: str) -> None:
    for typist in (typed(keys), typed(*(keys[at : at + 1] for at in range(len(keys))))):
        assert typist.display == PROMPT + text
        assert typist.type(b"\r").texts == [text.encode()]


def test_ctrl_c_clears_the_line() -> None:
    typist = typed(b"what\x03", b'{"half\x03', b"x\r")
    assert [line.kind for line in typist.lines] == [Kind.INTERRUPT, Kind.INTERRUPT, Kind.TEXT]
    assert typist.texts == [b"x"]
    assert typist.echo == f"{PROMPT}what^C\n{PROMPT}x\n"


def test_nothing_is_edited_in_a_programs_line() -> None:
    line = b'{"a": "x\x7fy\tz\x08\x1b[A\x00"}'
    assert typed(line + b"\n").lines == [Line(Kind.JSON, line)]


def test_a_line_beyond_the_limit_is_dropped_up_to_its_end() -> None:
    for filler in (b"x", b"{", "é".encode()):
        typist = typed(*itertools.repeat(filler, 500), b"\nok\n", limit=20)
        kind = Kind.JSON_TOO_LONG if filler == b"{" else Kind.TOO_LONG
        assert typist.lines == [Line(kind), Line(Kind.TEXT, b"ok")]
    assert typed(b"x" * 20 + b"\n", limit=20).lines == [Line(Kind.TEXT, b"x" * 20)]
    assert typed(b"x" * 500 + b"\x15ok\n", limit=20).lines == [Line(Kind.TEXT, b"ok")]
    assert typed(b" " * 500 + b"ok\n", limit=20).lines == [Line(Kind.TEXT, b"ok")]


def test_a_line_that_is_not_utf_8_is_told_and_not_echoed() -> None:
    typist = typed(b"a\xff\xfeb\r", b"\xe4\xbd\r", b"\xf0\x9f\x03", b"ok\r")
    assert [line.kind for line in typist.lines] == [Kind.NOT_TEXT, Kind.NOT_TEXT, Kind.INTERRUPT, Kind.TEXT]
    assert "\ufffd" not in typist.echo
    assert typed(b'{"a": "\xff"}\n').lines == [Line(Kind.JSON, b'{"a": "\xff"}')]


def test_what_is_typed_during_an_answer_is_shown_after_it() -> None:
    typist = typed(b"question\r")
    typist.editor.pause()
    typist.echo = ""
    typist.type(b"nex", b"\x7fxt\x03", b"nothe\x7f\x7f", b"w")
    assert typist.echo == ""
    typist.editor.prompt()
    assert typist.echo == f"{PROMPT}notw"
    typist.editor.cover()
    assert typist.type(b"!").echo == f"{PROMPT}notw{PROMPT}notw!"
    assert typist.type(b"\r").texts == [b"question", b"notw!"]


def test_a_prompt_does_not_come_between_the_halves_of_a_programs_line() -> None:
    typist = typed(b'{"a"')
    typist.editor.prompt()
    assert typist.type(b": 1}\n").echo == ""


def test_controls_do_not_reach_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\x07\x9b\x7f\u202e\r\n\t\ud800é你🦭\u200d") == "a�[2Jb����\ufffd\n\t�é你🦭\u200d"
    assert typed("a\x85\u202eb".encode()).echo == f"{PROMPT}a��b"


def test_noise_neither_raises_nor_grows() -> None:
    noise = random.Random(7).randbytes(1_000_000)
    typist = Typist(limit=256)
    for at in range(0, len(noise), 1000):
        for line in typist.editor.feed(noise[at : at + 1000]):
            assert len(line.data) <= 256
    assert len(typist.echo) < len(noise) / 4
    typist.lines.clear()
    assert typist.type(b"\nfine\n").texts[-1:] == [b"fine"]


@given(st.lists(st.binary(max_size=30) | st.sampled_from([b"\r", b"\n", b"\x1b[", b"{", b"\x7f", "🦭".encode()])))
def test_how_the_bytes_are_split_does_not_matter(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    at_once, in_pieces = typed(whole, limit=40), typed(*pieces, limit=40)
    by_byte = typed(*(whole[at : at + 1] for at in range(len(whole))), limit=40)
    assert at_once.lines == in_pieces.lines == by_byte.lines
