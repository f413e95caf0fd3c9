"""Conversion: the same bytes from whatever file, and from a broken one an error and nothing else."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skerry.core import Message, Role
from skerry.errors import ModelError
from skerry.modelfile import ModelFolder
from skerry.text import Text
from tests import gguf_writer
from tools.convert.folder import convert
from tools.tiny import LLAMA3_SCALING, write_tiny

ROOT = Path(__file__).parents[2]
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": False}),
    ("llama", {"rope_scaling": LLAMA3_SCALING}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("gemma3", {}),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model of its own for each test, to break."""
    return write_tiny(tmp_path / "source", "llama", num_hidden_layers=2)


@pytest.fixture
def gguf_file(source: Path, tmp_path: Path) -> Path:
    return gguf_writer.write_gguf(tmp_path / "tiny.gguf", gguf_writer.fields(source), gguf_writer.tensors(source))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def assert_refused(source: Path, tmp_path: Path, match: str | None = None) -> None:
    """A one-line error, nothing left behind, and a model folder that was there is untouched."""
    models = tmp_path / "models"
    present = models / "present"
    if not present.exists():
        convert(write_tiny(tmp_path / "good", "qwen2", num_hidden_layers=1), present)
    before = contents(models)
    for target in (models / "absent", present):
        with pytest.raises((ModelError, OSError), match=match) as caught:
            convert(source, target)
        assert "\n" not in str(caught.value)
        assert [path.name for path in models.iterdir()] == ["present"]
        assert contents(models) == before


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_gguf_and_safetensors_become_the_same_model(family, overrides, tiny_sources, tmp_path):
    """llama's GGUF keeps rotary pairs together, Gemma's adds 1 to its norms, llama 3's has the factors as a tensor."""
    source = tiny_sources(family, **overrides)
    path = gguf_writer.write_gguf(tmp_path / "tiny.gguf", gguf_writer.fields(source), gguf_writer.tensors(source))
    ours, theirs = convert(source, tmp_path / "ours"), convert(path, tmp_path / "theirs")
    assert ours.geometry == theirs.geometry
    assert ours.tokens == theirs.tokens
    assert ours.embedding_scale == theirs.embedding_scale
    for a, b in zip(ours.groups, theirs.groups, strict=True):
        assert (a.name, a.layers, a.window) == (b.name, b.layers, b.window)
        assert a.rope_base == pytest.approx(b.rope_base)
        assert a.rope_factors == pytest.approx(b.rope_factors, rel=1e-6)
    assert ours.files.keys() == theirs.files.keys()
    for name in ours.files.keys() - {"tokenizer.json"}:
        same = (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
        assert same or (name.endswith(".onnx") and family != "llama"), name  # epsilon is an f32 in a GGUF
    text = "<|im_start|>The user and 3 others…\n"
    texts = [Text(tmp_path / name, ours.tokens.end, ours.tokens.bos) for name in ("ours", "theirs")]
    assert texts[0].encode(text, special=True) == texts[1].encode(text, special=True)
    chat = [Message(Role.USER, "Hello")]
    assert texts[0].encode_chat(chat) == texts[1].encode_chat(chat)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_bytes_every_time(family, tiny_sources, tmp_path):
    source = tiny_sources(family)
    convert(source, tmp_path / "a" / "model")
    convert(source, tmp_path / "b" / "model")
    convert(source, tmp_path / "b" / "model")  # over one that is there
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["model"]
    ModelFolder(tmp_path / "a" / "model").verify()


def test_tiny_models_are_the_same_bytes_every_time_and_of_another_seed_others(tmp_path):
    a, b, c = (write_tiny(tmp_path / str(i), "qwen3", seed) for i, seed in enumerate((0, 0, 1)))
    assert contents(a) == contents(b) != contents(c)


def test_weights_are_held_without_loss(tiny_sources, tiny_models):
    """So that a difference to the source's logits is a fault and not rounding."""
    table = load_file(tiny_sources("llama") / "model.safetensors")["model.embed_tokens.weight"]
    rows = np.empty(table.shape, np.float32)
    ModelFolder(tiny_models("llama")).embedding().rows(np.arange(len(table)), rows)
    assert np.array_equal(rows, table.astype(np.float32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_of_safetensors(dtype, source, tmp_path):
    weights = {name: w.astype(dtype) for name, w in load_file(source / "model.safetensors").items()}
    save_file(weights, source / "model.safetensors")
    assert convert(source, tmp_path / "model").geometry.layers == 2


def test_a_model_in_several_files(source, tmp_path):
    whole = convert(source, tmp_path / "whole")
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    for part, names in enumerate((list(weights)[:9], list(weights)[9:])):
        save_file({name: weights[name] for name in names}, source / f"model-0000{part + 1}-of-00002.safetensors")
    assert convert(source, tmp_path / "parts").digest() == whole.digest()


def test_truncated_gguf(gguf_file, tmp_path):
    raw = gguf_file.read_bytes()
    cuts = sorted({0, 1, 4, 8, 24, *range(32, len(raw), len(raw) // 60), len(raw) - 1})
    for cut in cuts:
        gguf_file.write_bytes(raw[:cut])
        assert_refused(gguf_file, tmp_path)


@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_damaged_gguf_header(bit, gguf_file, tmp_path):
    """Refused, or harmless (a letter of a name); counts that became huge end it soon."""
    raw = gguf_file.read_bytes()
    for at in [*range(0, 64), *range(64, 6000, 97)]:
        damaged = bytearray(raw)
        damaged[at] ^= bit
        gguf_file.write_bytes(damaged)
        try:
            convert(gguf_file, tmp_path / "models" / "m")
        except (ModelError, OSError) as error:
            assert "\n" not in str(error)
        assert {path.name for path in (tmp_path / "models").glob("*")} <= {"m"}


def test_truncated_and_damaged_safetensors(source, tmp_path):
    file = source / "model.safetensors"
    raw = file.read_bytes()
    for cut in (0, 1, 7, 8, 100, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:cut])
        assert_refused(source, tmp_path)
    for at in (0, 3, 7, 9, 40):
        damaged = bytearray(raw)
        damaged[at] ^= 0xFF
        file.write_bytes(damaged)
        assert_refused(source, tmp_path)


def edit(path: Path, **values: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    document = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"hidden_size": "wide"}, "cannot be read"),
        ({"hidden_size": 96}, r"has shape .* expected"),
        ({"intermediate_size": 100}, "not a multiple of 32"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "9 tensors are not understood, such as model.layers.1."),
        ({"num_hidden_layers": 0}, "0 layers are out of range"),
        ({"num_hidden_layers": 10**9}, "out of range"),
        ({"head_dim": 10**20}, "out of range"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "config.json has no 'factor'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types are not understood"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ({"max_position_embeddings": -1}, "would not open: .*context"),
        ({"bos_token_id": 400}, r"special tokens \[400\] are not in the vocabulary"),
        ({"eos_token_id": -1}, r"special tokens \[-1\] are not in the vocabulary"),
    ],
)
def test_config_that_cannot_be_used(values, match, source, tmp_path):
    edit(source / "config.json", **values)
    assert_refused(source, tmp_path, match)


def drop(weights: dict) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def add(weights: dict) -> None:
    weights["model.layers.1.mlp.experts.weight"] = np.zeros((4, 4), np.float16)


def reshape(weights: dict) -> None:
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].T.copy()


def spoil(weights: dict) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


def overflow(weights: dict) -> None:
    weights["model.norm.weight"][7] = np.inf


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (drop, "tensor model.layers.1.mlp.up_proj.weight is missing"),
        (add, "1 tensors are not understood, such as model.layers.1.mlp.experts.weight"),
        (reshape, r"up_proj.weight has shape \[64, 128\], expected \[128, 64\]"),
        (spoil, "up_proj.weight holds numbers that are not finite"),
        (overflow, "model.norm.weight holds numbers that are not finite"),
    ],
)
def test_tensors_that_cannot_be_used(damage: Callable, match, source, tmp_path):
    weights = load_file(source / "model.safetensors")
    damage(weights)
    save_file(weights, source / "model.safetensors")
    assert_refused(source, tmp_path, match)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.json", None, "config.json: No such file"),
        ("config.json", b"{", "config.json: not JSON"),
        ("config.json", b"[]", "config.json: not a JSON object"),
        ("config.json", b"\xff\xfe", "config.json: not JSON"),
        ("generation_config.json", b"{", "generation_config.json: not JSON"),
        ("model.safetensors", None, "no [*].safetensors here"),
        ("model.safetensors", b"", "not whole safetensors"),
        ("tokenizer.json", None, "tokenizer.json: No such file"),
        ("tokenizer.json", b"{}", "would not open: tokenizer.json"),
        ("chat_template.jinja", b"{% if %}", "would not open: chat_template.jinja"),
    ],
)
def test_files_that_cannot_be_used(name, content, match, source, tmp_path):
    if content is None:
        (source / name).unlink()
    else:
        (source / name).write_bytes(content)
    assert_refused(source, tmp_path, match)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("general.architecture", "bert", "architecture 'bert' is not supported"),
        ("llama.block_count", 3, "blk.2.attn_q.weight is missing"),
        ("llama.block_count", "many", "cannot be read"),
        ("llama.expert_count", 8, "mixtures of experts"),
        ("llama.rope.dimension_count", 16, "rotary embedding of a part of the head"),
        ("llama.rope.scaling.type", "yarn", "rotary scaling 'yarn' is not supported"),
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model: 'bert' is not supported"),
        ("tokenizer.ggml.pre", "unheard-of", "tokenizer.ggml.pre: 'unheard-of' is not supported"),
        ("tokenizer.ggml.merges", ["a b", "q zzz"], "cannot be read: Error while initializing BPE"),
    ],
)
def test_gguf_fields_that_cannot_be_used(field, value, match, source, tmp_path):
    metadata = gguf_writer.fields(source) | {field: value}
    path = gguf_writer.write_gguf(tmp_path / "bad.gguf", metadata, gguf_writer.tensors(source))
    assert_refused(path, tmp_path, match)


@pytest.mark.parametrize("field", ["llama.embedding_length", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_gguf_fields_that_are_missing(field, source, tmp_path):
    metadata = gguf_writer.fields(source)
    del metadata[field]
    path = gguf_writer.write_gguf(tmp_path / "bad.gguf", metadata, gguf_writer.tensors(source))
    assert_refused(path, tmp_path, field.replace(".", "[.]") + " is missing")


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.gguf").touch()
    for name, match in (("absent", "neither a file nor a folder"), ("empty", "config.json"), ("empty.gguf", "GGUF")):
        assert_refused(tmp_path / name, tmp_path, match)


def test_a_target_that_is_something_else_is_left_alone(source, tmp_path):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "letter.txt").write_text("keep")
    with pytest.raises(ModelError, match="exists and is not a model folder"):
        convert(source, target)
    assert contents(target) == {"letter.txt": b"keep"}
    assert not list(tmp_path.glob(".precious*"))


def run_cli(*arguments: Path, **options: Any) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.convert", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options)


def test_command_line(source, tmp_path):
    done = run_cli(source, tmp_path / "model", "--name", "Tiny", "--licence", "Apache-2.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Tiny, 2 layers" in done.stdout
    assert ModelFolder(tmp_path / "model").manifest.source.licence == "Apache-2.0"


def test_command_line_says_in_one_line_what_is_wrong(source, tmp_path):
    weights = load_file(source / "model.safetensors")
    drop(weights)
    save_file(weights, source / "model.safetensors")
    failed = run_cli(source, tmp_path / "model")
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "convert: tensor model.layers.1.mlp.up_proj.weight is missing" in failed.stderr
    assert not (tmp_path / "model").exists()


def only_small_files() -> None:
    """As on a full disk, writes come to an end: with EFBIG instead of ENOSPC."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))


def test_a_disk_that_is_full(source, tmp_path):
    failed = run_cli(source, tmp_path / "models" / "model", preexec_fn=only_small_files)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert "File too large" in failed.stderr
    assert not list((tmp_path / "models").iterdir())


def test_a_place_that_cannot_be_written(source, tmp_path):
    (tmp_path / "file").touch()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    targets = [tmp_path / "file" / "model", Path("/proc/model")]
    if os.geteuid() != 0:  # to root all is writable
        targets.append(locked / "model")
    for target in targets:
        failed = run_cli(source, target)
        assert failed.returncode == 1
        assert failed.stderr.startswith("convert: ")
        assert failed.stderr.count("\n") == 1


def test_a_link_stays_a_link_and_what_a_killed_conversion_left_is_removed(tiny_sources, tmp_path):
    source = tiny_sources("llama")
    convert(source, tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / ".real.abcdef").mkdir()
    convert(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_target_that_is_something_else_is_refused_before_the_work(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ModelError, match="not a model folder"):
        convert(tmp_path / "no such source", tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
