"""A process that loads one contender, answers once and says what memory it holds; `spawn` starts it and listens.

    python -m tools.bench.child {"contender": ..., ...}

Standard output, one JSON value a line: the first token's id as soon as it is there; where `endless` is asked for,
[tokens, anonymous bytes] again and again; a Memory at the end. Imports stand inside functions, so that each contender
pays for its own only.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skerry.host import KIB, Host
from tools.bench.question import OURS, QUESTION

MAX_TOKENS = 1024
_ANSWER = 32


@dataclass(frozen=True)
class Memory:
    """Bytes; `kv` is the part of `anonymous` that keys and values were given."""

    peak: int
    anonymous: int
    file: int
    kv: int


@dataclass(frozen=True)
class Job:
    """What a child runs: our model folder, or a file for llama.cpp."""

    label: str
    model: Path
    threads: int
    cache: Path | None = None
    prompt: tuple[int, ...] = ()
    """llama.cpp's; ours encodes the question itself."""
    kv_bytes: int = 0
    """llama.cpp's; ours asks the arena."""
    endless: int = 0
    every: int = 1


@dataclass(frozen=True)
class Heard:
    first_s: float
    """From the start of the process to its first token."""
    memory: Memory
    samples: list[tuple[int, int]]
    """(tokens generated, anonymous bytes)."""


def spawn(job: Job) -> Heard:
    """Run a child to its end."""
    from tools.bench.setting import ROOT

    command = [sys.executable, "-m", "tools.bench.child", json.dumps(asdict(job), default=str)]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        first_s = time.perf_counter() - start
        lines = process.stdout.read().splitlines()
    if process.returncode or not first or not lines:
        raise RuntimeError(f"the process of {job.label} ended with {process.returncode}")
    *samples, memory = (json.loads(line) for line in lines)
    return Heard(first_s, Memory(**memory), [(tokens, size) for tokens, size in samples])


def _main() -> None:
    fields = json.loads(sys.argv[1])
    fields |= {"model": Path(fields["model"]), "cache": Path(fields["cache"]) if fields["cache"] else None}
    job = Job(**fields)
    for value in _run_ours(job) if job.label.startswith(OURS) else _run_peer(job):
        print(json.dumps(value), flush=True)


def _run_ours(job: Job) -> Iterator[Any]:
    from skerry.core import Message, Role
    from skerry.modelfile import ModelFolder
    from skerry.text import Text
    from tools.bench.ours import Skerry, open_sessions

    model = ModelFolder(job.model)
    known = model.manifest.tokens
    text = Text(model.path, known.end, known.bos, known.add_bos)
    ours = Skerry(model, open_sessions(model, job.threads, job.cache), MAX_TOKENS)
    first = ours.extend(text.encode_chat([Message(Role.USER, QUESTION)]))
    yield first
    tokens = ours.generate(first)
    for _ in islice(tokens, _ANSWER - 1):
        pass
    for done in range(job.every, job.endless + 1, job.every):
        for _ in islice(tokens, job.every):
            pass
        yield done, Host().smaps_rollup()["Anonymous"]
    yield asdict(_memory(ours.arena_bytes))


def _run_peer(job: Job) -> Iterator[Any]:
    from tools.bench.peer import LlamaCpp

    peer = LlamaCpp(job.label, job.model, job.threads, MAX_TOKENS)
    peer.complete(job.prompt, 1)
    yield 0
    peer.complete(job.prompt, _ANSWER)
    yield asdict(_memory(job.kv_bytes))


def _memory(kv: int) -> Memory:
    """Of this process, after proc_pid_status(5)."""
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Host().read("/proc/self/status") or "", re.MULTILINE))
    peak, anonymous, file = (int(status[name]) * KIB for name in ("VmHWM", "RssAnon", "RssFile"))
    return Memory(peak, anonymous, file, kv)


if __name__ == "__main__":
    _main()
