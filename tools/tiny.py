"""python -m tools.tiny FOLDER: a small random model in Hugging Face form, for tests; the same bytes for the same seed.

It has everything that a real folder has and computes nothing sensible, but it is lively: the next token depends on the
whole context and greedy text does not repeat itself. Its weights are exact in 8-bit blocks (and in GGUF's Q8_0 and in
f16), so what tools/convert makes of it holds the very same numbers, and a difference in logits is a fault.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tools.convert.blocks import F32, Blocks, quantise_8_bit

Family = Literal["llama", "qwen2", "qwen3", "gemma3"]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "h e|Ġ t|Ġt he|i n|Ġ a|r e|o n|e r|Ġ s|e n|Ġ o|a t|Ġ w|o r|Ġ c|Ġ b|n d|e s|Ġ f|Ġa nd|i s|i t|Ġ i|o u|a n|Ġ m|e d"
    "|l l|Ġ h|in g|a r|a l|Ġ p|Ġ l|Ġ d|o m|Ġ in|l e|Ġ re|i c|v e|Ġ n|a s|s t|Ġt o|Ġ e|r o|u s|us er|o d|om e|Ġ T|ĠT he"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""An override for `rope_scaling`: at this length every branch of the rule is used."""

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float16",
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 32,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "bos_token_id": 0,
    },
}


def write_tiny(folder: Path, family: Family, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of a family to `folder` and return it; overrides are keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    config = {**_SIZES, **_FAMILIES[family], "vocab_size": tokenizer.get_vocab_size(), **overrides}
    weights = _weights(config, family, np.random.default_rng(seed))
    save_file({name: w.astype(np.float16) for name, w in weights.items()}, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, end = SPECIAL[config["bos_token_id"]], SPECIAL[config["eos_token_id"]]
    documents = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": config["bos_token_id"], "eos_token_id": [2, 0]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": family == "gemma3",
            "bos_token": bos,
            "eos_token": end,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    return folder


def _tokenizer() -> Tokenizer:
    """Byte-level BPE: the special tokens, all bytes, and a few merges of English."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES.split("|"))]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def _weights(config: dict[str, Any], family: Family, random: np.random.Generator) -> dict[str, F32]:
    hidden, middle, head_size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_size, config["num_key_value_heads"] * head_size
    gemma = family == "gemma3"

    def matrix(rows: int, columns: int, gain: float = 1.0) -> F32:
        return _exact(random.normal(0, gain * columns**-0.5, (rows, columns)).astype(np.float32))

    def norm(size: int, mean: float = 1.0) -> F32:
        """Gemma stores the distance from 1."""
        return _half(random.normal(mean - gemma, 0.1, size))

    def bias(size: int) -> F32:
        return _half(random.normal(0, 0.2, size))

    weights = {"model.embed_tokens.weight": _vocabulary(random, config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": matrix(q, hidden, 1.4),
            "self_attn.k_proj.weight": matrix(kv, hidden, 1.4),
            "self_attn.v_proj.weight": matrix(kv, hidden),
            "self_attn.o_proj.weight": matrix(hidden, q, 3.0),
            "post_attention_layernorm.weight": norm(hidden, 5.0 if gemma else 1.0),
            "mlp.gate_proj.weight": matrix(middle, hidden),
            "mlp.up_proj.weight": matrix(middle, hidden),
            "mlp.down_proj.weight": matrix(hidden, middle, 6.0),
        }
        if family == "qwen2":
            layer |= {f"self_attn.{part}_proj.bias": bias(size) for part, size in (("q", q), ("k", kv), ("v", kv))}
        if family in ("qwen3", "gemma3"):
            layer |= {f"self_attn.{part}_norm.weight": norm(head_size, 1.4) for part in "qk"}
        if gemma:
            layer["pre_feedforward_layernorm.weight"] = norm(hidden)
            layer["post_feedforward_layernorm.weight"] = norm(hidden, 5.0)
        weights |= {f"model.layers.{i}.{name}": w for name, w in layer.items()}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = _vocabulary(random, config["vocab_size"], hidden)
    return weights


def _vocabulary(random: np.random.Generator, vocab_size: int, hidden: int) -> F32:
    """Embeddings or the head. Special tokens and bytes that are no ASCII are short, so that they are rarely chosen: a
    greedy answer is mostly readable and goes on."""
    table = random.normal(0, 2.4 * hidden**-0.5, (vocab_size, hidden)).astype(np.float32)
    tokenizer = _tokenizer()
    rare = [i for i in range(vocab_size) if i < len(SPECIAL) or not tokenizer.decode([i]).isprintable()]
    rare += [i for i in range(vocab_size) if "\ufffd" in tokenizer.decode([i])]
    table[rare] *= 0.25
    return _exact(table)


def _exact(w: F32) -> F32:
    """The nearest numbers that 8-bit blocks, and f16, hold without loss: with scales of four significant bits."""
    blocks = quantise_8_bit(w)
    mantissa, exponent = np.frexp(blocks.scale)
    return Blocks(8, blocks.q, np.ldexp(np.rint(mantissa * 16) / 16, exponent).astype(np.float32)).dequantised()


def _half(values: npt.NDArray[np.float64]) -> F32:
    return values.astype(np.float16).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.tiny", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=get_args(Family), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tiny(arguments.folder, arguments.family, arguments.seed)


if __name__ == "__main__":
    main()
