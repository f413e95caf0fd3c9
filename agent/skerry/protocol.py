"""The messages between a client and the board: JSON objects, the same on the serial line and over MQTT. Pure.

A message is one object with a `type`; on the serial line it is one line. `v` is the version of the protocol, 1 when it
is left out. Unknown fields are refused, so that a misspelt option is not silently ignored. docs/protocol.md shows every
message; its examples are tested.
"""

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from skerry.core import Message, Result, Sampling
from skerry.errors import SkerryError

VERSION = 1

Name = Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*\Z")]
"""What names a request or a session: it becomes a part of topics and logs."""

_MAX_STOPS = 16
_DAY_S = 86_400


class Code(StrEnum):
    """Why a message was not served; stable, for programs."""

    BAD_MESSAGE = "bad_message"  # not JSON, an unknown type or field, a wrong type or range
    TOO_LARGE = "too_large"  # the line, the payload or the prompt is beyond a limit
    BUSY = "busy"  # the queue is full, or this client has too many requests: see retry_after_s
    DUPLICATE = "duplicate"  # a request with this id is under way
    UNKNOWN = "unknown"  # there is no such request or session
    UNAVAILABLE = "unavailable"  # not in this state, or not with this configuration
    FAILED = "failed"  # it was begun and failed
    SHUTDOWN = "shutdown"  # the service is stopping


class ProtocolError(SkerryError):
    """A message that cannot be served; `id` is the request's where it could be told."""

    def __init__(
        self, code: Code, message: str, hint: str = "", request_id: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message, hint)
        self.code, self.id, self.retry_after_s = code, request_id, retry_after_s

    def reply(self) -> "Error":
        return Error(
            id=self.id or None,
            code=self.code,
            message=self.message,
            hint=self.hint or None,
            retry_after_s=self.retry_after_s or None,
        )


class _In(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    v: int = VERSION


class Ask(_In, frozen=True, kw_only=True, tag="ask"):
    """A question. Either `text`, which goes on with the session's conversation when a session is named, or `messages`,
    a whole conversation of its own. What is left out is taken from the configuration."""

    id: Name | None = None
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    session: Name | None = None
    stream: bool = True
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    sampling: Sampling | None = None
    stop: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(max_length=_MAX_STOPS)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=_DAY_S)] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if self.messages is not None and self.session is not None:
            raise ValueError("messages are a conversation of their own: leave out session")


class Cancel(_In, frozen=True, kw_only=True, tag="cancel"):
    """End one of this client's requests early; its `done` comes with reason `cancelled`."""

    id: Name


class GetStatus(_In, frozen=True, kw_only=True, tag="status"):
    """What the board is doing."""


class GetSessions(_In, frozen=True, kw_only=True, tag="sessions"):
    """The conversations that the board keeps for this client."""


class Reset(_In, frozen=True, kw_only=True, tag="reset"):
    """Forget a conversation; without a name, all of the client's."""

    session: Name | None = None


class GetLimits(_In, frozen=True, kw_only=True, tag="limits"):
    """The limits in force."""


class Compact(_In, frozen=True, kw_only=True, tag="compact"):
    """Shrink a conversation in memory now."""

    session: Name | None = None


class Reload(_In, frozen=True, kw_only=True, tag="reload"):
    """Read the configuration again."""


Incoming = Ask | Cancel | GetStatus | GetSessions | Reset | GetLimits | Compact | Reload


class _Out(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    pass


class TokenText(_Out, frozen=True, kw_only=True, tag="token"):
    """A piece of an answer, whole characters; `seq` counts from 0 within the answer."""

    id: str
    seq: int
    text: str


class Answer(_Out, frozen=True, kw_only=True, tag="done"):
    """The end of an answer; `result` is what `skerry ask --json` prints."""

    id: str
    session: str | None = None
    result: Result


class Part(_Out, frozen=True, kw_only=True, tag="part"):
    """A piece of a message that is larger than the transport takes: the `text` of all parts, 0 to `of` - 1, joined, is
    the message. `id` is the message's, when it has one."""

    id: str | None = None
    part: int
    of: int
    text: str


class Error(_Out, frozen=True, kw_only=True, tag="error"):
    """A message was not served, or a request failed. `id` is the request's, when there is one."""

    code: Code
    message: str
    id: str | None = None
    hint: str | None = None
    retry_after_s: float | None = None


class Ok(_Out, frozen=True, kw_only=True, tag="ok"):
    """A command was carried out; `did` says what, `notes` what there is to know about it."""

    did: str
    notes: tuple[str, ...] = ()


class Status(_Out, frozen=True, kw_only=True, tag="status", omit_defaults=False):
    """What the board is doing. `state`: idle, busy or stopping; times in seconds, memory in bytes."""

    v: int = VERSION
    version: str
    node: str
    model: str
    state: str
    uptime_s: float
    waiting: int
    answering: int
    slots: tuple[int, ...]
    """Tokens in each slot."""
    slot_tokens: int
    """Tokens that a slot can hold."""
    answered: int
    failed: int
    tokens_generated: int
    tokens_per_s: float
    """Of the last answer; 0 before the first."""
    memory: dict[str, int]


class SessionInfo(Struct, frozen=True, kw_only=True):
    session: str
    turns: int
    characters: int
    idle_s: float


class Sessions(_Out, frozen=True, kw_only=True, tag="sessions", omit_defaults=False):
    sessions: tuple[SessionInfo, ...]


class LimitsInForce(_Out, frozen=True, kw_only=True, tag="limits", omit_defaults=False):
    """max_tokens: of an answer, unless the request says less; slot_tokens: of a conversation; queue: requests that may
    wait; per_client: requests that one client may have; prompt_bytes: of one message."""

    max_tokens: int
    slot_tokens: int
    slots: int
    queue: int
    per_client: int
    prompt_bytes: int


Outgoing = TokenText | Answer | Part | Error | Ok | Status | Sessions | LimitsInForce

_decoder = msgspec.json.Decoder(Incoming)
_outgoing = msgspec.json.Decoder(Outgoing)
_encoder = msgspec.json.Encoder()


class _Envelope(Struct):
    """What can be told of a message that cannot be read."""

    id: str | None = None
    v: int = VERSION


def parse(line: bytes) -> Incoming:
    """One message from a client. Raises ProtocolError, with the request's id where there is one."""
    try:
        message = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        envelope = _envelope(line)
        if envelope.v != VERSION:
            raise _wrong_version(envelope) from None
        raise ProtocolError(
            Code.BAD_MESSAGE, f"not understood: {error}", "docs/protocol.md shows every message", envelope.id or ""
        ) from None
    if message.v != VERSION:
        raise _wrong_version(_envelope(line))
    return message


def parse_outgoing(line: bytes) -> Outgoing:
    """One message from the board, for a client. Raises ProtocolError."""
    try:
        return _outgoing.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(Code.BAD_MESSAGE, f"not understood: {error}") from None


def to_line(message: Outgoing | Incoming) -> bytes:
    """A message as one line of JSON in UTF-8, without the line's end."""
    return _encoder.encode(message)


def _wrong_version(envelope: _Envelope) -> ProtocolError:
    return ProtocolError(
        Code.BAD_MESSAGE, f"version {envelope.v} of the protocol; this board speaks {VERSION}", "", envelope.id or ""
    )


def _envelope(line: bytes) -> _Envelope:
    try:
        found = msgspec.json.decode(line, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Envelope()
    return found if len(found.id or "") <= 64 else _Envelope(v=found.v)
