"""ONNX Runtime sessions of a model folder, with weights in this CPU's own layout mapped from a cache.

ONNX Runtime rearranges ("prepacks") weights for the CPU that it finds, on the heap. Done once and written to
`cache_dir/packed/<model>/<key>/`, the result is mapped afterwards: file pages that the kernel can drop and that are
read on demand, instead of anonymous memory, and a faster start. The key names the CPU, the runtime and the weights, so
a cache that came from elsewhere is never used. A cache that cannot be written, or is torn, costs memory and time only.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# ONNX Runtime's wheels report usage to their maker, from the moment they are imported: a device id in the home folder,
# connections to the network. A board that is offline by promise does neither.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime

from skerry.errors import ModelError
from skerry.host import Host
from skerry.modelfile import ModelFolder

log = logging.getLogger(__name__)

_PARTS = ("body", "head")
_MANIFEST = "packed.json"
_READ_BYTES = 1 << 20


class Sessions:
    """The body and the head of one model, opened.

    body, head: onnxruntime.InferenceSession; packed: whether their weights are mapped from the cache.
    """

    def __init__(
        self, model: ModelFolder, host: Host, *, f32: bool, threads: int, spin: bool, cache_dir: Path | None
    ) -> None:
        """threads: 0 is one per core; cache_dir: None keeps the weights on the heap.

        Raises ModelError when ONNX Runtime cannot load the graphs.
        """
        self._model, self._threads, self._spin = model, threads or os.cpu_count() or 1, spin
        stems = {part: f"{part}-f32" if f32 else part for part in _PARTS}
        graphs = {part: model.path / f"{stem}.onnx" for part, stem in stems.items()}
        self.packed = False
        if cache_dir is not None and (identity := host.cpu_identity()):
            key = hashlib.sha256(f"{identity}|{onnxruntime.__version__}|{model.manifest.digest()}".encode()).hexdigest()
            cache = cache_dir / "packed" / model.path.name / f"{key[:16]}{'-f32' if f32 else ''}"
            if not _whole(cache):
                model.verify()  # once, before all of it is read anyway
            if _whole(cache) or self._pack(cache, graphs):
                self.packed = True
                graphs = {part: cache / f"{part}.onnx" for part in _PARTS}
        self.body, self.head = (self._open(graphs[part], self.packed) for part in _PARTS)

    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        entry = options.add_session_config_entry
        entry("session.intra_op.allow_spinning", "1" if self._spin and self._threads > 1 else "0")
        entry("session.force_spinning_stop", "1")  # spin inside a run only, never between runs
        return options

    def _open(self, graph: Path, packed: bool, options: Any = None) -> Any:
        options = options or self._options()
        if packed:  # it was optimised when it was written
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's own classes share no base
            raise ModelError(f"{graph}: ONNX Runtime cannot load it: {error}", "convert the model again") from None

    def _pack(self, cache: Path, graphs: dict[str, Path]) -> bool:
        """Write both graphs with prepacked weights, whole or not at all; False where the disk does not let us."""
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            with _locked(cache.parent):
                if _whole(cache):  # another process was faster
                    return True
                for other in cache.parent.iterdir():  # unfinished, or of another version: flash is small
                    if other.name.partition("-")[0] != cache.name.partition("-")[0]:
                        shutil.rmtree(other, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache.parent))
                try:
                    for part, graph in graphs.items():
                        self._save(graph, partial / f"{part}.onnx")
                    _write_manifest(partial)
                    shutil.rmtree(cache, ignore_errors=True)  # a torn one
                    partial.rename(cache)
                    _sync(cache.parent)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        except (OSError, ModelError) as error:
            # ONNX Runtime reports a full disk as an error of its own; a model that is broken fails again without us.
            log.warning("weights stay on the heap: %s: %s", cache, str(error).partition("\n")[0])
            return False
        return True

    def _save(self, graph: Path, target: Path) -> None:
        """Have ONNX Runtime write a graph as optimised and prepacked for this CPU, its weights beside it."""
        options = self._options()
        options.optimized_model_filepath = str(target)
        entry = options.add_session_config_entry
        entry("session.optimized_model_external_initializers_file_name", f"{target.stem}.bin")
        entry("session.save_external_prepacked_constant_initializers", "1")
        self._open(graph, False, options)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time (flock(2)); the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _whole(cache: Path) -> bool:
    """Whether every file has the size and checksum that was written down; reading also warms the page cache."""
    try:
        files = json.loads((cache / _MANIFEST).read_text())
        return all(_checksum(cache / name) == known for name, known in files.items()) and bool(files)
    except (OSError, ValueError, AttributeError):
        return False


def _write_manifest(folder: Path) -> None:
    """Checksums of all files, everything durable before the folder gets its name."""
    files = {file.name: _checksum(file) for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps(files))
    for path in (*folder.iterdir(), folder):
        _sync(path)


def _checksum(file: Path) -> list[int]:
    """[size, crc32]: the cache is our own, so it guards against torn writes and flash faults, not against people."""
    size = crc = 0
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return [size, crc]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
