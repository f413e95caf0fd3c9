"""Messages: every example of docs/protocol.md, and what is no message."""

import contextlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.protocol import (
    Ask,
    Code,
    Incoming,
    Outgoing,
    ProtocolError,
    parse,
    parse_outgoing,
    to_line,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


def examples(kind: str) -> list[str]:
    blocks = re.findall(rf"^```json {kind}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("line", examples("client"))
def test_examples_of_clients_are_messages(line: str) -> None:
    message = parse(line.encode())
    said = json.loads(line)
    for name, value in json.loads(to_line(message)).items():
        if name in said and name not in ("sampling",):
            assert value == said[name]


@pytest.mark.parametrize("line", examples("board"))
def test_examples_of_the_board_are_what_it_writes(line: str) -> None:
    assert json.loads(to_line(parse_outgoing(line.encode()))) == json.loads(line)


def test_every_type_and_code_is_documented() -> None:
    for kind, union in (("client", Incoming), ("board", Outgoing)):
        shown = {json.loads(line)["type"] for line in examples(kind)}
        assert shown == {message.__struct_config__.tag for message in union.__args__}
    for code in Code:
        assert f"| `{code}` |" in DOCUMENT
    for field in Ask.__struct_fields__:
        assert field == "v" or f"| `{field}` |" in DOCUMENT


@pytest.mark.parametrize(
    ("line", "words", "request_id"),
    [
        (b"", "not understood", ""),
        (b"{", "not understood", ""),
        (b"[]", "not understood", ""),
        (b"null", "not understood", ""),
        (b"\xff\xfe", "not understood", ""),
        (b'{"type":"nonsense","id":"a"}', "not understood", "a"),
        (b'{"type":"ask","id":"a"}', "either text or messages", "a"),
        (b'{"type":"ask","id":"a","text":"x","messages":[]}', "either text or messages", "a"),
        (b'{"type":"ask","id":"a","messages":[],"session":"s"}', "leave out session", "a"),
        (b'{"type":"ask","id":"a","txt":"x"}', "unknown field `txt`", "a"),
        (b'{"type":"ask","id":"a","text":"x","max_tokens":0}', "max_tokens", "a"),
        (b'{"type":"ask","id":"a","text":"x","sampling":{"temperature":99}}', "temperature", "a"),
        (b'{"type":"ask","id":"a","text":"x","stop":[""]}', "stop", "a"),
        (b'{"type":"ask","id":"a/b","text":"x"}', "id", "a/b"),
        (b'{"type":"ask","id":"a\\n","text":"x"}', "id", "a\n"),
        (b'{"type":"ask","id":"","text":"x"}', "id", ""),
        (b'{"type":"ask","id":5,"text":"x"}', "id", ""),
        (b'{"type":"ask","text":"\\ud800"}', "not understood", ""),
        (b'{"v":2,"type":"future","id":"a"}', "version 2", "a"),
        (b'{"v":2,"type":"ask","id":"a","text":"x"}', "version 2", "a"),
        (b"[" * 100_000, "not understood", ""),
        (b'{"type":"ask","id":"' + b"x" * 1000 + b'","text":"x"}', "id", ""),
    ],
)
def test_what_is_no_message_says_why_and_whose_it_was(line: bytes, words: str, request_id: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        parse(line)
    assert caught.value.code == Code.BAD_MESSAGE
    assert words in caught.value.message
    assert caught.value.id == request_id
    to_line(caught.value.reply())


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(line: bytes) -> None:
    try:
        parse(line)
    except ProtocolError as error:
        to_line(error.reply())


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda c: st.dictionaries(st.text(), c)))
def test_no_json_raises_anything_else(value: object) -> None:
    for line in (json.dumps(value), json.dumps({"type": "ask", "id": "a", "text": value, "stop": value})):
        with contextlib.suppress(ProtocolError):
            parse(line.encode())
