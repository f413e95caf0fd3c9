"""What the graph is built from: a decoder of one of the supported families, whatever file it came in.

The families differ in what is present (biases, q/k norms, norms after a sublayer) and in little else, so there is one
decoder with optional parts instead of one per family.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from skerry.errors import ModelError
from skerry.modelfile import QUANT_BLOCK, Geometry, LayerGroup, Source, Tokens
from tools.convert.blocks import Blocks, stacked

F32 = npt.NDArray[np.float32]
Activation = Literal["silu", "gelu_tanh"]

GEMMA3_PATTERN = 6
"""Every sixth layer sees all rows (Gemma 3 technical report, 2025, section 2)."""
GEMMA3_LOCAL_BASE = 10_000.0
MOST_LAYERS = 1_000
MOST_VALUES = 1 << 20
"""In a row of activations."""


@dataclass(frozen=True)
class Layer:
    qkv: Blocks
    qkv_bias: F32 | None
    q_norm: F32 | None
    k_norm: F32 | None
    attention_norm: F32
    attention_out: Blocks
    attention_out_bias: F32 | None
    post_attention_norm: F32 | None
    ffn_norm: F32
    gate_up: Blocks
    down: Blocks
    post_ffn_norm: F32 | None


@dataclass(frozen=True)
class Checkpoint:
    """`layer(i)` and `embedding()` read the weights only when they are called, so a large model is never in memory."""

    name: str
    family: str
    geometry: Geometry
    groups: tuple[LayerGroup, ...]
    tokens: Tokens
    epsilon: float
    activation: Activation
    attention_scale: float
    embedding_scale: float
    source: Source
    tokenizer_json: str
    chat_template: str | None
    layer: Callable[[int], Layer]
    embedding: Callable[[], Blocks]
    head: Callable[[], Blocks] | None
    """None where the embedding is tied."""
    final_norm: F32
    check_all_taken: Callable[[], None]
    """Call when every layer was read; see Tensors."""


@dataclass
class TensorNames:
    """One file format's names; layer names hold {i}."""

    embedding: str
    head: str
    final_norm: str
    layer: dict[str, str]
    ignored: tuple[str, ...] = ()


@dataclass
class Tensors:
    """The tensors of a file by name, each taken once, with its shape checked, so that nothing is silently unused."""

    available: dict[str, tuple[int, ...]]
    matrix: Callable[[str], Blocks]
    vector: Callable[[str], F32]
    names: TensorNames
    norm_offset: float = 0.0
    taken: set[str] = field(default_factory=set)

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.available:
            raise ModelError(f"tensor {name} is missing", "the file is torn, or of a variant that is not supported")
        if self.available[name] != shape:
            raise ModelError(f"tensor {name} has shape {list(self.available[name])}, expected {list(shape)}")
        self.taken.add(name)

    def blocks(self, name: str, rows: int, columns: int) -> Blocks:
        self._take(name, (rows, columns))
        matrix = self.matrix(name)
        _check_finite(name, matrix.scale, matrix.offset)
        return matrix

    def optional(self, name: str, size: int) -> F32 | None:
        return self.required(name, size) if name in self.available else None

    def required(self, name: str, size: int) -> F32:
        self._take(name, (size,))
        vector = np.ascontiguousarray(self.vector(name), np.float32)
        _check_finite(name, vector)
        return vector

    def layer(self, i: int, g: Geometry, interleaved: bool) -> Layer:
        """interleaved: q and k rows are in GGUF's order of rotary pairs."""

        def name(part: str) -> str:
            return self.names.layer[part].format(i=i)

        def norm(part: str, size: int) -> F32:
            return self.required(name(part), size) + np.float32(self.norm_offset)

        def optional_norm(part: str, size: int) -> F32 | None:
            found = self.optional(name(part), size) if part in self.names.layer else None
            return None if found is None else found + np.float32(self.norm_offset)

        q_rows, kv_rows = g.heads * g.head_size, g.kv_heads * g.head_size
        q, k, v = (
            self.blocks(name(part), rows, g.hidden_size)
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        )
        biases = [
            self.optional(name(f"{part}_bias"), rows) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        ]
        if interleaved:
            q, k = q.interleaved_to_halves(g.heads), k.interleaved_to_halves(g.kv_heads)
            if any(bias is not None for bias in biases):
                raise ModelError("query and key biases of a rotary-pair file are not supported")
        qkv_bias = None
        if any(bias is not None for bias in biases):
            sizes = (q_rows, kv_rows, kv_rows)
            qkv_bias = np.concatenate(
                [np.zeros(size, np.float32) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
            )
        return Layer(
            qkv=stacked([q, k, v]),
            qkv_bias=qkv_bias,
            q_norm=optional_norm("q_norm", g.head_size),
            k_norm=optional_norm("k_norm", g.head_size),
            attention_norm=norm("attention_norm", g.hidden_size),
            attention_out=self.blocks(name("attention_out"), g.hidden_size, q_rows),
            attention_out_bias=self.optional(name("attention_out_bias"), g.hidden_size),
            post_attention_norm=optional_norm("post_attention_norm", g.hidden_size),
            ffn_norm=norm("ffn_norm", g.hidden_size),
            gate_up=stacked([self.blocks(name(part), g.intermediate_size, g.hidden_size) for part in ("gate", "up")]),
            down=self.blocks(name("down"), g.hidden_size, g.intermediate_size),
            post_ffn_norm=optional_norm("post_ffn_norm", g.hidden_size),
        )

    def check_all_taken(self) -> None:
        """Raises ModelError for a tensor that the graph does not use: the model is of another kind than it says."""
        left = sorted(
            name for name in self.available.keys() - self.taken if not name.endswith(self.names.ignored or ("\0",))
        )
        if left:
            raise ModelError(
                f"{len(left)} tensors are not understood, such as {left[0]}", "this variant of the model is unsupported"
            )


def _check_finite(name: str, *parts: F32 | None) -> None:
    if not all(part is None or np.isfinite(part).all() for part in parts):
        raise ModelError(f"tensor {name} holds numbers that are not finite", "the file is damaged: download it again")


def check_geometry(g: Geometry) -> None:
    """Raises ModelError for sizes that the graph cannot hold."""
    if not 0 < g.layers <= MOST_LAYERS:
        raise ModelError(f"{g.layers} layers are out of range", "the file is torn")
    for what, size in (
        ("hidden size", g.hidden_size),
        ("intermediate size", g.intermediate_size),
        ("heads x head size", g.heads * g.head_size),
    ):
        if not 0 < size <= MOST_VALUES:
            raise ModelError(f"{what} {size} is out of range", "the file is torn")
        if size % QUANT_BLOCK:
            raise ModelError(f"{what} {size} is not a multiple of {QUANT_BLOCK}", "this model is unsupported")
    if g.heads % g.kv_heads:
        raise ModelError(f"{g.heads} heads cannot share {g.kv_heads} KV heads")
    if g.head_size % 16:
        raise ModelError(f"head size {g.head_size} is not a multiple of 16", "this model is unsupported")


def layer_groups(
    layers: int,
    window: int,
    sliding: Callable[[int], bool],
    full_rope: tuple[float, tuple[float, ...]],
    local_base: float,
) -> tuple[LayerGroup, ...]:
    """The full group and, where layers have a window, the sliding one; empty groups are left out."""
    by_kind = {kind: tuple(i for i in range(layers) if (window > 0 and sliding(i)) == kind) for kind in (False, True)}
    base, factors = full_rope
    groups = (
        LayerGroup(name="full", layers=by_kind[False], rope_base=base, rope_factors=factors),
        LayerGroup(name="sliding", layers=by_kind[True], window=window, rope_base=local_base),
    )
    return tuple(group for group in groups if group.layers)
