"""The memory of a process of each contender, by kind, and ours against the tokens that it generated."""

from dataclasses import replace
from functools import partial
from shutil import rmtree
from statistics import linear_regression
from typing import Any

import numpy as np

from skerry.host import KIB
from tools.bench.child import MAX_TOKENS, Memory, spawn
from tools.bench.jobs import Jobs
from tools.bench.picture import colour
from tools.bench.question import OURS
from tools.bench.report import Outcome, Panel, Row, compare
from tools.bench.setting import Setting, progress

_MB = 1e6
_WARM_TOKENS = 500
"""Samples before it are left out of the slope, where there are enough."""


def measure(setting: Setting) -> Outcome:
    jobs = Jobs(setting, threads=1)
    fresh = setting.out / "fresh-cache"
    rmtree(fresh, ignore_errors=True)
    tokens = setting.pick(4000, 150)
    packing = replace(jobs.ours, label=f"{OURS}, first start (packs its weights)", cache=fresh.absolute())
    mapped = replace(packing, label=f"{OURS}, weights mapped", endless=tokens, every=setting.pick(250, 50))
    heap = replace(jobs.ours, label=f"{OURS}, weights on the heap", cache=None)
    heard = {job.label: spawn(job) for job in progress("memory by kind", [packing, mapped, heap, *jobs.peers])}
    rmtree(fresh, ignore_errors=True)

    found = {label: child.memory for label, child in heard.items()}
    rows: list[Row] = []
    for form in (packing, mapped, heap):
        for kind in ("peak",) if form is packing else ("peak", "anonymous", "file"):
            of_peers = {job.label: [getattr(found[job.label], kind) / _MB] for job in jobs.peers}
            values = {OURS: [getattr(found[form.label], kind) / _MB], **of_peers, **jobs.absent}
            rows += compare(f"{kind} memory, {form.label.removeprefix(f'{OURS}, ')}", "MB", values)
    samples = heard[mapped.label].samples
    warm = [sample for sample in samples if sample[0] >= _WARM_TOKENS] or samples
    slope = linear_regression(*zip(*warm, strict=True)).slope * 1000 / KIB
    rows.append(Row(f"memory growth over {tokens} tokens", round(slope, 1), "KB per 1,000 tokens"))
    return Outcome(
        rows,
        [
            Panel(
                f"Memory of a process by kind, MB ({MAX_TOKENS} tokens; lower is better)", partial(_draw_kinds, found)
            ),
            Panel("Anonymous memory against tokens generated, MB", partial(_draw_growth, samples, slope)),
        ],
    )


def _draw_kinds(found: dict[str, Memory], axes: Any) -> None:
    kinds = {
        "keys and values": [memory.kv for memory in found.values()],
        "other anonymous": [memory.anonymous - memory.kv for memory in found.values()],
        "mapped files (the kernel can drop them)": [memory.file for memory in found.values()],
    }
    base, places = np.zeros(len(found)), np.arange(len(found))
    for (kind, sizes), shade in zip(kinds.items(), ("#16425b", "#3a7ca5", "#b9d3e0"), strict=True):
        heights = np.array(sizes) / _MB
        drawn = axes.bar(places, heights, 0.6, base, label=kind, color=shade)
        axes.bar_label(drawn, fmt="{:.0f}", fontsize="x-small", label_type="center")
        base += heights
    peaks = [memory.peak / _MB for memory in found.values()]
    axes.hlines(peaks, places - 0.4, places + 0.4, color="black", label="peak")
    axes.set_xticks(places, [label.replace(", ", "\n").replace(" (", "\n(") for label in found], fontsize="x-small")
    axes.margins(y=0.25)
    axes.legend(fontsize="x-small", loc="upper left")


def _draw_growth(samples: list[tuple[int, int]], slope: float, axes: Any) -> None:
    tokens, sizes = zip(*samples, strict=True)
    axes.plot(
        tokens, [size / _MB for size in sizes], marker="o", color=colour(OURS), label=f"{slope:.1f} KB per 1,000 tokens"
    )
    axes.set_xlabel("tokens generated")
    axes.set_ylim(0, max(sizes) / _MB * 1.3)
    axes.legend()
