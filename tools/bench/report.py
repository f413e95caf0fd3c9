"""Rows of the report, and how rounds become rows. Knows nothing of what is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from msgspec import Struct


class Row(Struct, frozen=True):
    """One line of report.json. `ratio` says how many times better ours is; null is a figure that could not be had."""

    name: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    command: str = ""


@dataclass(frozen=True)
class Panel:
    """A part of the picture; `draw` is given matplotlib's Axes."""

    title: str
    draw: Callable[[Any], None]


@dataclass
class Outcome:
    """What a bench hands back."""

    rows: list[Row] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)


Values = Mapping[str, Sequence[float]]
"""By contender, one value for each round; empty for one that is not here."""


def compare(name: str, unit: str, values: Values, lower_is_better: bool = True) -> list[Row]:
    """A row for each contender after the first, which is ours: medians of both, and the median of the ratios."""
    (_, ours), *peers = values.items()
    rows = []
    for peer, theirs in peers:
        pairs = zip(ours, theirs, strict=True) if theirs else ()
        ratios = [b / a if lower_is_better else a / b for a, b in pairs]
        rows.append(Row(name, middle(ours), unit, peer, middle(theirs), middle(ratios)))
    return rows


def middle(values: Sequence[float]) -> float | None:
    """The median to four digits; None of nothing."""
    return float(f"{median(values):.4g}") if values else None


def table(rows: Sequence[Row]) -> str:
    """Plain text, aligned; a name and its value are printed once for several peers."""
    cells = [("", "ours", "", "peer", "", "ratio")]
    last = ""
    for row in rows:
        name = row.name if row.name != last else ""
        last = row.name
        value = _number(row.value) if name else ""
        peer_value = _number(row.peer_value) if row.peer else ""
        ratio = _number(row.ratio) if row.peer else ""
        cells.append((name, value, row.unit if name else "", row.peer or "", peer_value, ratio))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    right = {1, 4, 5}
    return "\n".join(
        "  ".join(
            text.rjust(w) if i in right else text.ljust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
