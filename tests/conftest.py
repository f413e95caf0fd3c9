"""What tests of several kinds share: models, tiny ones made on the spot and real ones that `make setup` fetched.

A test whose model is absent fails and says what to run; it is not skipped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.convert.folder import convert
from tools.fetch import gguf
from tools.tiny import Family, write_tiny

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build"

TinyModels = Callable[..., Path]
"""(family, **overrides of config.json) -> folder."""


@pytest.fixture(scope="session")
def tiny_sources(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models in Hugging Face form; the same arguments give the same folder."""
    made: dict[str, Path] = {}

    def source(family: Family = "llama", **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp(f"source-{family}") / "tiny", family, **overrides)
        return made[key]

    return source


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, tiny_sources: TinyModels) -> TinyModels:
    """Tiny models as model folders; the same arguments give the same folder."""
    made: dict[Path, Path] = {}

    def model(family: Family = "llama", **overrides: Any) -> Path:
        source = tiny_sources(family, **overrides)
        if source not in made:
            made[source] = tmp_path_factory.mktemp(f"model-{family}") / "tiny"
            convert(source, made[source], name=f"tiny-{family}")
        return made[source]

    return model


@pytest.fixture(scope="session")
def tiny_model(tiny_models: TinyModels) -> Path:
    """The model folder of the tiny llama."""
    return tiny_models("llama")


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The model folder of SmolLM2-135M-Instruct."""
    return _present(ROOT / "models" / "smollm2-135m-instruct", "make setup")


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    """The file that the default model was converted from, fetched when it is not there."""
    return gguf("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_gguf_path() -> Path:
    """Of the second model, fetched when it is not there."""
    return gguf("gemma-3-270m")


@pytest.fixture(scope="session")
def gemma_model(gemma_gguf_path: Path) -> Path:
    """The model folder of Gemma-3-270M, converted anew."""
    target = BUILD / "models" / "gemma-3-270m"
    convert(gemma_gguf_path, target)
    return target


def _present(path: Path, command: str) -> Path:
    if not path.exists():
        pytest.fail(f"{path.relative_to(ROOT)} is absent: run `{command}`")
    return path
