"""The sampler against a plain, slow reference, and what it promises about seeds, ties and broken logits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.core import Sampling
from skerry.errors import ModelError, RequestError
from skerry.sampler import Floats, Sampler


def reference(logits: Floats, sampling: Sampling, seen: set[int]) -> dict[int, float]:
    """Token -> probability by Hugging Face's definitions, one token at a time, in float64."""
    scores = {i: float(x) for i, x in enumerate(logits)}
    for i in seen:
        by = sampling.repetition_penalty
        scores[i] = scores[i] / by if scores[i] > 0 else scores[i] * by
    scores = {i: x / sampling.temperature for i, x in scores.items() if x > -np.inf}
    if sampling.top_k:
        last = sorted(scores.values(), reverse=True)[: sampling.top_k][-1]
        scores = {i: x for i, x in scores.items() if x >= last}
    total = sum(np.exp(x - max(scores.values())) for x in scores.values())
    p = {i: float(np.exp(x - max(scores.values())) / total) for i, x in scores.items()}
    if sampling.top_p < 1:
        p = {i: x for i, x in p.items() if sum(y for y in p.values() if y > x) < sampling.top_p}
    p = {i: x for i, x in p.items() if x >= sampling.min_p * max(p.values())}
    return {i: x / sum(p.values()) for i, x in p.items()}


# Multiples of 1/8 tie often, and are far enough apart that float32 and float64 agree on what is kept.
LOGITS = st.lists(st.integers(-80, 80), min_size=1, max_size=40)


@settings(deadline=None, max_examples=300)
@given(
    eighths=LOGITS,
    forbidden=st.sets(st.integers(1, 39)),
    seen=st.sets(st.integers(0, 39)),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([0.1237, 0.5013, 0.9231, 1.0]),
    min_p=st.sampled_from([0.0, 0.0501, 0.3007]),
    penalty=st.sampled_from([1.0, 1.1, 1.5]),
)
def test_distribution_is_the_reference(
    eighths: list[int],
    forbidden: set[int],
    seen: set[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalty: float,
) -> None:
    logits = (np.array(eighths) / 8).astype(np.float32)
    logits[[i for i in forbidden if i < len(logits)]] = -np.inf
    seen = {i for i in seen if i < len(logits)}
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty, seed=1)
    sampler = Sampler(sampling, len(logits))
    sampler.accept(sorted(seen))
    ids, probabilities = sampler.probabilities(logits)
    want = reference(logits, sampling, seen)
    assert ids.tolist() == sorted(want)
    assert probabilities == pytest.approx([want[i] for i in ids.tolist()], rel=1e-4)
    assert sampler.choose(logits) in want


def test_nucleus_wider_than_the_first_look() -> None:
    logits = np.zeros(3000, np.float32)
    logits[:2000] = np.linspace(1, 2, 2000)  # nearly flat: top-p needs far more than its first 256
    ids, _ = Sampler(Sampling(temperature=1.0, top_p=0.9), 3000).probabilities(logits)
    assert ids.tolist() == sorted(reference(logits, Sampling(temperature=1.0, top_p=0.9), set()))


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    sampler = Sampler(Sampling(temperature=1.0, seed=3), 4)
    counts = np.bincount([sampler.choose(logits) for _ in range(20_000)], minlength=4)
    assert counts / 20_000 == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.012)  # over three standard deviations


def test_greedy_takes_the_lowest_of_ties_and_draws_nothing() -> None:
    sampler = Sampler(Sampling(), 5)
    logits = np.array([1, 7, 3, 7, 7], np.float32)
    before = sampler.state()
    assert sampler.choose(logits) == 1
    ids, probabilities = sampler.probabilities(logits)
    assert (ids.tolist(), probabilities.tolist()) == ([1], [1.0])
    assert sampler.state() == before


def test_penalty_applies_once_to_positive_and_negative() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), 3)
    sampler.accept([0, 0, 0])
    assert sampler.choose(np.array([3, 2, 1], np.float32)) == 1  # 3 / 2 < 2
    assert sampler.choose(np.array([-1, -1.5, -9], np.float32)) == 1  # -1 * 2 < -1.5


def test_logits_are_left_as_they_were() -> None:
    logits = np.array([3, 2, 1], np.float32)
    sampler = Sampler(Sampling(0.5, 2, 0.9, 0.1, 1.5), 3)
    sampler.accept(0)
    sampler.choose(logits)
    assert logits.tolist() == [3, 2, 1]


def noise(steps: int, size: int = 64) -> list[Floats]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=size).astype(np.float32) for _ in range(steps)]


def run(sampler: Sampler, logits: list[Floats]) -> list[int]:
    tokens = []
    for row in logits:
        tokens.append(sampler.choose(row))
        sampler.accept(tokens[-1])
    return tokens


def test_same_seed_same_tokens() -> None:
    def again(seed: int | None) -> list[int]:
        return run(Sampler(Sampling(temperature=1.0, seed=seed), 64), noise(50))

    assert again(5) == again(5)
    assert again(5) != again(6)
    assert again(None) != again(None)


@pytest.mark.parametrize("vocab_size", [64, 61])
def test_restored_sampler_goes_on_the_same(vocab_size: int) -> None:
    sampling = Sampling(temperature=1.0, repetition_penalty=1.3, seed=9)
    first, second = noise(20, vocab_size), noise(20, vocab_size)
    sampler = Sampler(sampling, vocab_size)
    run(sampler, first)
    saved = sampler.state()
    restored = Sampler(Sampling(temperature=1.0, repetition_penalty=1.3), vocab_size)
    restored.restore(saved)
    assert restored.state() == saved
    assert run(restored, second) == run(sampler, second)


@pytest.mark.parametrize("state", [b"", b"short", Sampler(Sampling(), 72).state()])
def test_foreign_state_is_refused(state: bytes) -> None:
    with pytest.raises(RequestError, match="does not fit a vocabulary of 64"):
        Sampler(Sampling(), 64).restore(state)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 2, 0.9, 0.1, 1.2), Sampling(1e-6)])
@pytest.mark.parametrize("broken", [[1, np.nan, 2], [-np.inf] * 3, [np.nan] * 3, [1, np.inf, 2]])
def test_broken_logits_are_an_error(sampling: Sampling, broken: list[float]) -> None:
    sampler = Sampler(sampling, 3)
    sampler.accept(0)
    with pytest.raises(ModelError, match="no token to choose"):
        sampler.choose(np.array(broken, np.float32))


def test_tiny_temperature_is_greedy() -> None:
    ids, probabilities = Sampler(Sampling(temperature=1e-60), 3).probabilities(np.array([1, 3, 2], np.float32))
    assert ids[probabilities.argmax()] == 1
    assert probabilities.max() == 1
