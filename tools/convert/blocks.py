"""Matrices in blocks of 32 along their input dimension, in the form of ONNX Runtime's MatMulNBits.

    w[n, 32 b + j] = scale[n, b] * (q[n, b, j] - zero) + offset[n, b]        zero = 8 (4 bits) or 128 (8 bits)

MatMulNBits takes scales only; an offset per block would have to be a float zero point, which sends ONNX Runtime down a
path that dequantises the whole matrix. Written as above, the product splits exactly:
x @ w.T = MatMulNBits(x) + blocksum(x) @ offset.T, with blocksum(x)[b] the sum of block b of x. Q4_1 and Q4_K
(w = d * q - m) become 4-bit blocks with offset, without loss.

The GGUF layouts are those of ggml's ggml-common.h and ggml-quants.c.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from skerry.errors import ModelError
from skerry.modelfile import QUANT_BLOCK

Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Blocks:
    """A matrix [n, k]; see the module for its meaning.

    bits: 4 or 8; q: [n, k / 32, 32] uint8, one value each; scale: [n, k / 32] f32; offset: the same, or None for 0.
    """

    bits: int
    q: U8
    scale: F32
    offset: F32 | None = None

    @property
    def n(self) -> int:
        return len(self.q)

    @property
    def k(self) -> int:
        return int(self.q.shape[1]) * QUANT_BLOCK

    def dequantised(self) -> F32:
        """[n, k] f32."""
        zero = np.float32(1 << (self.bits - 1))
        w = (self.q.astype(np.float32) - zero) * self.scale[..., None]
        if self.offset is not None:
            w += self.offset[..., None]
        return w.reshape(self.n, self.k)

    def packed(self) -> U8:
        """MatMulNBits' B: [n, k / 32, 16 or 32], of 4-bit values the even one in the low half of a byte."""
        if self.bits == 8:
            return self.q
        low, high = self.q[..., 0::2], self.q[..., 1::2]
        return low | (high << np.uint8(4))

    def as_8_bit(self) -> "Blocks":
        """The same numbers with 8-bit values."""
        return self if self.bits == 8 else Blocks(8, self.q + np.uint8(128 - 8), self.scale, self.offset)

    def interleaved_to_halves(self, heads: int) -> "Blocks":
        """Reorder the rows of a query or key projection from GGUF's rotary form (pairs) to halves."""

        def reorder(a: Array) -> Array:
            return a.reshape(heads, -1, 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)

        return Blocks(
            self.bits,
            reorder(self.q),
            reorder(self.scale),
            None if self.offset is None else reorder(self.offset),
        )


def stacked(parts: list[Blocks]) -> Blocks:
    """The rows of several matrices with one k, as one; of mixed bits the result is 8-bit, always without loss."""
    if len({part.bits for part in parts}) > 1:
        parts = [part.as_8_bit() for part in parts]
    offset = None
    if any(part.offset is not None for part in parts):
        offset = np.concatenate([np.zeros_like(p.scale) if p.offset is None else p.offset for p in parts])
    return Blocks(parts[0].bits, np.concatenate([p.q for p in parts]), np.concatenate([p.scale for p in parts]), offset)


def quantise_8_bit(w: F32) -> Blocks:
    """[n, k] f32 to symmetric 8-bit blocks, rounded to nearest. k must be a multiple of 32."""
    blocks = np.ascontiguousarray(w, np.float32).reshape(len(w), -1, QUANT_BLOCK)
    scale = np.abs(blocks).max(-1) / np.float32(127)
    scale[scale < np.finfo(np.float32).tiny] = 0  # too small to divide by
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    with np.errstate(invalid="ignore"):  # numbers that are not finite stay so in `scale`, where Tensors finds them
        return Blocks(8, (np.rint(blocks * inverse[..., None]) + 128).astype(np.uint8), scale)


def from_gguf(kind: GGMLQuantizationType, data: Array, k: int, name: str) -> Blocks:
    """A GGUF tensor as blocks: Q8_0, Q5_0, Q4_0, Q4_1 and Q4_K without loss, all else rounded to 8 bits.

    data: the tensor's bytes [n, bytes per row] uint8, or its [n, k] values for float types.
    Raises ModelError for a shape or type that cannot be held.
    """
    if k % QUANT_BLOCK:
        raise ModelError(f"tensor {name}: {k} columns are not a multiple of {QUANT_BLOCK}", "this model is unsupported")
    if kind.name in _LOSSLESS:
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(len(data), -1)
        return _LOSSLESS[kind.name](raw)
    try:
        return quantise_8_bit(dequantize(data, kind).reshape(len(data), k))
    except NotImplementedError:
        raise ModelError(
            f"tensor {name}: type {kind.name} is not supported", "use a Q8_0, Q4_K_M or F16 file"
        ) from None


def _half(raw: U8) -> F32:
    """Two bytes, the last axis, as f16 -> f32, the last axis dropped."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)


def _nibbles(raw: U8) -> U8:
    """16 bytes -> 32 values: ggml keeps values 0-15 in the low halves, 16-31 in the high ones."""
    return np.concatenate([raw & 15, raw >> 4], -1)


def _q8_0(raw: U8) -> Blocks:
    block = raw.reshape(len(raw), -1, 34)
    return Blocks(8, block[..., 2:] ^ np.uint8(0x80), _half(block[..., :2]))  # two's complement + 128


def _q5_0(raw: U8) -> Blocks:
    block = raw.reshape(len(raw), -1, 22)
    fifth = np.unpackbits(block[..., 2:6], axis=-1, bitorder="little")
    return Blocks(8, (_nibbles(block[..., 6:]) | (fifth << np.uint8(4))) + np.uint8(128 - 16), _half(block[..., :2]))


def _q4_0(raw: U8) -> Blocks:
    block = raw.reshape(len(raw), -1, 18)
    return Blocks(4, _nibbles(block[..., 2:]), _half(block[..., :2]))


def _q4_1(raw: U8) -> Blocks:
    block = raw.reshape(len(raw), -1, 20)
    scale = _half(block[..., :2])
    return Blocks(4, _nibbles(block[..., 4:]), scale, _half(block[..., 2:4]) + 8 * scale)


def _q4_k(raw: U8) -> Blocks:
    """Super-blocks of 8 blocks: f16 d and dmin, eight pairs of 6-bit scales and minima, 256 nibbles."""
    block = raw.reshape(len(raw), -1, 144)
    packed = block[..., 4:16]
    low, high = packed[..., :8] & 63, packed[..., 8:]
    top = packed[..., :8] >> 6
    scale6 = np.concatenate([low[..., :4], high & 15 | top[..., :4] << 4], -1)
    min6 = np.concatenate([low[..., 4:8], high >> 4 | top[..., 4:8] << 4], -1)
    scale = (_half(block[..., 0:2])[..., None] * scale6).reshape(len(raw), -1)
    minimum = (_half(block[..., 2:4])[..., None] * min6).reshape(len(raw), -1)
    halves = block[..., 16:].reshape(len(raw), -1, 4, QUANT_BLOCK)
    q = np.stack([halves & 15, halves >> 4], 3).reshape(len(raw), -1, QUANT_BLOCK)
    return Blocks(4, q, scale, 8 * scale - minimum)


_LOSSLESS = {"Q8_0": _q8_0, "Q5_0": _q5_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
