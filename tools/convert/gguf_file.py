"""GGUF -> Checkpoint. Keys and tensor names are those of the GGUF specification (ggml, docs/gguf.md)."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from skerry.errors import ModelError
from skerry.modelfile import Geometry, Source, Tokens
from tools.convert.blocks import F32, Blocks, from_gguf
from tools.convert.checkpoint import (
    GEMMA3_LOCAL_BASE,
    GEMMA3_PATTERN,
    Checkpoint,
    TensorNames,
    Tensors,
    check_geometry,
    layer_groups,
)
from tools.convert.tokenizer import tokenizer_from_gguf

_BLK = "blk.{i}."
NAMES = TensorNames(
    embedding="token_embd.weight",
    head="output.weight",
    final_norm="output_norm.weight",
    layer={
        part: _BLK + name
        for part, name in {
            "q": "attn_q.weight",
            "k": "attn_k.weight",
            "v": "attn_v.weight",
            "q_bias": "attn_q.bias",
            "k_bias": "attn_k.bias",
            "v_bias": "attn_v.bias",
            "q_norm": "attn_q_norm.weight",
            "k_norm": "attn_k_norm.weight",
            "attention_norm": "attn_norm.weight",
            "attention_out": "attn_output.weight",
            "attention_out_bias": "attn_output.bias",
            "post_attention_norm": "post_attention_norm.weight",
            "ffn_norm": "ffn_norm.weight",
            "gate": "ffn_gate.weight",
            "up": "ffn_up.weight",
            "down": "ffn_down.weight",
            "post_ffn_norm": "post_ffw_norm.weight",
        }.items()
    },
    ignored=("rope_freqs.weight",),
)
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
GEMMA3_27B_LAYERS = 62
MOST_READS = 10_000_000
"""A file with a vocabulary of 262,144 takes 1.3 million."""


def read(path: Path, licence: str = "") -> Checkpoint:
    """Raises ModelError for a file that is torn or that no supported family can be read from."""
    try:
        reader = _Reader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: tuple(int(d) for d in reversed(tensor.shape)) for name, tensor in tensors.items()}
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except Exception as error:  # the reader has no error of its own: a torn file ends in whatever numpy or struct raise
        raise ModelError(f"{path}: not a whole GGUF file: {error}", "download it again") from None
    try:
        return _checkpoint(path, fields, tensors, shapes, licence)
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except Exception as error:  # a value of another type than its key promises, or what the tokenizers library raises
        reason = str(error).partition("\n")[0]
        raise ModelError(f"{path}: cannot be read: {reason}", "the file is torn or of an unknown form") from error


class _Reader(GGUFReader):  # type: ignore[misc]
    """The library's own reads on past the end, and for ever where a damaged count is huge."""

    reads = 0

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, *order: Any, **named: Any) -> Any:
        self.reads += 1
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data) or self.reads > MOST_READS:
            raise ValueError(f"what begins at byte {offset} does not end")
        return super()._get(offset, dtype, count, *order, **named)


def _checkpoint(
    path: Path, fields: dict[str, Any], tensors: dict[str, Any], shapes: dict[str, tuple[int, ...]], licence: str
) -> Checkpoint:
    family = fields.get("general.architecture")
    if family not in FAMILIES:
        raise ModelError(f"architecture {family!r} is not supported", f"supported: {', '.join(FAMILIES)}")

    def key(name: str, default: Any = None) -> Any:
        value = fields.get(f"{family}.{name}", default)
        if value is None:
            raise ModelError(f"metadata {family}.{name} is missing", "the file is torn or too old")
        return value

    if key("expert_count", 0):
        raise ModelError("mixtures of experts are not supported")
    heads, hidden = int(key("attention.head_count")), int(key("embedding_length"))
    head_size = int(key("attention.key_length", hidden // heads))
    if int(key("attention.value_length", head_size)) != head_size:
        raise ModelError("keys and values of different size are not supported")
    if int(key("rope.dimension_count", head_size)) != head_size:
        raise ModelError("rotary embedding of a part of the head is not supported")
    geometry = Geometry(
        layers=int(key("block_count")),
        hidden_size=hidden,
        intermediate_size=int(key("feed_forward_length")),
        heads=heads,
        kv_heads=int(key("attention.head_count_kv", heads)),
        head_size=head_size,
        vocab_size=shapes.get(NAMES.embedding, (0,))[0],
        context=int(key("context_length")),
    )
    check_geometry(geometry)
    gemma = family == "gemma3"

    def matrix(name: str) -> Blocks:
        tensor = tensors[name]
        return from_gguf(tensor.tensor_type, tensor.data, shapes[name][-1], name)

    def vector(name: str) -> F32:
        return np.asarray(tensors[name].data, np.float32)

    table = Tensors(shapes, matrix, vector, NAMES)
    window = int(key("attention.sliding_window", 0))
    groups = layer_groups(
        geometry.layers,
        window,
        (lambda i: (i + 1) % GEMMA3_PATTERN != 0) if gemma else (lambda _: True),
        (float(key("rope.freq_base", 10_000.0)), _rope_factors(fields, family, table, head_size)),
        GEMMA3_LOCAL_BASE if gemma else float(key("rope.freq_base", 10_000.0)),
    )
    tied = NAMES.head not in shapes
    scale_size = hidden / heads if gemma and geometry.layers == GEMMA3_27B_LAYERS else head_size
    return Checkpoint(
        name=path.stem,
        family=family,
        geometry=geometry,
        groups=groups,
        tokens=_tokens(fields),
        epsilon=float(key("attention.layer_norm_rms_epsilon")),
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=scale_size**-0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        source=Source(file=path.name, sha256=_sha256(path), licence=licence or str(fields.get("general.license", ""))),
        tokenizer_json=tokenizer_from_gguf(fields),
        chat_template=fields.get("tokenizer.chat_template"),
        layer=lambda i: table.layer(i, geometry, interleaved=family == "llama"),
        embedding=lambda: table.blocks(NAMES.embedding, geometry.vocab_size, hidden),
        head=None if tied else lambda: table.blocks(NAMES.head, geometry.vocab_size, hidden),
        final_norm=table.required(NAMES.final_norm, hidden),
        check_all_taken=table.check_all_taken,
    )


def _rope_factors(fields: dict[str, Any], family: str, table: Tensors, head_size: int) -> tuple[float, ...]:
    factors = table.optional("rope_freqs.weight", head_size // 2)
    if factors is not None:
        return tuple(map(float, factors))
    kind = fields.get(f"{family}.rope.scaling.type", "none")
    if kind == "linear":
        return (float(fields[f"{family}.rope.scaling.factor"]),) * (head_size // 2)
    if kind != "none":
        raise ModelError(f"rotary scaling {kind!r} is not supported")
    return ()


def _tokens(fields: dict[str, Any]) -> Tokens:
    names = {token: i for i, token in enumerate(fields.get("tokenizer.ggml.tokens", ()))}
    end = [fields.get("tokenizer.ggml.eos_token_id"), fields.get("tokenizer.ggml.eot_token_id")]
    end += [names.get(token) for token in _END_TOKENS]
    bos = fields.get("tokenizer.ggml.bos_token_id")
    # llama.cpp's default: a SentencePiece vocabulary wants a BOS, a byte-level one does not.
    add_bos = bool(fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama"))
    return Tokens(
        bos=bos, add_bos=add_bos and bos is not None, end=tuple(sorted({int(t) for t in end if t is not None}))
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
