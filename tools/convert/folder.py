"""Checkpoint -> model folder: whole or not at all, and the same bytes every time."""

import hashlib
import shutil
import tempfile
from pathlib import Path

import msgspec
import onnx
import yaml
from tqdm import tqdm

from skerry.errors import ModelError
from skerry.modelfile import (
    CHAT_TEMPLATE,
    EMBEDDING,
    FORMAT,
    MANIFEST,
    TOKENIZER,
    Manifest,
    ModelFolder,
    StoredFile,
)
from skerry.text import Text
from tools.convert import gguf_file, graph, safetensors_folder
from tools.convert.blocks import quantise_8_bit
from tools.convert.checkpoint import Checkpoint


def convert(source: Path, target: Path, name: str = "", licence: str = "", url: str = "") -> Manifest:
    """Convert a GGUF file or a Hugging Face folder into a model folder, replacing one that is there.

    Raises ModelError; then `target` is as it was before.
    """
    target = target.resolve()  # a link stays a link, to the new folder
    if target.exists() and not (target / MANIFEST).is_file():
        raise ModelError(f"{target}: exists and is not a model folder", "give another target")
    if source.is_dir():
        checkpoint = safetensors_folder.read(source, licence)
    elif source.is_file():
        checkpoint = gguf_file.read(source, licence)
    else:
        raise ModelError(f"{source}: is neither a file nor a folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.*"):  # of a conversion that was killed
        shutil.rmtree(left, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_graphs(checkpoint, partial, source)
        (partial / TOKENIZER).write_text(checkpoint.tokenizer_json, "utf-8")
        if checkpoint.chat_template is not None:
            (partial / CHAT_TEMPLATE).write_text(checkpoint.chat_template, "utf-8")
        manifest = Manifest(
            format=FORMAT,
            name=name or checkpoint.name,
            family=checkpoint.family,
            geometry=checkpoint.geometry,
            groups=checkpoint.groups,
            tokens=checkpoint.tokens,
            embedding_scale=checkpoint.embedding_scale,
            source=msgspec.structs.replace(checkpoint.source, url=url),
            files={file.name: _stored(file) for file in sorted(partial.iterdir())},
        )
        document = yaml.safe_dump(msgspec.to_builtins(manifest), sort_keys=False, width=120)
        (partial / MANIFEST).write_text(document, "utf-8")
        _check_opens(partial, source)
        partial.chmod(0o755)
        _replace(partial, target)
    except ValueError as error:  # a number that a graph cannot hold, text that is not Unicode
        raise ModelError(f"{source}: cannot be converted: {error}", "the file is torn or of an unknown form") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _check_opens(folder: Path, source: Path) -> None:
    """Open what was written as the agent does, so that no folder takes its place that the agent would refuse."""
    try:
        manifest = ModelFolder(folder).manifest
        tokens = manifest.tokens
        if unknown := {tokens.bos or 0, *tokens.end} - set(range(manifest.geometry.vocab_size)):
            raise ModelError(f"special tokens {sorted(unknown)} are not in the vocabulary")
        Text(folder, tokens.end, tokens.bos, tokens.add_bos)
    except ModelError as error:
        message = error.message.removeprefix(f"{folder}/")
        raise ModelError(f"{source}: the model would not open: {message}", "the file is torn or unsupported") from None


def _write_graphs(checkpoint: Checkpoint, folder: Path, source: Path) -> None:
    layers = tqdm(range(checkpoint.geometry.layers), desc=f"convert {source.name}", unit="layer", disable=None)
    weights = graph.WeightFile(folder / "body.bin")
    body = graph.body(checkpoint, weights, layers)
    weights.close()

    table = checkpoint.embedding()
    rows = table.as_8_bit() if table.offset is None else quantise_8_bit(table.dequantised())
    with (folder / EMBEDDING).open("xb") as file:
        file.write(rows.q.data)
        file.write(rows.scale.data)
    if checkpoint.head is None and rows is table:
        tied = [
            graph.external("logits.q", rows.q.dtype, rows.q.shape, EMBEDDING, 0),
            graph.external("logits.scale", rows.scale.dtype, rows.scale.shape, EMBEDDING, rows.q.nbytes),
        ]
        head = graph.head(checkpoint, table, None, tied)
    else:
        weights = graph.WeightFile(folder / "head.bin")
        head = graph.head(checkpoint, checkpoint.head() if checkpoint.head else table, weights, [])
        weights.close()
    checkpoint.check_all_taken()
    for stem, model in (("body", body), ("head", head)):
        _save(model, folder / f"{stem}.onnx")
        _save(graph.with_products(model, graph.F32_PRODUCTS), folder / f"{stem}-f32.onnx")


def _save(model: onnx.ModelProto, file: Path) -> None:
    file.write_bytes(model.SerializeToString(deterministic=True))


def _stored(file: Path) -> StoredFile:
    with file.open("rb") as stream:
        return StoredFile(bytes=file.stat().st_size, sha256=hashlib.file_digest(stream, "sha256").hexdigest())


def _replace(new: Path, target: Path) -> None:
    """Put the finished folder in place by renames: at no moment is there half a folder."""
    if not target.exists():
        new.rename(target)
        return
    old = new.with_name(new.name + ".old")
    target.rename(old)
    new.rename(target)
    shutil.rmtree(old)
