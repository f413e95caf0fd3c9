"""python -m tools.distance --model FOLDER --gguf FILE: how far quantised arithmetic takes the answers from the weights.

The reference is the model of the `transformers` library in f32, with the numbers that the GGUF file holds. Skerry and
llama.cpp run the very same numbers with 8-bit activations, and each loses a little. All are given the same text, token
by token, and their predictions are compared at every position: the Kullback-Leibler divergence from the reference's
distribution, in nats, and how often the likeliest token is the same.

llama.cpp's server tells only its likeliest tokens, so there is a second, coarser divergence that is the same for both:
over the tokens that llama.cpp names, with all others together as one more event.

Needs the extra `reference`.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from skerry.arena import Arena, Layout
from skerry.core import BLOCK
from skerry.decoder import Decoder, next_chunk
from skerry.host import Host
from skerry.modelfile import TOKENIZER, ModelFolder
from skerry.session import Sessions
from tools.convert.blocks import quantise_8_bit

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
TOP = 500
"""Tokens that llama.cpp is asked to name at each position."""

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Reference:
    """The `transformers` model in f32 with the weights of a GGUF file; llama and Gemma 3."""

    def __init__(self, path: Path, as_converted: bool = False) -> None:
        """as_converted: with Q6_K rounded to 8-bit blocks, as tools/convert holds it; all other types are the file's
        very numbers in both."""
        import torch
        import transformers

        reader = gguf.GGUFReader(path)
        fields = {key: value.contents() for key, value in reader.fields.items()}
        family = fields["general.architecture"]
        key = {name.removeprefix(f"{family}."): value for name, value in fields.items()}
        sizes: dict[str, Any] = {
            "vocab_size": len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": key["embedding_length"],
            "intermediate_size": key["feed_forward_length"],
            "num_hidden_layers": key["block_count"],
            "num_attention_heads": key["attention.head_count"],
            "num_key_value_heads": key["attention.head_count_kv"],
            "head_dim": key.get("attention.key_length", key["embedding_length"] // key["attention.head_count"]),
            "rms_norm_eps": key["attention.layer_norm_rms_epsilon"],
            "max_position_embeddings": key["context_length"],
            "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if family == "gemma3":
            config = transformers.Gemma3TextConfig(
                sliding_window=key["attention.sliding_window"],
                query_pre_attn_scalar=sizes["head_dim"],
                layer_types=[("full" if i % 6 == 5 else "sliding") + "_attention" for i in range(key["block_count"])],
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": key["rope.freq_base"]},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
                **sizes,
            )
        else:
            assert family == "llama"
            rope = {"rope_type": "default", "rope_theta": key["rope.freq_base"]}
            config = transformers.LlamaConfig(rope_parameters=rope, **sizes)
        weights = {}
        for tensor in reader.tensors:
            w = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if as_converted and tensor.tensor_type.name == "Q6_K":
                w = quantise_8_bit(w).dequantised()
            name, _, kind = tensor.name.rpartition(".")
            if name in _OUTER:
                name = _OUTER[name]
            else:
                _, layer, part = name.split(".", 2)
                name = f"model.layers.{layer}.{(_GEMMA_LAYER if family == 'gemma3' else _LAYER)[part]}"
            if family == "gemma3" and w.ndim == 1:
                w -= 1
            if family == "llama" and name.endswith(("q_proj", "k_proj")):  # rows are in rotary pairs
                heads = sizes["num_attention_heads" if name.endswith("q_proj") else "num_key_value_heads"]
                w = w.reshape(heads, -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
            weights[f"{name}.{kind}"] = torch.from_numpy(w)
        self._torch = torch
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        self.model.tie_weights()

    def logits(self, tokens: Sequence[int]) -> F32:
        """After every token, [len(tokens), vocab_size]."""
        with self._torch.inference_mode():
            return np.asarray(self.model(self._torch.tensor([list(tokens)])).logits[0].numpy())


class Skerry:
    """The agent's decoder, asked for its logits at every position."""

    def __init__(self, folder: Path, f32: bool, slots: int = 1, max_tokens: int = 1024) -> None:
        model = ModelFolder(folder)
        sessions = Sessions(model, Host(), f32=f32, threads=0, spin=False, cache_dir=None)
        arena = Arena(Layout(model.manifest.geometry, model.manifest.groups, slots, max_tokens), lock=False)
        self._decoder = Decoder(model, sessions, arena, logits_rows=BLOCK)

    def logits(self, tokens: Sequence[int], slot: int = 0) -> F32:
        """After every token, [len(tokens), vocab_size]."""
        self._decoder.arena.truncate(slot, 0)
        rows = []
        while n := next_chunk(self._decoder.arena.length(slot), len(tokens)):
            rows.append(self._decoder.prefill(slot, list(tokens[:n]), n).copy())
            tokens = tokens[n:]
        return np.concatenate(rows)

    def greedy(self, prompts: Sequence[Sequence[int]], n: int) -> list[list[int]]:
        """The n likeliest tokens after each prompt, one after the other; all slots decode together."""
        answers = [[int(self.logits(prompt, slot)[-1].argmax())] for slot, prompt in enumerate(prompts)]
        while len(answers[0]) < n:
            rows = self._decoder.decode(0, [answer[-1] for answer in answers], [True] * len(answers))
            for answer, row in zip(answers, rows, strict=True):
                answer.append(int(row.argmax()))
        return answers


class LlamaCpp:
    """llama.cpp's server. It tells the probabilities of the next token only, so every position is a call; it keeps what
    the calls have in common."""

    def __init__(self, path: Path, context: int = 1024) -> None:
        import xllamacpp

        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = 1
        parameters.cpuparams_batch.n_threads = 1
        parameters.verbosity = -1
        self._server = xllamacpp.Server(parameters)

    def likeliest(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], F64]:
        """After `tokens`: the ids of the likeliest tokens, and their log probabilities."""
        request = {"prompt": list(tokens), "n_predict": 1, "temperature": 0, "cache_prompt": True, "n_probs": TOP}
        answer = self._server.handle_completions(request)
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return np.asarray([t["id"] for t in top]), np.asarray([t["logprob"] for t in top], np.float64)


@dataclass
class Distance:
    """Of one implementation from the reference, over all positions."""

    divergences: list[float] = field(default_factory=list)
    """Over the whole vocabulary; not known of llama.cpp."""
    coarse: list[float] = field(default_factory=list)
    """Over the tokens that llama.cpp names, and one event for all others."""
    same: list[bool] = field(default_factory=list)

    @property
    def divergence(self) -> float:
        return float(np.mean(self.divergences)) if self.divergences else float("nan")

    @property
    def coarse_divergence(self) -> float:
        return float(np.mean(self.coarse)) if self.coarse else float("nan")

    @property
    def same_top(self) -> float:
        return float(np.mean(self.same))


def excess(ours: Distance, theirs: Distance) -> tuple[float, float]:
    """By how much our coarse divergence is larger at the same positions: the mean, and its standard error."""
    pairs = np.subtract(ours.coarse, theirs.coarse)
    return float(pairs.mean()), float(pairs.std(ddof=1) / len(pairs) ** 0.5)


def log_softmax(logits: F32) -> F64:
    logits = logits - logits.max(-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(-1, keepdims=True, dtype=np.float64)), np.float64)


def divergence(p: F64, q: F64) -> F64:
    """Kullback-Leibler divergence of each row of log probabilities, in nats."""
    return np.asarray((np.exp(p) * (p - q)).sum(-1))


def with_tail(named: F64) -> F64:
    """Log probabilities of some tokens, and of all others together as one more."""
    tail = np.log(np.maximum(1 - np.exp(named).sum(), 1e-9))
    return np.append(named, tail)


def measure(
    reference: Reference, ours: dict[str, Skerry], peer: LlamaCpp | None, windows: Iterable[Sequence[int]]
) -> dict[str, Distance]:
    """Distances by name of ours, and of `llama.cpp`."""
    distances = {name: Distance() for name in (*ours, *(["llama.cpp"] if peer else []))}
    for tokens in windows:
        p = log_softmax(reference.logits(tokens))
        q = {name: log_softmax(skerry.logits(tokens)) for name, skerry in ours.items()}
        for name, rows in q.items():
            distances[name].divergences += divergence(p, rows).tolist()
            distances[name].same += (p.argmax(-1) == rows.argmax(-1)).tolist()
        if peer:
            for at in range(len(tokens)):
                ids, named = peer.likeliest(tokens[: at + 1])
                expected = with_tail(p[at, ids])
                for name, rows in q.items():
                    distances[name].coarse.append(float(divergence(expected, with_tail(rows[at, ids]))))
                distances["llama.cpp"].coarse.append(float(divergence(expected, with_tail(named))))
                distances["llama.cpp"].same.append(bool(p[at].argmax() == ids[0]))
    return distances


def windows_of(text: str, folder: Path, count: int, size: int) -> list[list[int]]:
    """The first `count` pieces of a text, each `size` tokens long, with BOS where the model wants one."""
    tokens = ModelFolder(folder).manifest.tokens
    start = [tokens.bos] if tokens.add_bos and tokens.bos is not None else []
    ids = Tokenizer.from_file(str(folder / TOKENIZER)).encode(text, add_special_tokens=False).ids
    step = size - len(start)
    windows = [start + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)][:count]
    if len(windows) < count:
        raise ValueError(f"the text has {len(ids)} tokens, too few for {count} windows of {size}")
    return windows


def table(distances: dict[str, Distance]) -> str:
    lines = [f"{'':14} {'positions':>9} {'KL':>9} {'coarse KL':>9} {'same top':>9}"]
    for name, d in distances.items():
        numbers = f"{d.divergence:9.5f} {d.coarse_divergence:9.5f} {d.same_top:9.4f}"
        lines.append(f"{name:14} {len(d.same):9} {numbers}")
    if "llama.cpp" in distances:
        for name in distances.keys() - {"llama.cpp"}:
            mean, error = excess(distances[name], distances["llama.cpp"])
            lines.append(f"{name} beyond llama.cpp, coarse KL at the same positions: {mean:+.5f} +- {error:.5f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.distance", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the model folder")
    parser.add_argument("--gguf", type=Path, required=True, help="the file that it was converted from")
    parser.add_argument("--text", type=Path, default=Path("tests/data/prose.txt"), help="ordinary text to predict")
    parser.add_argument("--windows", type=int, default=4, help="pieces of the text")
    parser.add_argument("--size", type=int, default=512, help="tokens in a piece")
    parser.add_argument("--f32", action="store_true", help="also Skerry with f32 activations")
    parser.add_argument("--no-peer", action="store_true", help="leave out llama.cpp")
    arguments = parser.parse_args()
    windows = windows_of(arguments.text.read_text("utf-8"), arguments.model, arguments.windows, arguments.size)
    ours = {"Skerry": Skerry(arguments.model, f32=False)}
    if arguments.f32:
        ours["Skerry f32"] = Skerry(arguments.model, f32=True)
    peer = None if arguments.no_peer else LlamaCpp(arguments.gguf)
    print(table(measure(Reference(arguments.gguf), ours, peer, windows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
