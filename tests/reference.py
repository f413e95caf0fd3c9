"""A decoder in plain numpy, from the equations: no cache, no chunks, float64. What the real one is compared with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def logits(folder: Path, tokens: list[int]) -> np.ndarray:
    """Logits after every token, [len(tokens), vocab_size], of a model in Hugging Face form."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: values.astype(np.float64) for name, values in load_file(folder / "model.safetensors").items()}
    gemma = config["model_type"] == "gemma3_text"
    heads, kv_heads, size = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n, position = len(tokens), np.arange(len(tokens))
    distance = position[:, None] - position

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * (w[name] + gemma)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def by_head(x: np.ndarray, norm_name: str, angles: np.ndarray) -> np.ndarray:
        x = x.reshape(n, -1, size)
        if norm_name in w:
            x = norm(x, norm_name)
        a, b = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    embedding = w["model.embed_tokens.weight"]
    x = embedding[tokens] * (config["hidden_size"] ** 0.5 if gemma else 1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        sliding = gemma and config["layer_types"][i] == "sliding_attention"
        angles = np.outer(position, frequencies(config, sliding))
        seen = (distance >= 0) & (distance < (config["sliding_window"] if sliding else n))

        normed = norm(x, f"{layer}input_layernorm.weight")
        q = by_head(linear(normed, f"{layer}self_attn.q_proj"), f"{layer}self_attn.q_norm.weight", angles)
        k = by_head(linear(normed, f"{layer}self_attn.k_proj"), f"{layer}self_attn.k_norm.weight", angles)
        v = linear(normed, f"{layer}self_attn.v_proj").reshape(n, kv_heads, size)
        k, v = (np.repeat(a, heads // kv_heads, 1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * config.get("query_pre_attn_scalar", size) ** -0.5
        attended = np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v)
        delta = linear(attended.reshape(n, -1), f"{layer}self_attn.o_proj")
        if gemma:
            delta = norm(delta, f"{layer}post_attention_layernorm.weight")
        x = x + delta

        before = "pre_feedforward" if gemma else "post_attention"
        normed = norm(x, f"{layer}{before}_layernorm.weight")
        gate = linear(normed, f"{layer}mlp.gate_proj")
        activated = gelu_tanh(gate) if gemma else gate / (1 + np.exp(-gate))
        delta = linear(activated * linear(normed, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
        if gemma:
            delta = norm(delta, f"{layer}post_feedforward_layernorm.weight")
        x = x + delta
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", embedding).T


def frequencies(config: dict[str, Any], sliding: bool) -> np.ndarray:
    """Radians per position of each rotary pair, with Llama 3's context extension."""
    base = config["rope_local_base_freq"] if sliding else config["rope_theta"]
    frequency = base ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    scaling = config.get("rope_scaling")
    if not scaling:
        return frequency
    length = 2 * np.pi / frequency
    shortest = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    longest = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    blend = (longest / length - 1) / (longest / shortest - 1)
    blended = (1 - blend) * frequency / scaling["factor"] + blend * frequency
    return np.select([length < shortest, length > longest], [frequency, frequency / scaling["factor"]], blended)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
