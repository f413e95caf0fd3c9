"""What every bench is given, and the rounds in which contenders take their turn."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tqdm import tqdm

from skerry.modelfile import ModelFolder

ROOT = Path(__file__).parents[2]

_REST_S = 0.02
"""Before each turn: worker threads of the one before may still be spinning."""


@dataclass(frozen=True)
class PeerFile:
    """A file that llama.cpp runs; `path` is None when it, or llama.cpp, could not be had."""

    label: str
    path: Path | None


@dataclass(frozen=True)
class Setting:
    """The model, the peer's files, and how long to measure."""

    model: ModelFolder
    peers: tuple[PeerFile, ...]
    out: Path
    quick: bool

    @property
    def cache(self) -> Path:
        """Where our prepacked weights are."""
        return self.out / "cache"

    @property
    def threads(self) -> tuple[int, ...]:
        """Numbers of threads to measure with."""
        return (1, 2) if len(os.sched_getaffinity(0)) > 1 and not self.quick else (1,)

    def pick(self, full: int, quick: int) -> int:
        """A count of rounds or tokens, for a full or a quick run."""
        return quick if self.quick else full


class Labelled(Protocol):
    @property
    def label(self) -> str: ...


L = TypeVar("L", bound=Labelled)
T = TypeVar("T")


def in_turn(title: str, contenders: Sequence[L], count: int, measure: Callable[[L], float]) -> dict[str, list[float]]:
    """By contender, `count` values, measured one after the other in each round; who begins changes with every round."""
    values: dict[str, list[float]] = {contender.label: [] for contender in contenders}
    for number in progress(title, range(count)):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            time.sleep(_REST_S)
            values[contender.label].append(measure(contender))
    return values


def progress(title: str, items: Sequence[T]) -> Iterable[T]:
    """A bar over `items` while they are worked on; nothing where the terminal is none."""
    bar: Iterable[T] = tqdm(
        items, desc=title, leave=False, disable=None, bar_format="{desc:45} {bar:30} {n}/{total} {elapsed}"
    )
    return bar


def threads_text(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"
