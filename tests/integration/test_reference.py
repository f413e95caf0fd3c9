"""The whole way from the weights to the logits against the transformers library, and against llama.cpp.

(a) tiny models of every family, (b) real weights with f32 products: the same greedy text, (c) real weights as shipped,
with int8 products: no further from the reference than llama.cpp is.
"""

from pathlib import Path

import numpy as np
import pytest

from skerry.core import Message, Role
from skerry.modelfile import ModelFolder
from skerry.text import Text
from tools.distance import LlamaCpp, Reference, Skerry, divergence, log_softmax, measure, table, windows_of
from tools.tiny import LLAMA3_SCALING

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]

PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"rope_scaling": LLAMA3_SCALING}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma3", {}),
]
PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "How do I clean a cast iron pan?",
    "Explain photosynthesis to a child.",
    "List three uses of baking soda.",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish.",
    "What should I check when the heating does not start?",
    "Give me a name for a small black cat.",
    "How many minutes are in three hours?",
    "Summarise the story of Robinson Crusoe in one sentence.",
    "What is the difference between a frog and a toad?",
    "Write a Python function that adds two numbers.",
    "How long does an egg have to boil?",
    "Who wrote Hamlet, and when?",
    "Suggest a gift for a gardener.",
    "What does a capacitor do?",
    "Say something kind.",
    "What are the primary colours?",
    "Describe a rainy street in two sentences.",
]
NEW_TOKENS = 32


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_tiny_models_agree_with_transformers(family, overrides, tiny_sources, tiny_models):
    """To six times the window."""
    import torch
    import transformers

    tokens = np.random.default_rng(1).integers(3, 300, 400).tolist()
    source, model = tiny_sources(family, **overrides), tiny_models(family, **overrides)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(Skerry(model, f32=True).logits(tokens) - expected).max() < 1e-3
    int8 = divergence(log_softmax(expected), log_softmax(Skerry(model, f32=False).logits(tokens))).mean()
    print(f"{family} {overrides}: int8 products, KL {int8:.5f}")
    assert int8 < 0.01


def same_but_for_ties(expected: list[int], found: list[int], logits: np.ndarray) -> bool:
    """Whether two greedy texts are equal up to where the reference itself had no clear best token.

    logits: the reference's over `expected`, [len(expected), vocab_size].
    """
    for ours, theirs, row in zip(found, expected, logits, strict=True):
        if ours != theirs:
            margin = float(row[theirs] - row[ours])
            print(f"token {theirs} of the reference, {ours} here: {margin:.6f} apart")
            return margin < 1e-3
    return True


def test_smollm2_says_the_same_as_the_reference(default_model, gguf_path):
    reference, skerry = Reference(gguf_path), Skerry(default_model, f32=True)
    tokens = ModelFolder(default_model).manifest.tokens
    text = Text(default_model, tokens.end, tokens.bos, tokens.add_bos)
    for question in PROMPTS:
        prompt = text.encode_chat([Message(Role.USER, question)])
        expected, found = reference.greedy(prompt, NEW_TOKENS), skerry.greedy(prompt, NEW_TOKENS)
        if found != expected:
            logits = reference.logits(prompt + expected[:-1])[-NEW_TOKENS:]
            assert same_but_for_ties(expected, found, logits), question


def test_gemma_says_the_same_as_the_reference(gemma_model, gemma_gguf_path):
    """8-bit weights decode slowly with f32 products, so most answers are the reference's own, judged in one prefill: at
    every position the best token must be the same. Two are really decoded."""
    reference, skerry = Reference(gemma_gguf_path), Skerry(gemma_model, f32=True)
    tokens = ModelFolder(gemma_model).manifest.tokens
    text = Text(gemma_model, tokens.end, tokens.bos, tokens.add_bos)
    for number, question in enumerate(PROMPTS):
        prompt = text.encode_chat([Message(Role.USER, question)])
        expected = reference.greedy(prompt, NEW_TOKENS)
        found = skerry.logits(prompt + expected[:-1])[-NEW_TOKENS:].argmax(-1).tolist()
        for answer in (found, skerry.greedy(prompt, NEW_TOKENS)) if number < 2 else (found,):
            if answer != expected:
                logits = reference.logits(prompt + expected[:-1])[-NEW_TOKENS:]
                assert same_but_for_ties(expected, answer, logits), question


@pytest.mark.parametrize(("model", "gguf", "windows"), [("default_model", "gguf_path", 4)])
def test_as_shipped_no_further_from_the_reference_than_llama_cpp(model, gguf, windows, request):
    folder, file = request.getfixturevalue(model), request.getfixturevalue(gguf)
    pieces = windows_of(PROSE.read_text("utf-8"), folder, windows, 512)
    distances = measure(Reference(file), {"Skerry": Skerry(folder, f32=False)}, LlamaCpp(file), pieces)
    print(table(distances))
    ours, theirs = distances["Skerry"], distances["llama.cpp"]
    assert ours.divergence <= 0.006
    assert ours.same_top >= 0.95
    assert ours.coarse_divergence <= theirs.coarse_divergence
