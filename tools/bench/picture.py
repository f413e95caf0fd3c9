"""All panels on one page, and the ratios with their targets beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.bench.question import OURS
from tools.bench.report import Panel, Row

TARGETS = {"decode, 1 thread": 1.4, "decode, 2 threads": 1.25, "prefill": 2.0}
"""By the beginning of a row's name, the ratio over llama.cpp on the same file that Skerry promises."""

_COLUMNS = 2
_OURS, _SAME_FILE, _OTHER = "#0b6e99", "#d9822b", "#8a8a8a"


def colour(label: str) -> str:
    """One colour for each contender, the same in all panels."""
    return _OURS if label.startswith(OURS) else _SAME_FILE if "same file" in label else _OTHER


def bars(axes: Any, groups: Mapping[str, Mapping[str, float | None]]) -> None:
    """Upright bars: a group for each key, in it a bar for each contender that has a figure."""
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    width = 0.8 / len(labels)
    for i, label in enumerate(labels):
        known = [(x, group[label]) for x, group in enumerate(groups.values()) if group.get(label) is not None]
        places = [x + (i - (len(labels) - 1) / 2) * width for x, _ in known]
        drawn = axes.bar(places, [height for _, height in known], width, color=colour(label), label=label)
        axes.bar_label(drawn, fmt="{:.3g}", fontsize="x-small")
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize="x-small", loc="upper left")


def draw(path: Path, title: str, panels: Sequence[Panel], rows: Sequence[Row]) -> None:
    """Write a PNG: the panels in two columns, the ratios in a third."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = max(1, -(-len(panels) // _COLUMNS))
    figure = pyplot.figure(figsize=(20, 5 * lines), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(lines, _COLUMNS + 1)
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(i, _COLUMNS)])
        axes.set_title(panel.title)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        panel.draw(axes)
    if compared := [row for row in rows if row.ratio is not None]:
        _draw_ratios(figure.add_subplot(grid[:, _COLUMNS]), compared)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    names = list(dict.fromkeys(row.name for row in rows))
    peers = list(dict.fromkeys(row.peer for row in rows if row.peer))
    height = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        of_peer = {row.name: row.ratio for row in rows if row.peer == peer}
        places = [names.index(name) + (i - (len(peers) - 1) / 2) * height for name in of_peer]
        drawn = axes.barh(places, list(of_peer.values()), height, color=colour(peer), label=f"over {peer}")
        axes.bar_label(drawn, fmt="{:.2f}", fontsize="x-small", padding=3)
    for place, name in enumerate(names):
        for target in (ratio for start, ratio in TARGETS.items() if name.startswith(start)):
            axes.plot([target, target], [place - 0.45, place + 0.45], color="black", linewidth=2)
    axes.plot([], [], color="black", linewidth=2, label="target over the same file")
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.1)
    axes.set_title("How many times better (1 = equal)")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.04), ncols=3)
