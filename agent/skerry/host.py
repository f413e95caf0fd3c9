"""What the kernel says of this machine. The only code of the agent that opens /sys, /proc and /dev.

A test passes the root of another tree. A file that is missing, unreadable or in an unknown form gives None or nothing,
never an exception: a board without a sensor or a cgroup still answers. Knows nothing of what the numbers are used for.
"""

import ctypes
import mmap
import re
from pathlib import Path, PurePosixPath

KIB = 1024


class Host:
    """The machine below `root`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self, path: str) -> str | None:
        """The text of a sysfs or procfs file, named as on the board (`/sys/...`), without its last newline."""
        try:
            return (self.root / path.lstrip("/")).read_bytes().decode(errors="replace").rstrip("\n")
        except (OSError, ValueError):  # sysfs answers EINVAL, EAGAIN or ENODEV too; ValueError is a NUL in the path
            return None

    def page_size(self) -> int:
        """Bytes per page of the running kernel, whatever the root: 4096, but 16384 or 65536 on some aarch64 kernels."""
        return mmap.PAGESIZE

    def cpu_identity(self) -> str:
        """One line that names the kinds of core here and their features; empty when unknown.

        Equal only where code chosen for the one machine's features runs on the other, so it can be the key of weights
        that were packed for this CPU. Clocks, core counts and serial numbers are left out: they differ between boots
        and between boards of a kind. A big.LITTLE chip lists each kind of core once.

        Source: arch/x86/kernel/cpu/proc.c and arch/arm64/kernel/cpuinfo.c of Linux.
        """
        kinds: set[str] = set()
        features: set[str] = set()
        for block in re.split(r"\n\s*\n", self.read("/proc/cpuinfo") or ""):
            fields: dict[str, str] = dict(re.findall(r"^([^:\n]*?)[ \t]*:[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
            names = _X86_NAMES if "vendor_id" in fields else _ARM_NAMES
            if names[0] in fields:
                kinds.add(" ".join(fields.get(name, "?") for name in names))
                features.update(fields.get("flags", fields.get("Features", "")).split())
        if not kinds:
            return ""
        # `lm` is x86's long mode; Advanced SIMD is called `asimd` on 64-bit Arm and `neon` on 32-bit.
        arch = "x86_64" if "lm" in features else "aarch64" if "asimd" in features else "32-bit"
        return f"{arch}; {', '.join(sorted(kinds))}; {' '.join(sorted(features))}"

    def mem_available(self) -> int | None:
        """Bytes that can be allocated without swapping, by the kernel's estimate (proc_meminfo(5), MemAvailable)."""
        return _byte_table(self.read("/proc/meminfo")).get("MemAvailable")

    def memory_limit(self) -> int | None:
        """Bytes of the smallest cgroup v2 memory.max over this process; None without one.

        A parent's limit binds too, so every level up to the root counts (Documentation/admin-guide/cgroup-v2.rst).
        """
        own = re.search(r"^0::(/.*)$", self.read("/proc/self/cgroup") or "", re.MULTILINE)
        if own is None:
            return None
        group = PurePosixPath(own[1])
        texts = [self.read(f"/sys/fs/cgroup{level}/memory.max") or "" for level in (group, *group.parents)]
        return min((int(text) for text in texts if _NUMBER.fullmatch(text)), default=None)

    def trim_heap(self) -> None:
        """Give memory that was freed back to the kernel now: malloc_trim(3), where the C library has it."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def smaps_rollup(self, pid: int | str = "self") -> dict[str, int]:
        """The memory of a process by kind (Rss, Pss, Anonymous, Locked, ...) in bytes."""
        return _byte_table(self.read(f"/proc/{pid}/smaps_rollup"))


_X86_NAMES = ("vendor_id", "cpu family", "model", "stepping", "model name")
_ARM_NAMES = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part")
_NUMBER = re.compile(r"[0-9]{1,20}")


def _byte_table(text: str | None) -> dict[str, int]:
    """The `Name: 12 kB` lines of a procfs file, in bytes; lines in other units are left out."""
    return {name: int(kib) * KIB for name, kib in re.findall(r"^(\S+):\s+([0-9]{1,20}) kB$", text or "", re.MULTILINE)}
