"""`make install`: the tree that the image, the emulated board and a developer's machine share."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNIT = "usr/lib/systemd/system/skerry.service"


def install(target: Path, board: str = "") -> subprocess.CompletedProcess[str]:
    command = ["make", "install", f"DESTDIR={target}", f"BOARD={board}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    done = install(target, "emulated")
    assert done.returncode == 0, done.stderr
    return target


def test_every_file_is_where_it_belongs(tree: Path) -> None:
    found = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    agent = {f"usr/lib/skerry/agent/{p.relative_to(ROOT / 'agent')}" for p in (ROOT / "agent/skerry").rglob("*.py")}
    boards = {f"usr/lib/skerry/boards/{p.name}" for p in (ROOT / "conf/boards").glob("*.yaml")}
    assert found == agent | boards | {
        "etc/skerry/skerry.yaml",
        "usr/bin/skerry",
        "usr/share/skerry/skerry.schema.json",
        UNIT,
        "usr/lib/sysusers.d/skerry.conf",
        "usr/lib/tmpfiles.d/skerry.conf",
        "usr/lib/udev/rules.d/70-skerry.rules",
    }
    for name in found:
        mode = (tree / name).stat().st_mode & 0o777
        assert mode == (0o755 if name == "usr/bin/skerry" else 0o644), name


def test_the_installed_command_runs_from_the_installed_tree(tree: Path, tiny_model: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "skerry"
    launcher.write_text((tree / "usr/bin/skerry").read_text().replace("/usr/lib/skerry", f"{tree}/usr/lib/skerry"))
    (tmp_path / "skerry.yaml").write_text(f"model: {{path: {tiny_model}}}\n")
    code = (
        f"import runpy, sys; sys.argv = ['skerry', '--config', {str(tmp_path / 'skerry.yaml')!r}, 'check-config']\n"
        f"try: runpy.run_path({str(launcher)!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, sys.modules['skerry'].__file__)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    ours = tree / "usr/lib/skerry/agent/skerry/__init__.py"
    assert done.stdout.splitlines() == ["the configuration is good", f"0 {ours}"], done.stderr


def test_the_board_is_named_and_what_an_integrator_wrote_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "etc/skerry/skerry.yaml"
    assert install(tmp_path, "emulated").returncode == 0
    assert re.search(r"^board: emulated$", file.read_text(), re.MULTILINE)
    file.write_text("arena: {slots: 2}\n")
    assert install(tmp_path).returncode == 0
    assert file.read_text() == "arena: {slots: 2}\n"


def test_an_unknown_board_installs_nothing(tmp_path: Path) -> None:
    done = install(tmp_path, "toaster")
    assert done.returncode != 0 and "known: emulated" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_unit_is_sandboxed(tree: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.fail("systemd-analyze is absent: run `apt-get install systemd`")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(tree / UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    exposure = re.search(r"Overall exposure level.*: ([0-9.]+)", done.stdout)
    assert exposure and float(exposure[1]) < 2.0, done.stdout + done.stderr


def test_the_unit_is_one_that_systemd_reads(tree: Path) -> None:
    text = (tree / UNIT).read_text()
    for line in ("Type=notify", "User=skerry", "WatchdogSec=", "MemoryHigh=", "MemoryMax=", "LimitMEMLOCK=infinity"):
        assert line in text
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tree / UNIT)], capture_output=True, text=True, check=False
    )
    complaints = [
        line for line in done.stderr.splitlines() if "skerry.service" in line and "not executable" not in line
    ]
    assert not [line for line in complaints if "Unknown" in line or "Failed to parse" in line], done.stderr
