"""Logits -> token id. Knows ids and numbers only: no text, no model.

The order is that of Hugging Face's `generate` (logits processors, then warpers): repetition penalty, temperature,
top-k, top-p, min-p; llama.cpp's default chain differs in that it applies the temperature last. Every filter after the
temperature is a threshold on the scores, so tokens that tie with the last one kept are kept too, as Hugging Face does
in top-k; which tokens survive then never depends on how a CPU's partition orders equal values.
"""

from collections.abc import Sequence
from math import log

import numpy as np
import numpy.typing as npt

from skerry.core import Sampling
from skerry.errors import ModelError, RequestError

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_WORDS = 16  # bytes of each of PCG64's two 128-bit numbers, its state and its increment
_FLOAT = np.finfo(np.float32)
_NUCLEUS = 256  # how many of the best tokens top-p looks at first; nearly always enough


class Sampler:
    """Chooses the tokens of one request.

    The same `sampling.seed` and the same logits give the same tokens; without a seed the generator starts from the
    operating system's entropy. Greedy (temperature 0) draws no random number.

    Memory: two float32 [V] and one bool [V], V = `vocab_size`, whatever the length of the answer.
    """

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        self._sampling = sampling
        self._seen = np.zeros(vocab_size, np.bool_)  # [V] tokens of the prompt and the answer so far
        self._scores: Floats = np.empty(vocab_size, np.float32)  # [V] scratch: penalised, tempered logits
        self._ordered: Floats = np.empty(vocab_size, np.float32)  # [V] scratch: partitioned in place by top-k
        self._bits = np.random.PCG64(sampling.seed)
        self._random = np.random.Generator(self._bits)

    def accept(self, tokens: int | Sequence[int]) -> None:
        """Count a token, or several, as seen: those of the prompt, then each that was emitted."""
        self._seen[tokens] = True

    def choose(self, logits: Floats) -> int:
        """The next token for `logits`, float32 [V]; the lowest id when several tie for the best in greedy.

        Does not `accept` it. Raises ModelError when the logits hold NaN or leave no token to choose.
        """
        if self._sampling.temperature == 0.0:
            return self._best(self._penalised(logits))
        ids, probabilities = self.probabilities(logits)
        cumulative = probabilities.cumsum(dtype=np.float64)
        drawn = cumulative.searchsorted(self._random.random() * cumulative[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])

    def probabilities(self, logits: Floats) -> tuple[Ids, Floats]:
        """The distribution that `choose` draws from: (ids int64 [n] ascending, probabilities float32 [n], sum 1).

        `logits` is float32 [V]. Raises ModelError as `choose` does.
        """
        sampling, scores = self._sampling, self._penalised(logits)
        best = self._best(scores)
        if sampling.temperature == 0.0:
            return np.array([best]), np.ones(1, np.float32)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            np.subtract(scores, scores[best], out=self._scores)
            scores = np.divide(self._scores, max(np.float32(sampling.temperature), _FLOAT.tiny), out=self._scores)

        floor = _FLOAT.min  # -inf, a token that the model forbids, is never kept
        if 0 < sampling.top_k < len(scores):
            self._ordered[:] = scores
            self._ordered.partition(-sampling.top_k)
            floor = max(floor, self._ordered[-sampling.top_k])
        if sampling.top_p < 1.0:
            floor = max(floor, _nucleus_floor(scores[scores >= floor], sampling.top_p))
        if sampling.min_p > 0.0:  # p >= min_p * p_best, and the best one's score is 0
            floor = max(floor, np.float32(log(sampling.min_p)))
        ids = np.flatnonzero(scores >= floor)
        weights = np.exp(scores[ids])
        return ids, weights / weights.sum()

    def state(self) -> bytes:
        """All that the next tokens depend on besides logits and settings: the generator and the seen tokens.

        32 bytes of PCG64 (state, increment; little endian), then one bit per token id.
        """
        generator = self._bits.state["state"]
        head = generator["state"].to_bytes(_WORDS, "little") + generator["inc"].to_bytes(_WORDS, "little")
        return head + np.packbits(self._seen).tobytes()

    def restore(self, state: bytes) -> None:
        """Go on where the sampler that gave `state` was. Raises RequestError when it is of another vocabulary."""
        head, mask = state[: 2 * _WORDS], np.frombuffer(state[2 * _WORDS :], np.uint8)
        if len(mask) != (len(self._seen) + 7) // 8:
            raise RequestError(
                f"sampler state of {len(state)} bytes does not fit a vocabulary of {len(self._seen)} tokens",
                "the snapshot is of another model: start the session anew",
            )
        self._seen[:] = np.unpackbits(mask, count=len(self._seen))
        generator = self._bits.state
        generator["state"]["state"] = int.from_bytes(head[:_WORDS], "little")
        generator["state"]["inc"] = int.from_bytes(head[_WORDS:], "little")
        self._bits.state = generator

    def _penalised(self, logits: Floats) -> Floats:
        """Logits [V] with the repetition penalty of CTRL (Keskar et al. 2019, section 4.1) for every seen token.

        As in Hugging Face, a negative logit is multiplied, so that the penalty never makes a token likelier.
        """
        assert logits.shape == self._seen.shape, (logits.shape, self._seen.shape)
        penalty = np.float32(self._sampling.repetition_penalty)
        if penalty == 1.0:
            return logits
        seen = np.flatnonzero(self._seen)
        values = logits[seen]
        self._scores[:] = logits
        self._scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        return self._scores

    @staticmethod
    def _best(scores: Floats) -> int:
        """argmax, which is the lowest id on ties, and NaN's place when there is one: no second pass to find it."""
        best = int(scores.argmax())
        if not np.isfinite(scores[best]):
            raise ModelError(
                f"the model's logits leave no token to choose: the best is {scores[best]}",
                "its weights are damaged or overflow: check the model folder against its manifest",
            )
        return best


def _nucleus_floor(scores: Floats, top_p: float) -> np.float32:
    """The lowest score in the smallest set of best tokens with a mass of at least `top_p` (Holtzman et al. 2019).

    `scores` float32 [n], the best one 0. Sorts a few of the best only, more when these do not reach `top_p`.
    """
    wanted = top_p * np.exp(scores).sum(dtype=np.float64)
    count = min(_NUCLEUS, len(scores))
    while True:
        best = np.sort(np.partition(scores, -count)[-count:])[::-1]
        mass = np.exp(best).cumsum(dtype=np.float64)
        if mass[-1] >= wanted or count == len(scores):
            floor: np.float32 = best[min(int(mass.searchsorted(wanted)), count - 1)]
            return floor
        count = min(8 * count, len(scores))
