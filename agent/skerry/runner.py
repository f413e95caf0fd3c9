"""The model: token ids in, logits out, over keys and values that someone else counts. Knows no text, and not why a
token is run.

Everything that ONNX Runtime sees is bound once and its contents changed in place: the arena as past and present of
every layer, small arrays of lengths and positions, rows in and out. Only a prefill chunk of another length binds its
row arrays again. The names are those of the graphs that tools/convert writes (its graph.py lists them).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from skerry.core import BLOCK
from skerry.errors import ModelError
from skerry.modelfile import Embedding, Manifest

F32 = npt.NDArray[np.float32]
Rows = Mapping[str, Sequence[int]]
"""Per group of layers, a number for each slot of the batch."""


class Runner:
    """Runs the body over slots and the head over wanted rows."""

    def __init__(
        self,
        body: Any,
        head: Any,
        manifest: Manifest,
        embedding: Embedding,
        keys: Mapping[int, F32],
        values: Mapping[int, F32],
        positions: int,
        logits_rows: int = 1,
    ) -> None:
        """body, head: onnxruntime.InferenceSession; keys, values: by layer, [slots, kv_heads, capacity, head_size];
        positions: the first rotary position that will never be asked for; logits_rows: of one call, at most (at least
        one for every slot is kept).
        """
        self._body, self._head = body, head
        self._embedding, self._groups = embedding, manifest.groups
        self._keys, self._values = keys, values
        self._capacity = {group.name: keys[group.layers[0]].shape[2] for group in manifest.groups}
        slots, g = len(keys[0]), manifest.geometry
        self._positions = positions
        self._rope = {group.name: group.rope(positions, g.head_size) for group in manifest.groups}
        rows = max(slots, BLOCK)
        self._embeddings = np.zeros((rows, g.hidden_size), np.float32)
        self._hidden = np.zeros((rows, g.hidden_size), np.float32)
        self._wanted = np.zeros((max(slots, logits_rows), g.hidden_size), np.float32)  # the head's input
        self._logits = np.zeros((max(slots, logits_rows), g.vocab_size), np.float32)
        self._state = {group.name: _GroupState(slots) for group in manifest.groups}
        self._bodies: dict[tuple[int, int], tuple[Any, int]] = {}
        self._heads: dict[int, Any] = {}

    def run(self, tokens: npt.NDArray[np.int64], slot: int, rows: Rows, positions: Rows, logits: int = 1) -> F32:
        """Extend slots `slot`, `slot + 1`, ... by their tokens.

        tokens: [B, S], where B or S is 1 and S at most 128; rows, positions: per group and slot, the rows already there
        and the rotary position of the first token; logits: how many of the last rows are wanted, 0 for none.
        Returns logits [logits, vocab_size], a view that the next call overwrites.
        Raises ModelError when rows would be written beyond the capacity: ONNX Runtime itself would not notice.
        """
        batch, steps = tokens.shape
        count = batch * steps
        assert (batch == 1 or steps == 1) and 0 < count <= len(self._hidden)
        assert logits <= min(count, len(self._logits))
        for group in self._groups:
            name = group.name
            most = max(rows[name]) + steps
            if most > self._capacity[name] or max(positions[name]) + steps > self._positions:
                raise ModelError(f"{most} rows in group {name} exceed its capacity of {self._capacity[name]}")
            self._state[name].set(rows[name], positions[name], steps, most)
        self._embedding.rows(tokens.reshape(-1), self._embeddings[:count])
        self._body.run_with_iobinding(self._bound_body(slot, batch, steps))
        if logits:
            self._wanted[:logits] = self._hidden[count - logits : count]
            self._head.run_with_iobinding(self._bound_head(logits))
        return self._logits[:logits]

    def _bound_body(self, slot: int, batch: int, steps: int) -> Any:
        binding, bound_steps = self._bodies.get((slot, batch), (None, 0))
        if binding is None:
            binding = self._body.io_binding()
            span = slice(slot, slot + batch)
            for i in self._keys:
                for name, table in (("key", self._keys), ("value", self._values)):
                    _bind(binding.bind_input, f"{name}.{i}", table[i][span])
                    _bind(binding.bind_output, f"{name}_out.{i}", table[i][span])
            for group in self._groups:
                state, (cos, sin) = self._state[group.name], self._rope[group.name]
                _bind(binding.bind_input, f"last.{group.name}", state.last[:batch])
                _bind(binding.bind_input, f"total.{group.name}", state.total)
                _bind(binding.bind_input, f"cos.{group.name}", cos)
                _bind(binding.bind_input, f"sin.{group.name}", sin)
        if steps != bound_steps:
            shape = batch, steps
            _bind(binding.bind_input, "embeddings", self._embeddings[: batch * steps].reshape(*shape, -1))
            _bind(binding.bind_output, "hidden", self._hidden[: batch * steps].reshape(*shape, -1))
            for group in self._groups:
                position = self._state[group.name].position[: batch * steps]
                _bind(binding.bind_input, f"position.{group.name}", position.reshape(shape))
            self._bodies[slot, batch] = binding, steps
        return binding

    def _bound_head(self, count: int) -> Any:
        binding = self._heads.get(count)
        if binding is None:
            binding = self._heads[count] = self._head.io_binding()
            _bind(binding.bind_input, "hidden", self._wanted[:count])
            _bind(binding.bind_output, "logits", self._logits[:count])
        return binding


class _GroupState:
    """The small inputs of one group of layers; the graph reads them in place."""

    def __init__(self, slots: int) -> None:
        self.last = np.zeros(slots, np.int32)
        self.total = np.zeros((), np.int32)
        self.position = np.zeros(max(slots, BLOCK), np.int64)
        self._steps = np.arange(BLOCK)

    def set(self, rows: Sequence[int], positions: Sequence[int], steps: int, most: int) -> None:
        self.last[: len(rows)] = rows
        self.last[: len(rows)] += steps - 1
        self.total[...] = most
        self.position[: len(rows) * steps] = positions if steps == 1 else self._steps[:steps] + positions[0]


def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
    assert array.flags.c_contiguous
    bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
