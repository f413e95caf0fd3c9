"""A model folder: its manifest, what the graphs expect of the arena, and the embedding table.

The folder is what `tools/convert` writes. `model.yaml` describes it; the converter and the agent share the structs
below, so the two cannot disagree. Knows nothing of how the graphs are run.

    model.yaml             this manifest
    body.onnx, body.bin    embeddings -> hidden rows, over the KV arena; its weights
    body-f32.onnx          the same weights, with f32 instead of int8 activations in the matrix products
    head.onnx, head-f32.onnx, head.bin    hidden rows -> logits (no head.bin where the embedding is tied)
    embedding.bin          [vocab_size, hidden_size] uint8, then [vocab_size, hidden_size / 32] f32 scales
    tokenizer.json         in the form of the `tokenizers` library
    chat_template.jinja    absent for a base model
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import yaml
from msgspec import Meta, Struct

from skerry.errors import ModelError

FORMAT = 1
"""Raised when an older agent could misread a folder."""

QUANT_BLOCK = 32
"""Weights per scale, along the input dimension of a matrix."""

MANIFEST = "model.yaml"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
EMBEDDING = "embedding.bin"

Count = Annotated[int, Meta(ge=1)]


class Geometry(Struct, frozen=True, kw_only=True):
    """The sizes of a decoder with grouped-query attention (Ainslie et al. 2023)."""

    layers: Count
    hidden_size: Count
    intermediate_size: Count
    heads: Count
    kv_heads: Count
    head_size: Count
    vocab_size: Count
    context: Count

    def kv_bytes_per_token(self, layers: int | None = None, itemsize: int = 4) -> int:
        """Bytes of K and V that one token occupies in `layers` layers (default: all)."""
        return 2 * (self.layers if layers is None else layers) * self.kv_heads * self.head_size * itemsize


class LayerGroup(Struct, frozen=True, kw_only=True):
    """Layers that see the same rows: all with full attention, or all with one window, and one rotary embedding."""

    name: str
    layers: tuple[int, ...]
    window: int = 0
    """Rows that a query sees, itself included; 0 is all of them."""
    rope_base: float
    rope_factors: tuple[float, ...] = ()
    """Divides each of the head_size / 2 frequencies (Llama 3's context extension); empty is none."""

    def rope(self, rows: int, head_size: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin, each [rows, head_size / 2] f32 (Su et al. 2021, halves rotated as in Llama's reference)."""
        inverse = self.rope_base ** (-np.arange(0, head_size, 2) / head_size)
        if self.rope_factors:
            inverse /= np.asarray(self.rope_factors)
        angles = np.outer(np.arange(rows), inverse)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class Tokens(Struct, frozen=True, kw_only=True):
    """Special token ids."""

    bos: int | None = None
    add_bos: bool = False
    end: tuple[int, ...]
    """Any of these ends an answer."""


class Source(Struct, frozen=True, kw_only=True):
    """Where the weights came from."""

    file: str
    sha256: str
    licence: str
    url: str = ""


class StoredFile(Struct, frozen=True, kw_only=True):
    bytes: int
    sha256: str


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """model.yaml."""

    format: int
    name: str
    family: str
    geometry: Geometry
    groups: tuple[LayerGroup, ...]
    tokens: Tokens
    embedding_scale: float = 1.0
    source: Source
    files: dict[str, StoredFile]

    def digest(self) -> str:
        """sha256 over the sizes, layouts and file hashes: equal digests compute the same logits."""
        parts = (self.format, self.geometry, self.groups, self.embedding_scale, sorted(self.files.items()))
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class ModelFolder:
    """An opened model folder. Files are checked for presence and size here, and mapped when they are used."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a folder that is missing, torn, or written for another version."""
        self.path = path
        self.manifest = _read_manifest(path)
        for name, stored in self.manifest.files.items():
            if not (path / name).is_file():
                raise ModelError(f"{path / name}: is missing", "convert or copy the model again")
            if (size := (path / name).stat().st_size) != stored.bytes:
                raise ModelError(
                    f"{path / name}: has {size} bytes instead of {stored.bytes}", "convert or copy the model again"
                )

    def verify(self) -> None:
        """Read every file and compare its hash. Raises ModelError."""
        for name, stored in self.manifest.files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
                    raise ModelError(f"{self.path / name}: does not match its sha256", "convert or copy it again")

    @property
    def weight_bytes(self) -> int:
        return sum(stored.bytes for name, stored in self.manifest.files.items() if name.endswith(".bin"))

    def embedding(self) -> "Embedding":
        return Embedding(self.path / EMBEDDING, self.manifest)


class Embedding:
    """Row look-up in the mapped table: only the pages of used tokens are ever read."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        geometry = manifest.geometry
        blocks = geometry.hidden_size // QUANT_BLOCK
        quants = geometry.vocab_size * geometry.hidden_size
        table = np.memmap(path, np.uint8, mode="r")
        self._quants = table[:quants].reshape(geometry.vocab_size, blocks, QUANT_BLOCK)
        self._scales = table[quants:].view(np.float32).reshape(geometry.vocab_size, blocks, 1)
        self._scale = np.float32(manifest.embedding_scale)

    def rows(self, tokens: npt.NDArray[np.int64], out: npt.NDArray[np.float32]) -> None:
        """Write the embeddings of `tokens` [n] into `out` [n, hidden_size] f32."""
        wide = out.reshape(len(out), -1, QUANT_BLOCK)
        np.subtract(self._quants[tokens], np.float32(128), out=wide, dtype=np.float32)
        wide *= self._scales[tokens]
        if self._scale != 1:
            wide *= self._scale


def find_model(name: str, search: tuple[Path, ...]) -> Path:
    """The folder of a model given by path, or by name below one of `search`. Raises ModelError."""
    places = (Path(name),) if "/" in name else tuple(root / name for root in search)
    for place in places:
        with suppress(OSError):  # a name that no file system takes
            if (place / MANIFEST).is_file():
                return place
    raise ModelError(
        f"no model {name!r}: looked for {MANIFEST} in {', '.join(str(place) for place in places)}",
        "run `make setup`, or set model.path to a folder that tools/convert wrote",
    )


def _read_manifest(path: Path) -> Manifest:
    file = path / MANIFEST
    again = "convert the model again"
    try:
        document = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}", "model.path must be a folder that tools/convert wrote") from None
    except yaml.YAMLError as error:
        raise ModelError(f"{file}: not YAML: {error}", again) from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise ModelError(f"{file}: format {found!r}, this version reads {FORMAT}", again)
    try:
        return msgspec.convert(document, Manifest)
    except msgspec.ValidationError as error:
        raise ModelError(f"{file}: {error}", again) from None
