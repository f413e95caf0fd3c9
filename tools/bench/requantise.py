"""The peer's fastest file of like bits: llama.cpp rearranges Q4_0 for AVX2 and NEON when it loads it, and Q4_1 not."""

import hashlib
from collections import Counter
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

FOUR_BITS = ("Q4_1", "Q4_K")


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main_kind(path: Path) -> str:
    """The type of most matrices of a GGUF file, as `Q4_1`."""
    kinds = Counter(tensor.tensor_type.name for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1)
    return str(kinds.most_common(1)[0][0])


def q4_0(source: Path, folder: Path) -> Path:
    """A copy of `source` in `folder` whose 4-bit matrices are Q4_0, all else as it was; made once, always the same."""
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
        if kind.name in FOUR_BITS:
            data, kind = quantize(dequantize(data, kind), GGMLQuantizationType.Q4_0), GGMLQuantizationType.Q4_0
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.rename(target)
