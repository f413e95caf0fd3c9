"""A tiny model in Hugging Face form -> the GGUF that llama.cpp's converter would write, in Q8_0, without loss."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file

from tests import reference

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(source: Path) -> dict[str, np.ndarray]:
    """GGUF name -> values: query and key rows of llama in rotary pairs, Gemma's norms with their 1."""
    config = json.loads((source / "config.json").read_text())
    llama, gemma = config["model_type"] == "llama", config["model_type"] == "gemma3_text"
    parts = GEMMA_PARTS if gemma else PARTS
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    result = {}
    for name, values in load_file(source / "model.safetensors").items():
        w = values.astype(np.float32)
        stem, kind = name.rsplit(".", 1)
        if llama and stem.endswith(("q_proj", "k_proj")):
            w = w.reshape(heads[stem[-6]], 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        if gemma and stem.endswith("norm"):
            w += 1
        if stem in OUTER:
            result[f"{OUTER[stem]}.{kind}"] = w
        else:
            _, _, layer, part = stem.split(".", 3)
            result[f"blk.{layer}.{parts[part]}.{kind}"] = w
    if config.get("rope_scaling"):
        plain = reference.frequencies(config | {"rope_scaling": None}, False)
        result["rope_freqs.weight"] = (plain / reference.frequencies(config, False)).astype(np.float32)
    return result


def fields(source: Path) -> dict[str, Any]:
    config = json.loads((source / "config.json").read_text())
    family = {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    tokenizer = json.loads((source / "tokenizer.json").read_text())["model"]
    found = {
        "general.architecture": family,
        f"{family}.block_count": config["num_hidden_layers"],
        f"{family}.context_length": config["max_position_embeddings"],
        f"{family}.embedding_length": config["hidden_size"],
        f"{family}.feed_forward_length": config["intermediate_size"],
        f"{family}.attention.head_count": config["num_attention_heads"],
        f"{family}.attention.head_count_kv": config["num_key_value_heads"],
        f"{family}.attention.key_length": config["head_dim"],
        f"{family}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{family}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(tokenizer["vocab"]),
        "tokenizer.ggml.token_type": [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokenizer["vocab"]) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["merges"]],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.add_bos_token": family == "gemma3",
        "tokenizer.chat_template": json.loads((source / "tokenizer_config.json").read_text())["chat_template"],
    }
    if "sliding_window" in config:
        found[f"{family}.attention.sliding_window"] = config["sliding_window"]
    return found


def write_gguf(target: Path, metadata: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    writer = GGUFWriter(target, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    for name, w in weights.items():
        if w.ndim == 1:
            writer.add_tensor(name, w)
        else:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(w, q8), raw_dtype=q8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
