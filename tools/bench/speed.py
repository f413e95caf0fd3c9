"""Decode and prefill beside the peer, with one thread and with two."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tools.bench.ours import Skerry, open_sessions
from tools.bench.peer import LlamaCpp
from tools.bench.picture import colour
from tools.bench.report import Outcome, Panel, compare
from tools.bench.setting import Setting, in_turn, threads_text

_LENGTHS = (64, 256, 512, 1000)
_PROMPTS = (128, 512)
_MAX_TOKENS = 1152
_STEPS = 16

Series = dict[tuple[int, int], dict[str, list[float]]]
"""(threads, n) -> by contender, one value for each round."""


def measure(setting: Setting) -> Outcome:
    decode, prefill = Series(), Series()
    for threads in setting.threads:
        with _opened(setting, threads) as contenders:
            for n in _LENGTHS[:2] if setting.quick else _LENGTHS:
                title = f"decode, {threads_text(threads)}, n={n}"
                for contender in contenders:
                    contender.fill(n)
                decode[threads, n] = in_turn(
                    title,
                    contenders,
                    setting.pick(16, 2),
                    lambda c, n=n: c.decode_ms(n, _STEPS),  # type: ignore[misc]
                )
            for n in _PROMPTS[:1] if setting.quick else _PROMPTS:
                title = f"prefill, {threads_text(threads)}, {n} tokens"
                prefill[threads, n] = in_turn(
                    title,
                    contenders,
                    setting.pick(1024 // n + 4, 1),
                    lambda c, n=n: c.prefill_rate(n),  # type: ignore[misc]
                )
    outcome = Outcome()
    absent: dict[str, list[float]] = {peer.label: [] for peer in setting.peers if peer.path is None}
    for (threads, n), values in decode.items():
        outcome.rows += compare(f"decode, {threads_text(threads)}, n={n}", "ms/token", values | absent)
    for (threads, n), values in prefill.items():
        name = f"prefill, {threads_text(threads)}, {n} tokens"
        outcome.rows += compare(name, "tokens/s", values | absent, lower_is_better=False)
    return outcome
