"""Decode and prefill beside the peer, with one thread and with two."""

from collections.abc import Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from tools.bench.ours import Skerry, open_sessions
from tools.bench.peer import LlamaCpp
from tools.bench.picture import bars, colour
from tools.bench.report import Outcome, Panel, Row, Values, compare, middle
from tools.bench.setting import Setting, in_turn, threads_text

_LENGTHS = (64, 256, 512, 1000)
_PROMPTS = (128, 512)
_MAX_TOKENS = 1152
_STEPS = 16

Measured = dict[tuple[int, int], Values]
"""By (threads, n)."""


def measure(setting: Setting) -> Outcome:
    decode: Measured = {}
    prefill: Measured = {}
    absent: Values = {peer.label: [] for peer in setting.peers if peer.path is None}
    for threads in setting.threads:
        contenders = _open(setting, threads)
        for n in _LENGTHS[:1] if setting.quick else _LENGTHS:  # upwards: each fill adds to the one before
            for contender in contenders:
                contender.fill(n)
            task = methodcaller("decode_ms", n, _STEPS)
            decode[threads, n] = {**in_turn(_decode_name(threads, n), contenders, setting.pick(12, 2), task), **absent}
        for n in _PROMPTS[:1] if setting.quick else _PROMPTS:
            task, rounds = methodcaller("prefill_rate", n), setting.pick(3 + 512 // n, 1)
            prefill[threads, n] = {**in_turn(_prefill_name(threads, n), contenders, rounds, task), **absent}
    rows: list[Row] = []
    for key, values in decode.items():
        rows += compare(_decode_name(*key), "ms/token", values)
    for key, values in prefill.items():
        rows += compare(_prefill_name(*key), "tokens/s", values, lower_is_better=False)
    panels = [
        Panel("Decode, ms per token (lower is better)", partial(_draw_decode, decode)),
        Panel("Prefill, tokens per second (higher is better)", partial(_draw_prefill, prefill)),
    ]
    return Outcome(rows, panels)


def _open(setting: Setting, threads: int) -> Sequence[Skerry | LlamaCpp]:
    ours = Skerry(setting.model, open_sessions(setting.model, threads, setting.cache), _MAX_TOKENS)
    peers = [LlamaCpp(peer.label, peer.path, threads, _MAX_TOKENS) for peer in setting.peers if peer.path]
    return [ours, *peers]


def _decode_name(threads: int, n: int) -> str:
    return f"decode, {threads_text(threads)}, n={n}"


def _prefill_name(threads: int, n: int) -> str:
    return f"prefill, {threads_text(threads)}, {n} tokens"


def _draw_decode(measured: Measured, axes: Any) -> None:
    for threads in sorted({threads for threads, _ in measured}):
        lengths = [n for t, n in measured if t == threads]
        for label, values in measured[threads, lengths[0]].items():
            if values:
                ms = [middle(measured[threads, n][label]) for n in lengths]
                style, title = ("-" if threads == 1 else "--"), f"{label}, {threads_text(threads)}"
                axes.plot(lengths, ms, style, marker="o", color=colour(label), label=title)
    axes.set_xlabel("tokens in the slot")
    axes.set_xticks(sorted({n for _, n in measured}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="x-small")


def _draw_prefill(measured: Measured, axes: Any) -> None:
    groups = {f"{n} tokens\n{threads_text(threads)}": values for (threads, n), values in measured.items()}
    bars(axes, {group: {label: middle(v) for label, v in values.items()} for group, values in groups.items()})
