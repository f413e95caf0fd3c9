"""The whole way from the weights to the logits against the transformers library, and against llama.cpp.

(a) tiny models of every family, (b) real weights with f32 products: the same greedy text, (c) real weights as shipped,
with int8 products: no further from the reference than llama.cpp is.
"""

import logging
from pathlib import Path

import numpy as np
import pytest

from skerry.core import Message, Role
from skerry.modelfile import ModelFolder
from skerry.text import Text
from tools.distance import LlamaCpp, Reference, Skerry, divergence, excess, log_softmax, measure, table, windows_of
from tools.tiny import LLAMA3_SCALING

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1800)]

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

log = logging.getLogger(__name__)


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
    log.info("%s %s: int8 products, KL %.5f", family, overrides, int8)
    assert int8 < 0.01


def assert_greedy_is_the_same(reference: Reference, folder: Path) -> None:
    """Every token of our greedy text must be the reference's likeliest one after those before it; so, by induction, its
    own greedy text is this. Only where two are closer than f32 can tell may it be the other."""
    tokens = ModelFolder(folder).manifest.tokens
    text = Text(folder, tokens.end, tokens.bos, tokens.add_bos)
    prompts = [text.encode_chat([Message(Role.USER, question)]) for question in PROMPTS]
    answers = Skerry(folder, f32=True, slots=len(prompts), max_tokens=256).greedy(prompts, NEW_TOKENS)
    for question, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        logits = reference.logits(prompt + answer[:-1])[-len(answer) :]
        margins = logits.max(-1) - logits[np.arange(len(answer)), answer]
        if margins.any():
            log.info("%s: not the reference's best, but so much less: %s", question, margins[margins > 0])
        assert margins.max() < 1e-3, question


def test_smollm2_says_the_same_as_the_reference(default_model, gguf_path):
    assert_greedy_is_the_same(Reference(gguf_path), default_model)


def test_gemma_says_the_same_as_the_reference(gemma_model, gemma_gguf_path):
    """Its Q6_K matrices (9 of 126) are rounded to 8 bits when it is converted; here the reference has the same ones."""
    assert_greedy_is_the_same(Reference(gemma_gguf_path, as_converted=True), gemma_model)


def assert_no_further_than_llama_cpp(folder: Path, gguf: Path) -> None:
    pieces = windows_of(PROSE.read_text("utf-8"), folder, 4, 512)
    distances = measure(Reference(gguf), {"Skerry": Skerry(folder, f32=False)}, LlamaCpp(gguf), pieces)
    log.info("as shipped:\n%s", table(distances))
    ours, theirs = distances["Skerry"], distances["llama.cpp"]
    assert ours.divergence <= 0.006
    assert ours.same_top >= 0.95
    mean, error = excess(ours, theirs)
    assert mean <= 2 * error  # not worse, as far as 2,048 positions can tell


def test_smollm2_as_shipped_is_no_further_from_the_reference_than_llama_cpp(default_model, gguf_path):
    assert_no_further_than_llama_cpp(default_model, gguf_path)


def test_gemma_as_shipped_is_no_further_from_the_reference_than_llama_cpp(gemma_model, gemma_gguf_path):
    assert_no_further_than_llama_cpp(gemma_model, gemma_gguf_path)
