"""Decoder, runner and arena on tiny models: whatever the path, the same logits, and never a byte beside the arena."""

import ctypes
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.arena import Arena, Layout, first_row
from skerry.core import BLOCK
from skerry.decoder import Decoder, next_chunk
from skerry.errors import CapacityError, ModelError, SkerryError
from skerry.host import Host
from skerry.modelfile import Geometry, LayerGroup, ModelFolder
from skerry.runner import Runner
from skerry.session import Sessions
from tests import reference
from tools.tiny import LLAMA3_SCALING

VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"rope_scaling": LLAMA3_SCALING}),
    ("llama", {"head_dim": 64, "num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma3", {}),
    ("gemma3", {"sliding_window": 130}),
]


@pytest.fixture
def open_decoder(tiny_models) -> Callable[..., Decoder]:
    """A decoder over its own arena; every arena is checked when the test is over."""
    arenas = []

    def open_one(family="llama", *, slots=1, max_tokens=600, f32=False, **overrides) -> Decoder:
        model = ModelFolder(tiny_models(family, **overrides))
        sessions = Sessions(model, Host(), f32=f32, threads=1, spin=False, cache_dir=None)
        arenas.append(Arena(Layout(model.manifest.geometry, model.manifest.groups, slots, max_tokens), lock=False))
        return Decoder(model, sessions, arenas[-1], logits_rows=BLOCK)

    yield open_one
    for arena in arenas:
        arena.check_integrity()


def some_tokens(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, n).tolist()


def fill(decoder: Decoder, slot: int, tokens: list[int], largest: int = BLOCK) -> np.ndarray:
    """Prefill in chunks; the logits after every token."""
    rows = []
    while tokens:
        n = min(largest, next_chunk(decoder.arena.length(slot), len(tokens)))
        rows.append(decoder.prefill(slot, tokens[:n], n).copy())
        tokens = tokens[n:]
    return np.concatenate(rows)


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of rows of logits, in nats."""
    p, q = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_are_those_of_the_equations(family, overrides, open_decoder, tiny_sources):
    """Over several times the window, so the rows of sliding layers move."""
    tokens = some_tokens(500)
    expected = reference.logits(tiny_sources(family, **overrides), tokens)
    f32 = fill(open_decoder(family, f32=True, **overrides), 0, tokens)
    assert np.abs(f32 - expected).max() < 3e-4
    int8 = fill(open_decoder(family, **overrides), 0, tokens)
    assert divergence(expected, int8) < 0.01
    assert (expected.argmax(-1) == int8.argmax(-1)).mean() > 0.9


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("largest", [1, 7, 50])
def test_chunk_size_is_only_rounding(family, largest, open_decoder):
    """Attention adds up in another order for another number of rows (1e-6), and int8 products round that up."""
    tokens = some_tokens(420)
    whole, parts = (fill(open_decoder(family, f32=True), 0, tokens, size) for size in (BLOCK, largest))
    assert np.abs(whole - parts).max() < 3e-4
    whole, parts = (fill(open_decoder(family), 0, tokens, size) for size in (BLOCK, largest))
    assert divergence(whole, parts) < 0.002


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_steps_compute_the_very_same(family, open_decoder):
    tokens = some_tokens(300)
    first, second = (fill(open_decoder(family, slots=3), slot, tokens) for slot in (0, 2))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_of_fewer_rows_are_the_last_ones(family, open_decoder):
    tokens = some_tokens(BLOCK)
    every = open_decoder(family).prefill(0, tokens, BLOCK)
    assert np.array_equal(open_decoder(family).prefill(0, tokens, 5), every[-5:])
    assert open_decoder(family).prefill(0, tokens, 0).shape == (0, every.shape[1])


def test_next_chunk_ends_at_blocks_or_with_the_prompt():
    assert [next_chunk(0, 300), next_chunk(128, 172), next_chunk(256, 44)] == [128, 128, 44]
    assert [next_chunk(100, 300), next_chunk(127, 9), next_chunk(130, 1)] == [28, 1, 1]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_batch_computes_what_single_slots_do(family, open_decoder):
    lengths = [1, 64, 300, 129, 255]
    batch, single = (open_decoder(family, slots=len(lengths)) for _ in range(2))
    for slot, length in enumerate(lengths):
        for decoder in (batch, single):
            fill(decoder, slot, some_tokens(length, slot))
    for step in range(150):  # slots pass blocks and windows at different steps
        tokens = some_tokens(len(lengths), 100 + step)
        together = batch.decode(0, tokens, [True] * len(lengths)).copy()
        for slot, token in enumerate(tokens):
            assert np.array_equal(single.decode(slot, [token])[0], together[slot])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("idle_length", [0, 1, 127, 128, 255, 256, 384, 400])
def test_an_idle_slot_inside_a_batch_stays_as_it_was(family, idle_length, open_decoder):
    """At every fill, also at blocks and when it is full."""
    max_tokens = 400
    busy, quiet = (open_decoder(family, slots=3, max_tokens=max_tokens) for _ in range(2))
    for decoder in (busy, quiet):
        for slot, length in enumerate((30, idle_length, 140)):
            if length:
                fill(decoder, slot, some_tokens(length, slot))
    for step in range(140):
        tokens = some_tokens(3, step)
        rows = busy.decode(0, tokens, [True, False, True]).copy()
        for slot in (0, 2):
            assert np.array_equal(quiet.decode(slot, [tokens[slot]])[0], rows[slot])
    assert busy.arena.length(1) == idle_length
    if idle_length < max_tokens:
        after = some_tokens(min(40, max_tokens - idle_length), 7)
        assert np.array_equal(fill(busy, 1, after), fill(quiet, 1, after))


def test_truncate_and_go_on_another_way(open_decoder):
    decoder, straight = open_decoder(), open_decoder()
    start, wrong, right = some_tokens(200), some_tokens(60, 2), some_tokens(50, 3)
    fill(decoder, 0, start)
    fill(decoder, 0, wrong)
    assert decoder.arena.truncate(0, 200) == 200
    fill(straight, 0, start)
    assert np.array_equal(fill(decoder, 0, right), fill(straight, 0, right))
    assert decoder.arena.length(0) == 250
    assert decoder.arena.truncate(0, 0) == 0
    assert np.array_equal(fill(decoder, 0, start), fill(open_decoder(), 0, start))


def test_truncate_of_sliding_layers(open_decoder):
    """Back within the rows that are still there, or to nothing."""
    decoder, straight = open_decoder("gemma3"), open_decoder("gemma3")
    start, right = some_tokens(380), some_tokens(50, 3)
    fill(decoder, 0, start)
    fill(decoder, 0, some_tokens(10, 2))
    assert decoder.arena.truncate(0, 380) == 380
    fill(straight, 0, start)
    assert np.array_equal(fill(decoder, 0, right), fill(straight, 0, right))
    assert decoder.arena.truncate(0, 300) == 0
    assert decoder.arena.length(0) == 0
    assert np.array_equal(fill(decoder, 0, start), fill(open_decoder("gemma3"), 0, start))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beyond_the_capacity_nothing_changes(family, open_decoder):
    decoder, same = (open_decoder(family, max_tokens=300) for _ in range(2))
    for one in (decoder, same):
        fill(one, 0, some_tokens(290))
    memory = [table[i].copy() for table in (decoder.arena.keys, decoder.arena.values) for i in table]
    with pytest.raises(CapacityError, match="slot 0 holds 290 tokens and cannot take 11 more"):
        decoder.prefill(0, some_tokens(11))
    after = [table[i] for table in (decoder.arena.keys, decoder.arena.values) for i in table]
    assert all(np.array_equal(a, b) for a, b in zip(memory, after, strict=True))
    last = some_tokens(10, 2)
    assert np.array_equal(fill(decoder, 0, last), fill(same, 0, last))
    assert decoder.arena.room(0) == 0
    with pytest.raises(CapacityError):
        decoder.decode(0, [5])
    assert decoder.arena.length(0) == 300


def test_one_full_slot_stops_the_step_of_none_of_the_others(open_decoder):
    """CapacityError names the slot and no slot has advanced."""
    decoder = open_decoder(slots=2, max_tokens=256)
    fill(decoder, 0, some_tokens(5))
    fill(decoder, 1, some_tokens(256))
    with pytest.raises(CapacityError, match="slot 1"):
        decoder.decode(0, [4, 4], [True, True])
    assert [decoder.arena.length(slot) for slot in (0, 1)] == [5, 256]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_slot_can_be_filled_to_the_last_row(family, open_decoder):
    decoder = open_decoder(family, slots=2, max_tokens=257)
    for slot in (0, 1):
        fill(decoder, slot, some_tokens(250))
    while decoder.arena.room(0):
        assert np.isfinite(decoder.decode(0, [4, 5], [True, True])).all()
    decoder.arena.check_integrity()


@pytest.mark.parametrize("max_tokens", [128, 256, 600])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_warm_up_leaves_empty_slots_and_the_same_results(family, max_tokens, open_decoder):
    warm, cold = (open_decoder(family, slots=2, max_tokens=max_tokens) for _ in range(2))
    warm.warm_up()
    assert [warm.arena.length(slot) for slot in (0, 1)] == [0, 0]
    warm.arena.check_integrity()
    tokens = some_tokens(min(300, max_tokens))
    assert np.array_equal(fill(warm, 1, tokens), fill(cold, 1, tokens))


@pytest.mark.parametrize("length", [64, 128, 191, 192, 256, 300, 383, 384, 450])
def test_a_slot_filled_from_another_goes_on_the_same_way(length, open_decoder):
    """Rows of `first_row` on are all that a slot needs: what a store puts away and restores."""
    decoder = open_decoder("gemma3", slots=2)
    arena = decoder.arena
    fill(decoder, 0, some_tokens(length))
    arena.claim(1, length)
    for group in arena.layout.groups:
        rows = arena.rows(group, 0)
        for i in group.layers:
            for table in (arena.keys[i], arena.values[i]):
                table[1, :, :rows] = table[0, :, :rows]
                table[1, :, rows:] = 1e9  # never looked at
    after = some_tokens(140, 5)
    assert np.array_equal(fill(decoder, 0, after), fill(decoder, 1, after))


@given(window=st.integers(1, 5000), length=st.integers(0, 100_000))
def test_first_row_keeps_what_a_query_sees_and_little_more(window, length):
    first = first_row(window, length)
    assert first % BLOCK == 0
    assert first <= max(0, length - window + 1) < first + BLOCK
    assert first <= first_row(window, length + 1)
    assert first_row(0, length) == 0


@given(window=st.integers(0, 700), max_tokens=st.integers(1, 1200), chunks=st.lists(st.integers(0, 2 * BLOCK)))
def test_a_chunk_up_to_the_next_block_always_fits(window, max_tokens, chunks):
    arena = Arena(Layout(GEOMETRY, (group_of(window),), 1, max_tokens), lock=False)
    for pending in chunks:
        n = next_chunk(arena.length(0), min(pending, arena.room(0)))
        arena.reserve(0, n)
        arena.advance(0, n)
        assert arena.rows(arena.layout.groups[0], 0) == arena.length(0) - first_row(window, arena.length(0))
        arena.check_integrity()


GEOMETRY = Geometry(
    layers=1, hidden_size=32, intermediate_size=32, heads=1, kv_heads=1, head_size=16, vocab_size=8, context=4096
)


def group_of(window: int) -> LayerGroup:
    return LayerGroup(name="only", layers=(0,), window=window, rope_base=1e4)


def test_layout_is_what_the_arena_takes(tiny_models):
    manifest = ModelFolder(tiny_models("gemma3")).manifest
    layout = Layout(manifest.geometry, manifest.groups, 3, 600)
    full, sliding = layout.groups
    assert layout.shape(full) == (3, 2, 601, 32)
    assert layout.shape(sliding) == (3, 2, 256, 32)
    assert layout.bytes == 64 + (2 * (3 * 2 * 601 * 32 * 4) + 10 * (3 * 2 * 256 * 32 * 4)) + 12 * 64
    arena = Arena(layout, lock=False)
    arrays = [table[i] for i in range(6) for table in (arena.keys, arena.values)]
    starts = [array.ctypes.data for array in arrays]
    assert all(start % 64 == 0 for start in starts)
    assert all(a.nbytes + 64 == b - start for a, (start, b) in zip(arrays, pairwise(starts), strict=False))
    assert starts[-1] + arrays[-1].nbytes + 64 - (starts[0] - 64) == layout.bytes
    assert all(not array.any() for array in arrays)


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("beside", [-1, 0])
def test_a_write_beside_an_array_is_noticed(layer, which, beside, tiny_model):
    manifest = ModelFolder(tiny_model).manifest
    arena = Arena(Layout(manifest.geometry, manifest.groups, 1, 31), lock=False)  # sizes are multiples of 64
    arena.check_integrity()
    array = getattr(arena, which)[layer]
    ctypes.memset(array.ctypes.data + (array.nbytes if beside == 0 else -1), 0, 1)
    with pytest.raises(SkerryError, match="overwritten before array"):
        arena.check_integrity()


def test_the_runner_refuses_rows_beyond_the_capacity(tiny_models):
    """ONNX Runtime would write over whatever comes behind."""
    model = ModelFolder(tiny_models("gemma3"))
    sessions = Sessions(model, Host(), f32=False, threads=1, spin=False, cache_dir=None)
    arena = Arena(Layout(model.manifest.geometry, model.manifest.groups, 1, 600), lock=False)
    runner = Runner(
        sessions.body, sessions.head, model.manifest, model.embedding(), arena.keys, arena.values, positions=601
    )
    tokens = np.asarray([some_tokens(10)])
    good = {"full": [591], "sliding": [246]}
    runner.run(tokens, 0, good, {"full": [591], "sliding": [591]})
    for rows, at in ((good | {"sliding": [247]}, 591), (good | {"full": [592]}, 591), (good, 592)):
        before = [table[i].copy() for table in (arena.keys, arena.values) for i in table]
        with pytest.raises(ModelError, match="capacity"):
            runner.run(tokens, 0, rows, {"full": [at], "sliding": [at]})
        after = [table[i] for table in (arena.keys, arena.values) for i in table]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    arena.check_integrity()


def test_an_arena_that_cannot_be_had(tiny_model):
    manifest = ModelFolder(tiny_model).manifest
    with pytest.raises(CapacityError, match="cannot be allocated"):
        Arena(Layout(manifest.geometry, manifest.groups, 64, 10**12))
