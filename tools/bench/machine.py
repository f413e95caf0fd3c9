"""What a run was measured on: versions and hardware, never names of machines, users or folders."""

import os
import platform
from importlib.metadata import version

from skerry.host import Host
from tools.bench import peer


def describe() -> dict[str, str]:
    """Name -> text; printed above the table and written beside the report."""
    identity = Host().cpu_identity().split("; ")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "CPU": f"{', '.join(identity[1:2]) or 'unknown'} ({platform.machine()})",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 1e9:.1f} GB",
        "load at start": f"{os.getloadavg()[0]:.2f}",
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("skerry", "onnxruntime", "numpy")},
        "llama.cpp": peer.system_info() or "xllamacpp is not installed",
    }
