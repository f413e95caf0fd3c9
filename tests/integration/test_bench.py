"""The bench, quickly: what it writes, never how fast anything was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.report import Row, compare, table

ROOT = Path(__file__).parents[2]
FIELDS = {"name", "value", "unit", "peer", "peer_value", "ratio", "command"}
OF_PEERS = ("decode, 1 thread, n=64", "prefill, 1 thread, 128 tokens", "first token", "peak memory", "anonymous memory")
OF_OURS = ("memory bandwidth", "Python's own time", "memory growth")


def run(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.bench", "--quick", "--out", str(out), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.model
def test_quick_run_writes_report_picture_and_machine(tmp_path: Path, default_model: Path, gguf_path: Path) -> None:
    done = run(tmp_path, "--model", str(default_model), "--gguf", str(gguf_path))
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "report.json").read_text()
    rows = json.loads(report)
    assert all(set(row) == FIELDS for row in rows)
    assert len({(row["name"], row["peer"]) for row in rows}) == len(rows)
    for start in OF_PEERS:
        found = [row for row in rows if row["name"].startswith(start)]
        assert {row["peer"] for row in found} == {"llama.cpp Q4_1 (same file)", "llama.cpp Q4_0 (its fastest)"}
        assert all(row["value"] > 0 and row["peer_value"] > 0 and row["ratio"] > 0 for row in found)
    for start in OF_OURS:
        assert [row["peer"] for row in rows if row["name"].startswith(start)] == [None]
    assert str(ROOT) not in report and str(tmp_path) not in report
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "llama.cpp" in json.loads((tmp_path / "machine.json").read_text())
    assert "decode, 1 thread, n=64" in done.stdout


@pytest.mark.model
def test_without_the_peers_file_its_figures_are_null(tmp_path: Path, default_model: Path) -> None:
    gguf = tmp_path / "absent.gguf"
    done = run(tmp_path, "--model", str(default_model), "--gguf", str(gguf), "--only", "start")
    assert done.returncode == 0, done.stderr
    assert f"no figures of llama.cpp: {gguf} is absent" in done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())
    assert rows and all(row["value"] > 0 and row["peer_value"] is None and row["ratio"] is None for row in rows)


def test_compare_takes_the_median_of_the_rounds_ratios() -> None:
    values = {"skerry": [1.0, 2.0, 4.0], "llama.cpp": [2.0, 3.0, 20.0], "absent": []}
    here, absent = compare("decode", "ms/token", values)
    assert here == Row("decode", 2.0, "ms/token", "llama.cpp", 3.0, 2.0)
    assert (absent.value, absent.peer_value, absent.ratio) == (2.0, None, None)
    assert compare("prefill", "tokens/s", values, lower_is_better=False)[0].ratio == 0.5


def test_table_aligns_and_prints_a_name_once() -> None:
    rows = [Row("decode", 12.34, "ms/token", "a peer", 1234.0, 1.5), Row("decode", 12.34, "ms/token", "b", None, None)]
    head, first, second = table(rows).splitlines()
    assert len(head) == len(first) == len(second)
    assert first.split() == ["decode", "12.3", "ms/token", "a", "peer", "1,234", "1.50"]
    assert second.split() == ["b", "-", "-"]
