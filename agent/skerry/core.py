"""Frozen values that the parts hand to each other. Knows nothing of text, tensors or files."""

from enum import StrEnum
from functools import cache
from typing import Annotated

from msgspec import Meta, Struct, inspect

from skerry.errors import RequestError

BLOCK = 128
"""Tokens per block: prefill chunks end at absolute multiples of it, and the store keeps whole ones."""


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


class Reason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # the request's max_tokens
    CAPACITY = "capacity"  # the slot is full: a clean stop at the hard limit
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the request's deadline_s
    ERROR = "error"


class Message(Struct, frozen=True):
    role: Role
    content: str


Number = inspect.IntType | inspect.FloatType


def in_range(value: float, kind: Number) -> bool:
    """Whether a value lies in the range that `msgspec.Meta` gave its type; NaN never does."""
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
        and value == value
    )


def range_text(kind: Number) -> str:
    """The range of a type in words: `between 0 and 1`, `above 0 and at most 1`, `0 or more`; empty when it has none."""
    if kind.ge is not None and kind.le is not None:
        return f"between {kind.ge} and {kind.le}"
    words = ((kind.gt, "above {}"), (kind.ge, "at least {}"), (kind.le, "at most {}"), (kind.lt, "below {}"))
    return " and ".join(text.format(bound) for bound, text in words if bound is not None)


class Sampling(Struct, frozen=True):
    """How the next token is chosen from the logits. The defaults are greedy.

    The annotations are the only source of the ranges: the configuration, its documents and the check below read them.
    top_p: Holtzman et al. 2019 (nucleus); min_p: Nguyen et al. 2024; repetition_penalty: Keskar et al. 2019 (CTRL).

    Raises RequestError when a value is out of range.
    """

    temperature: Annotated[
        float, Meta(ge=0, le=10, description="Spread of the choice between tokens; 0 always takes the likeliest one.")
    ] = 0.0
    top_k: Annotated[
        int, Meta(ge=0, le=1_000_000, description="Choose among this many likeliest tokens; 0 keeps all.")
    ] = 0
    top_p: Annotated[
        float, Meta(gt=0, le=1, description="Choose among the likeliest tokens that together reach this probability.")
    ] = 1.0
    min_p: Annotated[
        float, Meta(ge=0, le=1, description="Drop tokens below this share of the likeliest one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(ge=0.1, le=10, description="Above 1 makes tokens that were already used less likely; 1 is none.")
    ] = 1.0
    seed: (
        Annotated[
            int, Meta(ge=0, le=2**63 - 1, description="Makes the random choice repeatable; null draws one per request.")
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        for name, kind in _sampling_numbers().items():
            value = getattr(self, name)
            if value is not None and not in_range(value, kind):
                raise RequestError(f"sampling.{name}: {value} is out of range", f"use a value {range_text(kind)}")


@cache
def _sampling_numbers() -> dict[str, Number]:
    """The number type of each field of Sampling, without its description and its None."""
    info = inspect.type_info(Sampling)
    assert isinstance(info, inspect.StructType)
    numbers: dict[str, Number] = {}
    for field in info.fields:
        for part in field.type.types if isinstance(field.type, inspect.UnionType) else (field.type,):
            kind = part.type if isinstance(part, inspect.Metadata) else part
            if isinstance(kind, Number):
                numbers[field.name] = kind
    return numbers


class Request(Struct, frozen=True):
    """One question: the whole conversation so far, and how to answer it."""

    messages: tuple[Message, ...]
    max_tokens: int = 256
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()


class TokenCounts(Struct, frozen=True):
    prompt: int = 0
    reused: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0


class Timings(Struct, frozen=True):
    """Milliseconds since the request was added, but `queue`: before its prefill began; `prefill`: its prefill alone."""

    queue: float = 0.0
    prefill: float = 0.0
    first: float = 0.0
    total: float = 0.0


class Result(Struct, frozen=True):
    """The one shape of an answer: `ask --json`, the done message, the bench and the log all use it."""

    text: str
    reason: Reason
    tier: str
    compacted: bool
    truncated: bool
    tokens: TokenCounts
    timings_ms: Timings


class Token(Struct, frozen=True):
    """A piece of an answer: whole UTF-8 characters, possibly of several tokens."""

    request: int
    text: str


class Done(Struct, frozen=True):
    """The end of a request; `error` is set when its reason is `error`."""

    request: int
    result: Result
    error: str = ""


Event = Token | Done
