"""The peer's fastest file of like bits: llama.cpp rearranges Q4_0 for AVX2 and NEON when it loads it, and Q4_1 not."""

import hashlib
import re
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

_FOUR_BITS = ("Q4_1", "Q4_K")


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def kind_of(path: Path) -> str:
    """The kind of its matrices, by its name (ggml, docs/gguf.md, GGUF naming convention); empty if unnamed."""
    found = re.search(r"(?<![A-Z0-9])(?:I?Q\d\w*|B?F16|F32)$", path.stem, re.IGNORECASE)
    return found[0].upper() if found else ""


def q4_0(source: Path, folder: Path) -> Path:
    """A copy of `source` in `folder` whose Q4_1 and Q4_K matrices are Q4_0, all else as it was; made once."""
    target = folder / f"{source.stem}.{sha256(source)[:8]}.as-Q4_0.gguf"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    reader = GGUFReader(source)
    writer = GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key == "general.file_type":
            writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
        elif not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        data, kind = tensor.data, tensor.tensor_type
        if kind.name in _FOUR_BITS:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)
