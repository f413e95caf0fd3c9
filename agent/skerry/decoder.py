"""Arena and runner together: extend slots by tokens, and the counts stay true. No scheduling, no text.

The engine, the evaluation and the bench all run the model through this.
"""

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skerry.arena import Arena
from skerry.core import BLOCK
from skerry.modelfile import ModelFolder
from skerry.runner import F32, Runner
from skerry.session import Sessions

Ids = npt.NDArray[np.int64]

_TRIALS = 3
"""The shortest of them counts: what disturbs a measurement only ever makes it longer."""


class Decoder:
    """One model over one arena."""

    def __init__(self, model: ModelFolder, sessions: Sessions, arena: Arena, logits_rows: int = 1) -> None:
        """logits_rows: most rows of logits that one call can ask for, beside one for every slot."""
        self.arena = arena
        self.vocab_size = model.manifest.geometry.vocab_size
        self._groups = model.manifest.groups
        self._runner = Runner(
            sessions.body,
            sessions.head,
            model.manifest,
            model.embedding(),
            arena.keys,
            arena.values,
            positions=arena.layout.max_tokens + 1,
            logits_rows=logits_rows,
        )

    def prefill(self, slot: int, tokens: Sequence[int] | Ids, logits: int = 1) -> F32:
        """Append up to 128 tokens to a slot; returns the logits of the last rows, [logits, vocab_size].

        Raises CapacityError, with nothing changed, when they do not fit.
        """
        self.arena.reserve(slot, len(tokens))
        out = self._run(np.asarray([tokens], np.int64), slot, logits)
        self.arena.advance(slot, len(tokens))
        return out

    def decode(self, slot: int, tokens: Sequence[int], active: Sequence[bool] = (True,)) -> F32:
        """Append one token to each active slot of `slot`, `slot + 1`, ...; returns [len(tokens), vocab_size].

        A slot that is not active keeps its length; its row of the result means nothing.
        """
        for i, runs in enumerate(active):
            if runs:
                self.arena.reserve(slot + i, 1)
        out = self._run(np.asarray(tokens, np.int64)[:, None], slot, len(tokens))
        for i, runs in enumerate(active):
            if runs:
                self.arena.advance(slot + i, 1)
        return out

    def warm_up(self) -> bool:
        """Run the largest shapes once, so that the runtime's workspace reaches its peak now and not in mid-answer.

        Returns whether a decode over all slots takes less time than one of each in turn: on some models and CPUs the
        kernels for several rows are no gain.
        """
        arena, block = self.arena, [0] * BLOCK
        assert all(arena.length(slot) == 0 for slot in range(arena.layout.slots))
        # The first chunk takes another path in GroupQueryAttention than later ones; rows of zeros do as well as any.
        for length in (0, arena.layout.max_tokens // BLOCK * BLOCK - BLOCK):
            arena.claim(0, length)
            self.prefill(0, block)
        arena.truncate(0, 0)
        slots = range(arena.layout.slots)
        one = min(self._seconds(1) for _ in range(_TRIALS))
        batch = min(self._seconds(len(slots)) for _ in range(_TRIALS))
        for slot in slots:
            arena.truncate(slot, 0)
        return len(slots) == 1 or batch < len(slots) * one

    def _seconds(self, slots: int) -> float:
        """Of a decode over the first slots."""
        begin = time.perf_counter()
        self.decode(0, [0] * slots, [True] * slots)
        return time.perf_counter() - begin

    def _run(self, tokens: npt.NDArray[np.int64], slot: int, logits: int) -> F32:
        slots = range(slot, slot + len(tokens))
        rows = {group.name: [self.arena.rows(group, s) for s in slots] for group in self._groups}
        lengths = [self.arena.length(s) for s in slots]
        return self._runner.run(tokens, slot, rows, {group.name: lengths for group in self._groups}, logits)


def next_chunk(length: int, pending: int) -> int:
    """Tokens of the next prefill chunk after `length`: chunks end at absolute multiples of 128, or with the prompt, so
    that a cold slot and one restored from blocks compute the very same thing."""
    return min(pending, BLOCK - length % BLOCK)
