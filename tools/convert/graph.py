"""The two graphs of a decoder, for ONNX Runtime on CPU.

Body: embeddings -> hidden rows, reading and extending the KV arena in place. `B` slots, `S` rows each (one of the two
is 1), layer groups g as in model.yaml:

    embeddings   [B, S, hidden_size] f32
    last.<g>     [B] i32            index of the last row of each slot once this run's rows are in
    total.<g>    [] i32             the largest number of rows over the slots
    position.<g> [B, S] i64         rotary positions, consecutive per slot
    cos.<g>, sin.<g> [P, head_size / 2] f32
    key.<i>, value.<i> [B, kv_heads, capacity of g, head_size] f32, also bound as the outputs key_out.<i>, value_out.<i>
    -> hidden    [B, S, hidden_size] f32, before the final norm

Head: hidden [R, hidden_size] f32 -> logits [R, vocab_size] f32; only for the rows whose logits are wanted.

Operators of the domain com.microsoft are documented in ONNX Runtime's docs/ContribOperators.md.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from skerry.modelfile import QUANT_BLOCK, LayerGroup
from tools.convert.blocks import F32, Blocks
from tools.convert.checkpoint import Checkpoint, Layer

MS = "com.microsoft"
IR_VERSION = 10
OPSETS = (("", 21), (MS, 1))
ALIGNMENT = 64
F32_PRODUCTS, INT8_PRODUCTS = 1, 4
"""accuracy_level of MatMulNBits: the type of the activations in the product."""


class WeightFile:
    """Initializers in a file beside the graph, each at a multiple of 64 bytes."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file = path.open("xb")

    def add(self, name: str, array: npt.NDArray[Any]) -> TensorProto:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        self._file.write(np.ascontiguousarray(array).data)
        return external(name, array.dtype, array.shape, self._name, offset)

    def close(self) -> None:
        self._file.close()


def external(name: str, dtype: npt.DTypeLike, shape: Iterable[int], file: str, offset: int) -> TensorProto:
    """A reference to an array in a file."""
    dtype, shape = np.dtype(dtype), list(shape)
    length = dtype.itemsize * int(np.prod(shape))
    tensor = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(dtype),
        dims=shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def with_products(model: onnx.ModelProto, level: int) -> onnx.ModelProto:
    """The same graph over the same weights with another accuracy_level."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for node in other.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level
    return other


class _Graph:
    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}

    def node(self, op: str, inputs: list[str], output: str, domain: str = "", **attributes: Any) -> str:
        return self.nodes_out(op, inputs, [output], domain, **attributes)

    def nodes_out(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, outputs, outputs[0], domain=domain, **attributes))
        return outputs[0]

    def constant(self, name: str, array: npt.NDArray[Any]) -> str:
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def shape(self, *dims: int) -> str:
        """For Reshape, where 0 keeps a dimension."""
        return self.constant("shape." + "x".join(map(str, dims)), np.asarray(dims, np.int64))

    def norm(self, x: str, weight: F32, name: str) -> str:
        """Root mean square norm over the last dimension (Zhang and Sennrich 2019)."""
        scale = self.constant(f"{name}.weight", weight)
        return self.node("SimplifiedLayerNormalization", [x, scale], name, axis=-1, epsilon=self.epsilon)

    def add_and_norm(self, x: str, residual: str, weight: F32, name: str) -> tuple[str, str]:
        """(norm(x + residual), x + residual) in one pass."""
        scale = self.constant(f"{name}.weight", weight)
        outputs = [name, "", "", f"{name}.residual"]
        inputs = [x, residual, scale]
        self.nodes_out("SkipSimplifiedLayerNormalization", inputs, outputs, MS, epsilon=self.epsilon)
        return name, outputs[3]

    def linear(self, x: str, w: Blocks, name: str, file: WeightFile, bias: F32 | None = None) -> str:
        """x @ w.T + bias; see blocks.py for the correction by block sums."""
        q, scale = (self._stored(file, f"{name}.{part}", a) for part, a in (("q", w.packed()), ("scale", w.scale)))
        added = "" if bias is None else self.constant(f"{name}.bias", bias)
        if w.offset is None:
            return self._product(x, q, scale, name, w.k, w.n, w.bits, added)
        quantised = self._product(x, q, scale, f"{name}.quantised", w.k, w.n, w.bits, added)
        sums = self._block_sums(x, w.k, f"{name}.sums", file)
        offset = self._stored(file, f"{name}.offset", w.offset.T)
        correction = self.node("MatMul", [sums, offset], f"{name}.correction")
        return self.node("Add", [quantised, correction], name)

    def linear_at(self, x: str, w: Blocks, name: str, tensors: list[TensorProto]) -> str:
        """As `linear` with q and scale stored elsewhere; w has no offset."""
        assert w.offset is None
        self.initializers |= {tensor.name: tensor for tensor in tensors}
        return self._product(x, tensors[0].name, tensors[1].name, name, w.k, w.n, w.bits)

    def _block_sums(self, x: str, k: int, name: str, file: WeightFile) -> str:
        """Sums of x [..., k] over blocks of 32: a product with zeros and ones, in the arithmetic of all other products.

        With int8 products these are sums of the rounded activations, so that rounding errs by w times the error of x,
        as it does with unsplit weights; next to sums of x itself the error would be that of w - offset, which is larger
        (docs/performance.md). It is also the cheapest way: one small operator.
        """
        blocks = k // QUANT_BLOCK
        q, scale = f"ones.{k}.q", f"ones.{k}.scale"
        if q not in self.initializers:
            ones = Blocks(4, np.full((blocks, blocks, QUANT_BLOCK), 8, np.uint8), np.ones((blocks, blocks), np.float32))
            ones.q[np.arange(blocks), np.arange(blocks)] = 9
            self._stored(file, q, ones.packed())
            self._stored(file, scale, ones.scale)
        return self._product(x, q, scale, name, k, blocks, 4)

    def _product(self, x: str, q: str, scale: str, name: str, k: int, n: int, bits: int, bias: str = "") -> str:
        inputs = [x, q, scale] + (["", "", bias] if bias else [])
        sizes = {"K": k, "N": n, "bits": bits, "block_size": QUANT_BLOCK}
        return self.node("MatMulNBits", inputs, name, MS, accuracy_level=INT8_PRODUCTS, **sizes)

    def _stored(self, file: WeightFile, name: str, array: npt.NDArray[Any]) -> str:
        self.initializers[name] = file.add(name, array)
        return name

    def model(
        self, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]
    ) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, name, inputs, outputs, list(self.initializers.values()))
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="skerry")


def _value(name: str, kind: int, *shape: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def body(checkpoint: Checkpoint, weights: WeightFile, layers: Iterable[int]) -> onnx.ModelProto:
    """The body's graph; `layers` counts them off (a progress bar, say). Weights are written as they are read."""
    g = checkpoint.geometry
    graph = _Graph(checkpoint.epsilon)
    group_of = {i: group for group in checkpoint.groups for i in group.layers}
    inputs = [_value("embeddings", TensorProto.FLOAT, "B", "S", g.hidden_size)]
    outputs = [_value("hidden", TensorProto.FLOAT, "B", "S", g.hidden_size)]
    for group in checkpoint.groups:
        inputs += [
            _value(f"last.{group.name}", TensorProto.INT32, "B"),
            _value(f"total.{group.name}", TensorProto.INT32),
            _value(f"position.{group.name}", TensorProto.INT64, "B", "S"),
            _value(f"cos.{group.name}", TensorProto.FLOAT, "P", g.head_size // 2),
            _value(f"sin.{group.name}", TensorProto.FLOAT, "P", g.head_size // 2),
        ]
    residual, delta = "embeddings", ""
    for i in layers:
        capacity = f"capacity.{group_of[i].name}"
        for part in ("key", "value"):
            inputs.append(_value(f"{part}.{i}", TensorProto.FLOAT, "B", g.kv_heads, capacity, g.head_size))
            outputs.append(_value(f"{part}_out.{i}", TensorProto.FLOAT, "B", g.kv_heads, capacity, g.head_size))
        residual, delta = _layer(graph, checkpoint, i, group_of[i], residual, delta, weights)
    graph.node("Add", [residual, delta], "hidden")
    return graph.model("body", inputs, outputs)


def _layer(
    graph: _Graph, checkpoint: Checkpoint, i: int, group: LayerGroup, residual: str, delta: str, weights: WeightFile
) -> tuple[str, str]:
    """Append layer i; the residual stream is `residual + delta`, before and after."""
    layer = checkpoint.layer(i)
    if delta:
        x, residual = graph.add_and_norm(delta, residual, layer.attention_norm, f"attention_norm.{i}")
    else:
        x = graph.norm(residual, layer.attention_norm, f"attention_norm.{i}")
    attended = _attention(graph, checkpoint, layer, i, group, x, weights)
    delta = graph.linear(attended, layer.attention_out, f"attention_out.{i}", weights, layer.attention_out_bias)
    if layer.post_attention_norm is not None:
        delta = graph.norm(delta, layer.post_attention_norm, f"post_attention_norm.{i}")
    x, residual = graph.add_and_norm(delta, residual, layer.ffn_norm, f"ffn_norm.{i}")
    gate_up = graph.linear(x, layer.gate_up, f"gate_up.{i}", weights)
    graph.nodes_out("Split", [gate_up], [f"gate.{i}", f"up.{i}"], axis=-1, num_outputs=2)
    if checkpoint.activation == "silu":
        activated = graph.node("QuickGelu", [f"gate.{i}"], f"activated.{i}", MS, alpha=1.0)  # x * sigmoid(x)
    else:
        activated = graph.node("FastGelu", [f"gate.{i}"], f"activated.{i}", MS)  # the tanh form
    gated = graph.node("Mul", [activated, f"up.{i}"], f"gated.{i}")
    delta = graph.linear(gated, layer.down, f"down.{i}", weights)
    if layer.post_ffn_norm is not None:
        delta = graph.norm(delta, layer.post_ffn_norm, f"post_ffn_norm.{i}")
    return residual, delta


def _attention(
    graph: _Graph, checkpoint: Checkpoint, layer: Layer, i: int, group: LayerGroup, x: str, weights: WeightFile
) -> str:
    g = checkpoint.geometry
    qkv = [graph.linear(x, layer.qkv, f"qkv.{i}", weights, layer.qkv_bias), "", ""]
    if layer.q_norm is not None or layer.k_norm is not None:
        sizes = np.asarray([g.heads, g.kv_heads, g.kv_heads], np.int64) * g.head_size
        parts = [f"query.{i}", f"new_key.{i}", f"new_value.{i}"]
        graph.nodes_out("Split", [qkv[0], graph.constant("qkv.sizes", sizes)], parts, axis=-1)
        qkv = parts
        for slot, weight, heads in ((0, layer.q_norm, g.heads), (1, layer.k_norm, g.kv_heads)):
            if weight is not None:  # per head, so the heads become a dimension for a moment
                name = qkv[slot]
                by_head = graph.node("Reshape", [name, graph.shape(0, 0, heads, g.head_size)], f"{name}.heads")
                normed = graph.norm(by_head, weight, f"{name}.norm")
                qkv[slot] = graph.node("Reshape", [normed, graph.shape(0, 0, heads * g.head_size)], f"{name}.normed")
    n = group.name
    inputs = [*qkv, f"key.{i}", f"value.{i}", f"last.{n}", f"total.{n}", f"cos.{n}", f"sin.{n}", f"position.{n}"]
    return graph.nodes_out(
        "GroupQueryAttention",
        inputs,
        [f"attention.{i}", f"key_out.{i}", f"value_out.{i}"],
        MS,
        num_heads=g.heads,
        kv_num_heads=g.kv_heads,
        do_rotary=1,
        scale=checkpoint.attention_scale,
        local_window_size=group.window or -1,
    )


def head(checkpoint: Checkpoint, w: Blocks, weights: WeightFile | None, tied: list[TensorProto]) -> onnx.ModelProto:
    """The head's graph; its weights go to `weights`, or are those at `tied`."""
    g = checkpoint.geometry
    graph = _Graph(checkpoint.epsilon)
    x = graph.norm("hidden", checkpoint.final_norm, "final_norm")
    if weights is None:
        graph.linear_at(x, w, "logits", tied)
    else:
        graph.linear(x, w, "logits", weights)
    return graph.model(
        "head",
        [_value("hidden", TensorProto.FLOAT, "R", g.hidden_size)],
        [_value("logits", TensorProto.FLOAT, "R", g.vocab_size)],
    )
