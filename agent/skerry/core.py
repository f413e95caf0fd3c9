"""Frozen values that the parts hand to each other. Knows nothing of text, tensors or files."""

from enum import StrEnum

from msgspec import Struct

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
    ERROR = "error"


class Message(Struct, frozen=True):
    role: Role
    content: str


class Sampling(Struct, frozen=True):
    """How the next token is chosen from the logits. The defaults are greedy.

    temperature: 0 is greedy (argmax); top_k: 0 keeps all; top_p: 1 keeps all (Holtzman et al. 2019, nucleus);
    min_p: keep tokens of at least this share of the best one's probability (Nguyen et al. 2024);
    repetition_penalty: 1 is none (Keskar et al. 2019, CTRL); seed: None draws one per request.

    Raises RequestError when a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, ok, want in (
            ("temperature", 0.0 <= self.temperature <= 10.0, "between 0 and 10"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("repetition_penalty", 0.1 <= self.repetition_penalty <= 10.0, "between 0.1 and 10"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2^63 - 1"),
        ):
            if not ok:
                raise RequestError(f"sampling.{name}: {getattr(self, name)} is out of range", f"use a value {want}")


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
