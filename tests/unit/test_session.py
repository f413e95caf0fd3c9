"""Prepacked weights: made once, mapped afterwards, never trusted when torn, never needed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from skerry.arena import Arena, Layout
from skerry.decoder import Decoder
from skerry.errors import ModelError
from skerry.host import Host
from skerry.modelfile import ModelFolder
from skerry.session import Sessions


def open_sessions(model: ModelFolder, cache: Path | None, f32: bool = False, host: Host | None = None) -> Sessions:
    return Sessions(model, host or Host(), f32=f32, threads=1, spin=False, cache_dir=cache)


def logits(model: ModelFolder, sessions: Sessions) -> np.ndarray:
    layout = Layout(model.manifest.geometry, model.manifest.groups, slots=1, max_tokens=256)
    return Decoder(model, sessions, Arena(layout, lock=False)).prefill(0, list(range(3, 40))).copy()


@pytest.fixture
def model(tiny_model: Path) -> ModelFolder:
    return ModelFolder(tiny_model)


def only_cache(cache: Path) -> Path:
    (folder,) = list(cache.glob("packed/*/*"))
    return folder


def test_packed_weights_are_made_once_and_change_no_logit(model: ModelFolder, tmp_path: Path) -> None:
    plain = open_sessions(model, None)
    assert not plain.packed
    first = open_sessions(model, tmp_path)
    made = {path.name: path.stat().st_mtime_ns for path in only_cache(tmp_path).iterdir()}
    second = open_sessions(model, tmp_path)
    assert first.packed and second.packed
    assert made == {path.name: path.stat().st_mtime_ns for path in only_cache(tmp_path).iterdir()}
    for sessions in (first, second):
        np.testing.assert_array_equal(logits(model, sessions), logits(model, plain))


def test_packed_weights_are_mapped(model: ModelFolder, tmp_path: Path) -> None:
    open_sessions(model, tmp_path)
    sessions = open_sessions(model, tmp_path)
    maps = Path("/proc/self/maps").read_text()
    assert sessions.packed and str(only_cache(tmp_path) / "body.bin") in maps


@pytest.mark.parametrize("name", ["body.onnx", "body.bin", "head.onnx", "head.bin", "packed.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "empty"])
def test_a_torn_cache_is_detected_and_made_again(model: ModelFolder, tmp_path: Path, name: str, harm: str) -> None:
    open_sessions(model, tmp_path)
    file = only_cache(tmp_path) / name
    data = file.read_bytes()
    match harm:
        case "truncate":
            file.write_bytes(data[: len(data) // 2])
        case "flip":
            file.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
        case "remove":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
    sessions = open_sessions(model, tmp_path)
    assert sessions.packed
    known = json.loads((only_cache(tmp_path) / "packed.json").read_text())
    assert known.keys() == {"body.onnx", "body.bin", "head.onnx", "head.bin"}
    np.testing.assert_array_equal(logits(model, sessions), logits(model, open_sessions(model, None)))


@pytest.mark.parametrize("manifest", ["[]", "{}", "null", '{"body.onnx": 3}', "\0", '{"../../x": [1, 2]}'])
def test_a_strange_manifest_is_not_trusted(model: ModelFolder, tmp_path: Path, manifest: str) -> None:
    open_sessions(model, tmp_path)
    (only_cache(tmp_path) / "packed.json").write_text(manifest)
    assert open_sessions(model, tmp_path).packed


def test_a_cache_that_cannot_be_written_costs_memory_only(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for impossible in (tmp_path / "file", Path("/proc/nowhere")):
        sessions = open_sessions(model, impossible)
        assert not sessions.packed
        assert np.isfinite(logits(model, sessions)).all()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_full_or_read_only_disk_costs_memory_only(model: ModelFolder, tmp_path: Path, options: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        sessions = open_sessions(model, disk)
        assert not sessions.packed
        assert np.isfinite(logits(model, sessions)).all()
        assert not [path for path in disk.rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_weights_packed_for_another_cpu_or_model_are_not_used(model: ModelFolder, tiny_models, tmp_path: Path) -> None:
    open_sessions(model, tmp_path / "cache")
    ours = only_cache(tmp_path / "cache")
    (tmp_path / "root/proc").mkdir(parents=True)
    (tmp_path / "root/proc/cpuinfo").write_text("processor: 0\nvendor_id: Other\nflags: lm\n")
    open_sessions(model, tmp_path / "cache", host=Host(tmp_path / "root"))
    theirs = only_cache(tmp_path / "cache")  # ours was stale and is gone
    assert theirs.name != ours.name
    copy = tmp_path / model.path.name
    shutil.copytree(tiny_models("llama", num_hidden_layers=3), copy)
    open_sessions(ModelFolder(copy), tmp_path / "cache", host=Host(tmp_path / "root"))
    assert only_cache(tmp_path / "cache").name != theirs.name


def test_both_kinds_of_product_keep_their_caches(model: ModelFolder, tmp_path: Path) -> None:
    for f32 in (False, True, False):
        assert open_sessions(model, tmp_path, f32).packed
    assert len(list(tmp_path.glob("packed/*/*"))) == 2


def test_importing_the_runtime_reports_nothing_to_anybody(tmp_path: Path) -> None:
    """ONNX Runtime writes a device id below the cache or home folder when it is imported, unless told not to."""
    code = "import skerry.session, time; time.sleep(1)"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def test_weights_that_changed_are_noticed_when_they_are_packed(model: ModelFolder, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(model.path, changed)
    data = bytearray((changed / "body.bin").read_bytes())
    data[100] ^= 1
    (changed / "body.bin").write_bytes(data)
    with pytest.raises(ModelError, match="sha256"):
        open_sessions(ModelFolder(changed), tmp_path / "cache")


def test_an_unknown_cpu_packs_nothing(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    sessions = open_sessions(model, tmp_path / "cache", host=Host(tmp_path / "root"))
    assert not sessions.packed and not (tmp_path / "cache").exists()


def test_a_broken_graph_is_one_clear_error(model: ModelFolder, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model.path, broken)
    data = bytearray((broken / "body.onnx").read_bytes())
    data[10:200] = bytes(190)
    (broken / "body.onnx").write_bytes(data)
    with pytest.raises(ModelError, match=r"body\.onnx"):
        open_sessions(ModelFolder(broken), tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("packed/*/*"))
