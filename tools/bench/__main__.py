"""Measure the agent beside llama.cpp on the same weights: report.json, report.png, machine.json, and a table here.

Our rows say `ours`; every ratio is how many times better ours is. A full run takes some five minutes on two cores.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec import structs

from skerry.errors import SkerryError
from skerry.modelfile import ModelFolder
from tools.bench import batch, limits, machine, memory, picture, requantise, speed, start
from tools.bench.report import Panel, Row, table
from tools.bench.setting import ROOT, PeerFile, Setting

MODEL = ROOT / "models" / "smollm2-135m-instruct"
GGUF = ROOT / "build" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
OUT = ROOT / "build" / "bench"

BENCHES = {
    "speed": speed.measure,
    "batch": batch.measure,
    "limits": limits.measure,
    "start": start.measure,
    "memory": memory.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL, help="our model folder (default: the default model)")
    parser.add_argument("--gguf", type=Path, default=GGUF, help="the file it was converted from, for llama.cpp")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to (default: build/bench)")
    parser.add_argument("--only", choices=BENCHES, action="append", help="run this bench only; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    arguments = parser.parse_args()
    try:
        model = ModelFolder(arguments.model)
        arguments.out.mkdir(parents=True, exist_ok=True)
        setting = Setting(model, _peers(model, arguments.gguf, arguments.out), arguments.out, arguments.quick)
        run(setting, arguments.only or list(BENCHES))
    except SkerryError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


def run(setting: Setting, names: list[str]) -> None:
    about = machine.describe()
    for name, text in about.items():
        print(f"{name:15} {text}")
    (setting.out / "machine.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
    rows: list[Row] = []
    panels: list[Panel] = []
    for name in names:
        outcome = BENCHES[name](setting)
        command = f"python -m tools.bench --only {name}{' --quick' if setting.quick else ''}"
        measured = [structs.replace(row, command=command) for row in outcome.rows]
        print(f"\n{name} ({command})\n{table(measured)}", flush=True)
        rows += measured
        (setting.out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
        panels += outcome.panels
    title = f"{setting.model.manifest.name} on {about['CPU']}, {about['cores']} cores{', a smoke run' * setting.quick}"
    picture.draw(setting.out / "report.png", title, panels, rows)
    print(f"\nwrote report.json, report.png and machine.json to {setting.out}")


def _peers(model: ModelFolder, gguf: Path, out: Path) -> tuple[PeerFile, ...]:
    """llama.cpp with the same file, and with the file that it runs fastest; says so where one cannot be had."""
    reason = f"{gguf} is absent: `make bench` fetches it" * (not gguf.is_file())
    reason = reason or "xllamacpp is not installed: pip install -e .[tools]" * (find_spec("xllamacpp") is None)
    if reason:
        print(f"no figures of llama.cpp: {reason}", file=sys.stderr)
        return PeerFile("llama.cpp (same file)", None), PeerFile("llama.cpp Q4_0 (its fastest)", None)
    if requantise.sha256(gguf) != model.manifest.source.sha256:
        print(f"{gguf.name} is not the file that {model.path.name} was converted from", file=sys.stderr)
    kind = requantise.kind_of(gguf)
    same = PeerFile(f"llama.cpp {kind} (same file)", gguf)
    if not kind.startswith(("Q4_1", "Q4_K")):  # already its fastest, or of other bits
        return (same,)
    return same, PeerFile("llama.cpp Q4_0 (its fastest)", requantise.q4_0(gguf, out))


if __name__ == "__main__":
    sys.exit(main())
