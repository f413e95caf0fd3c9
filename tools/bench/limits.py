"""How far our decode is from what the memory allows, and what Python itself takes of a token."""

import time
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from skerry.modelfile import EMBEDDING, Manifest
from tools.bench.ours import Skerry, open_sessions
from tools.bench.picture import colour
from tools.bench.question import OURS
from tools.bench.report import Outcome, Panel, Row, middle
from tools.bench.setting import Setting, progress

_N = 64  # few rows of keys and values: nearly all that a token reads is weights
_STEPS = 16
_ARRAY_BYTES = 256 << 20  # beyond every cache


class Timed:
    """An InferenceSession that adds up the time spent in its runs."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.seconds = 0.0

    def io_binding(self) -> Any:
        return self._session.io_binding()

    def run_with_iobinding(self, binding: Any) -> None:
        start = time.perf_counter()
        self._session.run_with_iobinding(binding)
        self.seconds += time.perf_counter() - start


def measure(setting: Setting) -> Outcome:
    sessions = open_sessions(setting.model, 1, setting.cache)
    parts = sessions.body, sessions.head = Timed(sessions.body), Timed(sessions.head)
    ours = Skerry(setting.model, sessions, 1024)
    ours.fill(_N)
    weights, array = weight_bytes(setting.model.manifest), np.ones(_ARRAY_BYTES // 8, np.uint64)
    rates, tokens, own = [], [], []
    for _ in progress("memory bandwidth and Python's own time", range(setting.pick(16, 3))):
        rates.append(_read_rate(array))
        before = sum(part.seconds for part in parts)
        tokens.append(ours.decode_ms(_N, _STEPS))
        own.append(tokens[-1] - (sum(part.seconds for part in parts) - before) / _STEPS * 1e3)
    floors = [weights / rate * 1e3 for rate in rates]
    parts_ms = {
        "reading the weights\nat full bandwidth": median(floors),
        "the runtime\nbeyond that": median(tokens) - median(floors) - median(own),
        "Python": median(own),
    }
    return Outcome(
        rows=[
            Row("memory bandwidth, 1 thread reading", middle([rate / 1e9 for rate in rates]), "GB/s"),
            Row("weights read per token", middle([weights / 1e6]), "MB"),
            Row("token at the bandwidth's limit", middle(floors), "ms/token"),
            Row(
                f"of that limit reached, 1 thread, n={_N}",
                middle([floor / token * 100 for floor, token in zip(floors, tokens, strict=True)]),
                "%",
            ),
            Row("Python's own time per token", middle([part * 1e3 for part in own]), "µs"),
            Row(
                "Python's own share of a token",
                middle([part / token * 100 for part, token in zip(own, tokens, strict=True)]),
                "%",
            ),
        ],
        panels=[Panel(f"Our token, ms (1 thread, n={_N})", partial(_draw_parts, parts_ms))],
    )


def weight_bytes(manifest: Manifest) -> int:
    """Bytes of the body's and the head's weights; a tied head reads the embedding table."""
    files = manifest.files
    return files["body.bin"].bytes + files["head.bin" if "head.bin" in files else EMBEDDING].bytes


def _read_rate(array: np.ndarray[Any, np.dtype[np.uint64]]) -> float:
    """Bytes per second of one pass."""
    start = time.perf_counter()
    np.bitwise_or.reduce(array)
    return array.nbytes / (time.perf_counter() - start)


def _draw_parts(parts_ms: dict[str, float], axes: Any) -> None:
    drawn = axes.bar(list(parts_ms), list(parts_ms.values()), 0.6, color=colour(OURS))
    axes.bar_label(drawn, fmt="{:.2f}")
    axes.margins(y=0.1)
