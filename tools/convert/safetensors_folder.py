"""A Hugging Face model folder (config.json, *.safetensors, tokenizer.json) -> Checkpoint."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from skerry.errors import ModelError
from skerry.modelfile import QUANT_BLOCK, Geometry, Source, Tokens
from tools.convert.blocks import F32, Blocks, quantise_8_bit
from tools.convert.checkpoint import (
    GEMMA3_LOCAL_BASE,
    GEMMA3_PATTERN,
    Checkpoint,
    TensorNames,
    Tensors,
    check_geometry,
    layer_groups,
)

_LAYER = "model.layers.{i}."
_LLAMA_LAYER = {
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attention_norm": "input_layernorm.weight",
    "attention_out": "self_attn.o_proj.weight",
    "attention_out_bias": "self_attn.o_proj.bias",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_GEMMA_LAYER = _LLAMA_LAYER | {
    "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}
FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def read(path: Path, licence: str = "") -> Checkpoint:
    """Raises ModelError for a folder that is torn or that no supported family can be read from."""
    try:
        return _checkpoint(path, _json(path / "config.json"), licence)
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from None
    except SafetensorError as error:
        raise ModelError(f"{path}: not whole safetensors: {error}", "download it again") from None
    except KeyError as error:
        raise ModelError(f"{path}: config.json has no {error}", "the file is torn or of an unknown form") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path}: cannot be read: {error}", "the files are torn or of an unknown form") from None


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{file.name}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{file.name}: not JSON: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{file.name}: not a JSON object")
    return document


def _optional_json(file: Path) -> dict[str, Any]:
    return _json(file) if file.is_file() else {}


def _checkpoint(path: Path, config: dict[str, Any], licence: str) -> Checkpoint:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"model_type {kind!r} is not supported", f"supported: {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    gemma = family == "gemma3"
    _check_form(config, "gelu_pytorch_tanh" if gemma else "silu")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError("no *.safetensors here")
    where = {name: file for file in files for name in _open(file).keys()}  # noqa: SIM118
    shapes = {name: tuple(_open(file).get_slice(name).get_shape()) for name, file in where.items()}
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    geometry = Geometry(
        layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        context=int(config["max_position_embeddings"]),
    )
    check_geometry(geometry)

    def values(name: str) -> F32:
        tensor = _open(where[name]).get_tensor(name)
        return np.asarray(tensor, np.float32)

    def matrix(name: str) -> Blocks:
        if shapes[name][-1] % QUANT_BLOCK:
            raise ModelError(f"tensor {name}: {shapes[name][-1]} columns are not a multiple of {QUANT_BLOCK}")
        return quantise_8_bit(values(name))

    layer_names = _GEMMA_LAYER if gemma else _LLAMA_LAYER
    names = TensorNames(
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        final_norm="model.norm.weight",
        layer={part: _LAYER + name for part, name in layer_names.items()},
        ignored=("rotary_emb.inv_freq",),
    )
    # Gemma's norms store their distance from 1 here (its GGUF files store the sum).
    table = Tensors(shapes, matrix, values, names, norm_offset=1.0 if gemma else 0.0)
    tied = bool(config.get("tie_word_embeddings", gemma)) or names.head not in shapes
    if tied:
        table.taken |= {names.head}  # some files keep a copy
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    tokenizer_config = _optional_json(path / "tokenizer_config.json")
    template_file = path / "chat_template.jinja"
    template = template_file.read_text("utf-8") if template_file.is_file() else tokenizer_config.get("chat_template")
    return Checkpoint(
        name=path.name,
        family=family,
        geometry=geometry,
        groups=_groups(config, geometry, gemma),
        tokens=_tokens(config, _optional_json(path / "generation_config.json"), tokenizer_config),
        epsilon=float(config["rms_norm_eps"]),
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=abs(float(config["query_pre_attn_scalar"] if gemma else geometry.head_size)) ** -0.5,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        source=Source(file=path.name, sha256=digest.hexdigest(), licence=licence),
        tokenizer_json=_text(path / "tokenizer.json"),
        chat_template=template if isinstance(template, str) else None,
        layer=lambda i: table.layer(i, geometry, interleaved=False),
        embedding=lambda: table.blocks(names.embedding, geometry.vocab_size, hidden),
        head=None if tied else lambda: table.blocks(names.head, geometry.vocab_size, hidden),
        final_norm=table.required(names.final_norm, hidden) + np.float32(table.norm_offset),
        check_all_taken=table.check_all_taken,
    )


def _check_form(config: dict[str, Any], activation: str) -> None:
    """What the graph computes is not what another variant of the family does."""
    expected = {
        "hidden_act": activation,
        "hidden_activation": activation,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    for key, value in expected.items():
        if config.get(key) not in (None, value):
            raise ModelError(f"config.json: {key} {config[key]!r} is not supported", "this variant is unsupported")


def _open(file: Path) -> Any:
    return safe_open(file, framework="numpy")


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise ModelError(f"{file.name}: {error.strerror}") from None


def _groups(config: dict[str, Any], g: Geometry, gemma: bool) -> Any:
    """Both spellings: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before."""
    parameters: dict[str, Any] = config.get("rope_parameters") or {}
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", {})
    scaling = full or config.get("rope_scaling") or {}
    base = float(full.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    local_base = float(local.get("rope_theta") or config.get("rope_local_base_freq") or GEMMA3_LOCAL_BASE)
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != g.layers:
            raise ModelError(f"layer_types are not understood: {sorted(unknown) or len(kinds)}")
    uses_window = gemma or bool(config.get("use_sliding_window"))
    window = int(config.get("sliding_window") or 0) if uses_window else 0

    def sliding(i: int) -> bool:
        if kinds is not None:
            return bool(kinds[i] == "sliding_attention")
        if gemma:
            return (i + 1) % GEMMA3_PATTERN != 0
        return i >= int(config.get("max_window_layers", 0))

    return layer_groups(g.layers, window, sliding, (base, _factors(scaling, base, g)), local_base if gemma else base)


def _factors(scaling: dict[str, Any], base: float, g: Geometry) -> tuple[float, ...]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return ()
    if kind == "linear":
        return (float(scaling["factor"]),) * (g.head_size // 2)
    if kind != "llama3":
        raise ModelError(f"rotary scaling {kind!r} is not supported")
    # Llama 3.1: long wave lengths are stretched by `factor`, short ones kept, those between blended.
    factor, low, high = (float(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    factors = []
    for j in range(0, g.head_size, 2):
        turns = original / (2 * math.pi * base ** (j / g.head_size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)


def _tokens(config: dict[str, Any], generation: dict[str, Any], tokenizer: dict[str, Any]) -> Tokens:
    end: set[int] = set()
    for document in (config, generation):
        found = document.get("eos_token_id")
        end |= set(found) if isinstance(found, list) else set() if found is None else {int(found)}
    bos = config.get("bos_token_id")
    add_bos = bool(tokenizer.get("add_bos_token", False)) and bos is not None
    return Tokens(bos=bos, add_bos=add_bos, end=tuple(sorted(end)))
