"""Several conversations at once: tokens per second over 1, 2 and 4 slots, and the CPU time of an answer."""

import time
from functools import partial
from typing import Any

from skerry.arena import Arena, Layout
from skerry.decoder import Decoder
from tools.bench.ours import open_sessions
from tools.bench.picture import bars
from tools.bench.report import Outcome, Panel, Row, Values, middle
from tools.bench.setting import Setting, in_turn, threads_text

_SLOTS = (1, 2, 4)
_N = 128
_STEPS = 16
_ANSWER = 32


class Batch:
    """A decode over the first slots of a shared arena, each holding about 128 tokens."""

    def __init__(self, decoder: Decoder, slots: int) -> None:
        self.label = f"{slots} slot{'s' if slots > 1 else ''}"
        self.slots = slots
        self._decoder = decoder

    def rate(self, clock: Any = time.perf_counter) -> float:
        """Tokens per second, over all slots together."""
        for slot in range(self.slots):
            self._decoder.arena.claim(slot, _N + slot)
        start = clock()
        for step in range(_STEPS):
            self._decoder.decode(0, [step + 50] * self.slots, [True] * self.slots)
        return float(_STEPS * self.slots / (clock() - start))

    def cpu_seconds(self) -> float:
        """Of an answer of 32 tokens."""
        return _ANSWER / self.rate(time.process_time)


def measure(setting: Setting) -> Outcome:
    rows: list[Row] = []
    groups: dict[str, dict[str, float | None]] = {}
    for threads in setting.threads:
        model = setting.model
        layout = Layout(model.manifest.geometry, model.manifest.groups, max(_SLOTS), 512)
        decoder = Decoder(model, open_sessions(model, threads, setting.cache), Arena(layout))
        decoder.warm_up()
        contenders = [Batch(decoder, slots) for slots in _SLOTS]
        rounds = setting.pick(12, 2)
        rates: Values = in_turn(f"slots, {threads_text(threads)}", contenders, rounds, Batch.rate)
        cpu: Values = in_turn(f"CPU time, {threads_text(threads)}", contenders, setting.pick(6, 1), Batch.cpu_seconds)
        one = contenders[0].label
        for contender in contenders[1:]:
            ratios = [many / single for many, single in zip(rates[contender.label], rates[one], strict=True)]
            name = f"decode of {contender.label} together, {threads_text(threads)}"
            value, alone = middle(rates[contender.label]), middle(rates[one])
            rows.append(Row(name, value, "tokens/s", "ours, 1 slot", alone, middle(ratios)))
        for contender in contenders:
            name = f"CPU time of an answer of {_ANSWER} tokens, {contender.label}, {threads_text(threads)}"
            rows.append(Row(name, middle(cpu[contender.label]), "s"))
        groups[threads_text(threads)] = {label: middle(values) for label, values in rates.items()}
    return Outcome(rows, [Panel("Several conversations at once, tokens per second", partial(_draw, groups))])


def _draw(groups: dict[str, dict[str, float | None]], axes: Any) -> None:
    bars(axes, groups)
