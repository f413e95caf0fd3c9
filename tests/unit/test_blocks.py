"""Blocks of weights: GGUF types without loss, and MatMulNBits as ONNX Runtime really runs it."""

import gguf
import numpy as np
import onnx
import onnxruntime
import pytest
from gguf import GGMLQuantizationType as Kind
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from onnx import TensorProto, helper

from skerry.errors import ModelError
from tools.convert.blocks import Blocks, from_gguf, quantise_8_bit, stacked
from tools.convert.graph import F32_PRODUCTS, INT8_PRODUCTS, WeightFile, _Graph, with_products

LOSSLESS = {"Q8_0": 8, "Q5_0": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4}


def random_bytes(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """A tensor of a block type with every bit pattern possible, but for the f16 scales, which are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows, columns // block, size), np.uint8)
    halves = {"Q4_K": 2, "Q4_1": 2}.get(kind.name, 1)
    scales = random.normal(0, 0.01, (rows, columns // block, halves)).astype("<f2")
    raw[..., : 2 * halves] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind[name] for name in LOSSLESS], ids=list(LOSSLESS))
def test_gguf_types_are_held_without_loss(kind):
    """Q4_K's minimum is subtracted in another order, so there the last bit may differ."""
    data = random_bytes(kind, 24, 512)
    blocks = from_gguf(kind, data, 512, "t")
    assert (blocks.bits, blocks.n, blocks.k) == (LOSSLESS[kind.name], 24, 512)
    expected = gguf.quants.dequantize(data, kind)
    exact = kind.name not in ("Q4_K", "Q4_1")
    assert np.abs(blocks.dequantised() - expected).max() <= (0 if exact else 4e-7 * np.abs(expected).max())
    assert np.abs(blocks.as_8_bit().dequantised() - blocks.dequantised()).max() == 0


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q6_K", "Q5_1", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL"])
def test_other_gguf_types_are_rounded_to_8_bits(name):
    kind = Kind[name]
    w = np.random.default_rng(0).normal(0, 0.1, (16, 256)).astype(np.float32)
    if name in ("Q6_K", "Q5_K", "Q3_K", "Q2_K", "IQ4_NL"):
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = np.random.default_rng(1).integers(0, 256, (16, 256 // block, size), np.uint8)
        data[..., 1::2] &= 0x3B  # no f16 is infinite or no number, wherever it lies
        data = data.reshape(16, -1)
    else:
        data = gguf.quants.quantize(w, kind)
    expected = gguf.quants.dequantize(data, kind)
    blocks = from_gguf(kind, data, 256, "t")
    largest = np.abs(expected.reshape(16, 8, 32)).max(-1, keepdims=True)
    assert (np.abs((blocks.dequantised() - expected).reshape(16, 8, 32)) <= largest * (0.5001 / 127)).all()


def test_what_cannot_be_held():
    with pytest.raises(ModelError, match="tensor t: 48 columns are not a multiple of 32"):
        from_gguf(Kind.F32, np.zeros((2, 48), np.float32), 48, "t")
    with pytest.raises(ModelError, match="tensor t: type I32 is not supported"):
        from_gguf(Kind.I32, np.zeros((2, 32), np.int32), 32, "t")


finite = st.floats(-(2.0**100), 2.0**100, width=32)


@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 4), st.sampled_from([32, 64, 96])), elements=finite))
def test_8_bit_rounding_is_within_half_a_step(w):
    blocks = quantise_8_bit(w)
    assert blocks.q.min(initial=255) >= 1  # symmetric: -127 to 127
    tiny = np.finfo(np.float32).tiny * 127
    error = np.abs(blocks.dequantised() - w).reshape(len(w), -1, 32)
    largest = np.abs(w).reshape(len(w), -1, 32).max(-1, keepdims=True)
    assert (error <= largest * (0.5001 / 127) + tiny).all()


@given(
    arrays.arrays(np.int8, (3, 64), elements=st.integers(-127, 127)),
    arrays.arrays(np.float16, (3, 2), elements=st.floats(2**-12, 8, width=16)),
)
def test_8_bit_rounding_keeps_what_is_in_that_form(q, scale):
    q[:, ::32] = 127
    w = (q.reshape(3, 2, 32) * scale.astype(np.float32)[..., None]).reshape(3, 64)
    assert np.array_equal(quantise_8_bit(w).dequantised(), w)


def random_blocks(bits: int, n: int, k: int, offset: bool = False, seed: int = 0) -> Blocks:
    random = np.random.default_rng(seed)
    scale = random.uniform(0.001, 0.01, (n, k // 32)).astype(np.float32)
    q = random.integers(0, 1 << bits, (n, k // 32, 32), np.uint8)
    return Blocks(bits, q, scale, random.normal(0, 0.02, scale.shape).astype(np.float32) if offset else None)


def product(w: Blocks, x: np.ndarray, level: int, folder, bias: np.ndarray | None = None) -> np.ndarray:
    """x @ w.T + bias by ONNX Runtime, through the converter's own graph."""
    graph = _Graph(1e-6)
    file = WeightFile(folder / "w.bin")
    graph.linear("x", w, "y", file, bias)
    file.close()
    model = graph.model(
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", w.k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "S", w.n])],
    )
    onnx.save(with_products(model, level), folder / "g.onnx")
    session = onnxruntime.InferenceSession(folder / "g.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_bias", [False, True])
def test_matmulnbits_computes_the_product(bits, offset, with_bias, tmp_path):
    w = random_blocks(bits, 48, 96, offset)
    random = np.random.default_rng(1)
    x = random.normal(0, 1, (2, 3, 96)).astype(np.float32)
    bias = random.normal(0, 1, 48).astype(np.float32) if with_bias else None
    expected = x.astype(np.float64) @ w.dequantised().astype(np.float64).T + (0 if bias is None else bias)
    for level, tolerance in ((F32_PRODUCTS, 1e-6), (INT8_PRODUCTS, 0.01)):
        folder = tmp_path / str(level)
        folder.mkdir()
        error = product(w, x, level, folder, bias) - expected
        assert np.linalg.norm(error) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("mix", [(4, 4, 4), (8, 8, 8), (4, 8, 4), (8, 4, 8)])
@pytest.mark.parametrize("offsets", [(), (0,), (1, 2)])
def test_stacked_rows_are_the_rows(mix, offsets, tmp_path):
    parts = [random_blocks(bits, 16 * (i + 1), 64, i in offsets, seed=i) for i, bits in enumerate(mix)]
    whole = stacked(parts)
    assert whole.bits == max(mix)
    assert np.array_equal(whole.dequantised(), np.concatenate([part.dequantised() for part in parts]))
    assert (whole.offset is None) == (not offsets)
    x = np.random.default_rng(5).normal(0, 1, (1, 2, 64)).astype(np.float32)
    assert np.allclose(product(whole, x, F32_PRODUCTS, tmp_path), x @ whole.dequantised().T, atol=1e-5)


@pytest.mark.parametrize("offset", [False, True])
def test_rotary_pairs_become_halves(offset):
    """GGUF keeps row 2j next to 2j + 1 where the rotary form here has j and j + size / 2."""
    heads, size = 3, 8
    w = random_blocks(4, heads * size, 64, offset)
    rows = w.dequantised().reshape(heads, size, 64)
    halves = w.interleaved_to_halves(heads).dequantised().reshape(heads, size, 64)
    assert np.array_equal(halves[:, : size // 2], rows[:, 0::2])
    assert np.array_equal(halves[:, size // 2 :], rows[:, 1::2])
