"""The KV arena: all keys and values, allocated once, touched and locked at start. Knows nothing of tokens or flash.

One anonymous mapping. For every layer, K then V, each [slots, kv_heads, capacity, head_size]; a slot of a layer is a
contiguous slice, so prefill of one slot and a batch over neighbouring slots use the same memory without a copy.

    | canary | K of layer 0              | canary | V of layer 0 | canary | K of layer 1 | ...
             | slot 0 | slot 1 | ...     |
             | head 0: capacity rows | head 1: ... |

Rows of a slot, by group of layers (n tokens so far, window w):

    full       [0, n)                        row = position; capacity = max_tokens + 1
    sliding    [first, n)                    row = position - first; capacity = w rounded up to 128, + 128
               first = max(0, n - w + 1) rounded down to 128: a function of n alone, so that a restored slot and
               one that was prefilled hold the same rows

The spare row of the full group, and the slack of the sliding one, are where an idle slot inside a batch writes; its
length does not advance, so the next real token overwrites it.
"""

import ctypes
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from skerry.core import BLOCK
from skerry.errors import CapacityError, SkerryError
from skerry.modelfile import Geometry, LayerGroup

_CANARY = np.uint8(0xA5)
_CANARY_BYTES = 64  # a cache line, which also keeps every array aligned to one


@dataclass(frozen=True)
class Layout:
    """Sizes of the arena; pure arithmetic, so that it can be planned before anything is allocated."""

    geometry: Geometry
    groups: tuple[LayerGroup, ...]
    slots: int
    max_tokens: int

    def capacity(self, group: LayerGroup) -> int:
        """Rows per slot in the layers of a group."""
        rows = self.max_tokens + 1
        return min(rows, _round_up(group.window, BLOCK) + BLOCK) if group.window else rows

    def shape(self, group: LayerGroup) -> tuple[int, int, int, int]:
        """[slots, kv_heads, capacity, head_size] of K, and of V, of one layer."""
        return self.slots, self.geometry.kv_heads, self.capacity(group), self.geometry.head_size

    @property
    def bytes(self) -> int:
        arrays = [group for group in self.groups for _ in range(2 * len(group.layers))]
        sizes = (4 * int(np.prod(self.shape(group))) for group in arrays)
        return _CANARY_BYTES + sum(_round_up(size, _CANARY_BYTES) + _CANARY_BYTES for size in sizes)


class Arena:
    """The memory and, per slot, how many tokens are in it.

    keys[i], values[i]: layer i, [slots, kv_heads, capacity, head_size] f32, views into the one mapping.
    """

    def __init__(self, layout: Layout, lock: bool = True) -> None:
        """Raises CapacityError when the memory cannot be had."""
        self.layout = layout
        try:
            self._mapping = mmap.mmap(-1, layout.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityError(
                f"the KV arena of {layout.bytes:,} bytes cannot be allocated: {error}",
                "lower arena.max_tokens or arena.slots",
            ) from None
        memory = np.frombuffer(self._mapping, np.uint8)
        memory[:] = 0  # touch every page now: a page fault later could fail
        self.locked = lock and _mlock(memory)
        self.keys: dict[int, npt.NDArray[np.float32]] = {}
        self.values: dict[int, npt.NDArray[np.float32]] = {}
        self._canaries = [memory[:_CANARY_BYTES]]
        offset = _CANARY_BYTES
        layers = sorted((i, group) for group in layout.groups for i in group.layers)
        for i, group in layers:
            shape = layout.shape(group)
            size = 4 * int(np.prod(shape))
            for table in (self.keys, self.values):
                table[i] = memory[offset : offset + size].view(np.float32).reshape(shape)
                offset += _round_up(size, _CANARY_BYTES)
                self._canaries.append(memory[offset : offset + _CANARY_BYTES])
                offset += _CANARY_BYTES
        for canary in self._canaries:
            canary[:] = _CANARY
        self._tokens = [0] * layout.slots

    def length(self, slot: int) -> int:
        """Tokens in the slot."""
        return self._tokens[slot]

    def room(self, slot: int) -> int:
        """Tokens that still fit."""
        return self.layout.max_tokens - self._tokens[slot]

    def rows(self, group: LayerGroup, slot: int) -> int:
        """Rows that the layers of a group hold of the slot."""
        length = self._tokens[slot]
        return length - first_row(group.window, length)

    def reserve(self, slot: int, tokens: int) -> None:
        """Check that `tokens` more rows can be written. Raises CapacityError when the slot would outgrow its limit, or
        when they would go beyond the block behind the window of a sliding layer (the next 128 always fit up to a
        multiple of 128)."""
        if tokens > self.room(slot):
            raise CapacityError(
                f"slot {slot} holds {self._tokens[slot]} tokens and cannot take {tokens} more",
                f"the limit is arena.max_tokens: {self.layout.max_tokens}",
            )
        for group in self.layout.groups:
            if self.rows(group, slot) + tokens > self.layout.capacity(group):
                raise CapacityError(f"{tokens} rows do not fit behind the window of slot {slot}", "write up to a block")

    def advance(self, slot: int, tokens: int) -> None:
        """Count rows that were written, and move those of sliding layers so that the next ones fit."""
        assert 0 <= tokens <= self.room(slot)
        before = self._tokens[slot]
        after = self._tokens[slot] = before + tokens
        for group in self.layout.groups:
            first = first_row(group.window, after)
            if drop := first - first_row(group.window, before):
                keep = after - first
                for i in group.layers:
                    for array in (self.keys[i], self.values[i]):
                        array[slot, :, :keep] = array[slot, :, drop : drop + keep]

    def claim(self, slot: int, length: int) -> None:
        """Count `length` tokens in the slot, whose rows the caller fills (or, to warm up, does not care about)."""
        assert 0 <= length <= self.layout.max_tokens
        self._tokens[slot] = length

    def truncate(self, slot: int, length: int) -> int:
        """Forget the last tokens so that at most `length` stay; returns how many do.

        Where a sliding layer has already moved rows out that a shorter slot would need, none can stay.
        """
        before = self._tokens[slot]
        assert 0 <= length <= before
        kept = all(first_row(group.window, length) == first_row(group.window, before) for group in self.layout.groups)
        self._tokens[slot] = length if kept else 0
        return self._tokens[slot]

    def swap(self, one: int, other: int) -> None:
        """Exchange the contents of two slots, a copy of the rows that either holds."""
        for group in self.layout.groups:
            rows = max(self.rows(group, one), self.rows(group, other))
            for i in group.layers:
                for array in (self.keys[i], self.values[i]):
                    kept = array[one, :, :rows].copy()
                    array[one, :, :rows] = array[other, :, :rows]
                    array[other, :, :rows] = kept
        self._tokens[one], self._tokens[other] = self._tokens[other], self._tokens[one]

    def check_integrity(self) -> None:
        """Raises SkerryError if memory around an array was overwritten or a count is impossible."""
        for number, canary in enumerate(self._canaries):
            if not (canary == _CANARY).all():
                raise SkerryError(f"the KV arena was overwritten before array {number}", "restart the agent")
        for slot, tokens in enumerate(self._tokens):
            for group in self.layout.groups:
                # One row is always spare: an idle slot inside a batch writes there.
                if not 0 <= tokens <= self.layout.max_tokens or self.rows(group, slot) >= self.layout.capacity(group):
                    raise SkerryError(f"slot {slot} counts an impossible {tokens} tokens", "restart the agent")


def first_row(window: int, length: int) -> int:
    """Position of the first row that a sliding layer keeps of `length` tokens: what the next query may see, rounded
    down to a block. 0 for full attention (window 0)."""
    return max(0, length - window + 1) // BLOCK * BLOCK if window else 0


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _mlock(memory: npt.NDArray[np.uint8]) -> bool:
    """mlock(2); False where RLIMIT_MEMLOCK does not allow it."""
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)) == 0)
