"""The agent's decoder as a contender: slot 0, greedy."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from skerry.arena import Arena, Layout
from skerry.decoder import Decoder, next_chunk
from skerry.host import Host
from skerry.modelfile import ModelFolder
from skerry.session import Sessions
from tools.bench.question import OURS, prompt


def open_sessions(model: ModelFolder, threads: int, cache: Path | None) -> Sessions:
    """With the agent's default settings."""
    return Sessions(model, Host(), f32=False, threads=threads, spin=True, cache_dir=cache)


class Skerry:
    """One slot of `max_tokens`."""

    label = OURS

    def __init__(self, model: ModelFolder, sessions: Sessions, max_tokens: int) -> None:
        self._arena = Arena(Layout(model.manifest.geometry, model.manifest.groups, 1, max_tokens))
        self._decoder = Decoder(model, sessions, self._arena)
        self._decoder.warm_up()
        Host().trim_heap()  # as the agent does

    @property
    def arena_bytes(self) -> int:
        return self._arena.layout.bytes

    def extend(self, tokens: Sequence[int]) -> int:
        """Prefill in the chunks that the engine makes; returns the likeliest next token."""
        done, best = 0, 0
        while done < len(tokens):
            chunk = next_chunk(self._arena.length(0), len(tokens) - done)
            last = done + chunk == len(tokens)
            logits = self._decoder.prefill(0, tokens[done : done + chunk], logits=int(last))
            done += chunk
            if last:
                best = int(logits[-1].argmax())
        return best

    def generate(self, token: int) -> Iterator[int]:
        """Greedy decoding after `token`; a full slot is emptied and goes on."""
        while True:
            if not self._arena.room(0):
                self._arena.truncate(0, 0)
            token = int(self._decoder.decode(0, [token])[0].argmax())
            yield token

    def fill(self, n: int) -> None:
        """Make the slot hold exactly the prompt of n tokens."""
        kept = self._arena.truncate(0, min(n, self._arena.length(0)))
        self.extend(prompt(n)[kept:])

    def decode_ms(self, n: int, steps: int) -> float:
        """ms per token, the average over `steps` from n on; the slot must have been filled with n tokens or more."""
        self._arena.truncate(0, n)
        tokens = self.generate(prompt(1)[0])
        start = time.perf_counter()
        for _ in range(steps):
            next(tokens)
        return (time.perf_counter() - start) / steps * 1e3

    def prefill_rate(self, n: int) -> float:
        """Tokens per second of a prompt, from nothing to the first token chosen."""
        self._arena.truncate(0, 0)
        start = time.perf_counter()
        self.extend(prompt(n))
        return n / (time.perf_counter() - start)
