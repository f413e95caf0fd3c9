"""Host on small trees of /proc and /sys.

The trees are written by hand from the kernel's sources and public listings, not captured: /proc/cpuinfo of an x86-64
machine (arch/x86/kernel/cpu/proc.c), and of an RK3588 with four Cortex-A55 and four Cortex-A76
(arch/arm64/kernel/cpuinfo.c).
"""

from pathlib import Path

import pytest

from skerry.host import Host

X86 = """\
processor\t: {number}
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 142
model name\t: Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz
stepping\t: 10
microcode\t: 0xf4
cpu MHz\t\t: {mhz}
cache size\t: 6144 KB
flags\t\t: fpu lm sse2 ssse3 fma avx avx2
bugs\t\t: spectre_v1 spectre_v2
bogomips\t: 3600.00
power management:

"""
ARM = """\
processor\t: {number}
BogoMIPS\t: 48.00
Features\t: fp asimd evtstrm aes asimdhp asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: {variant}
CPU part\t: {part}
CPU revision\t: 0

"""
RK3588 = "".join(
    ARM.format(number=number, variant="0x2" if number < 4 else "0x4", part="0xd05" if number < 4 else "0xd0b")
    for number in range(8)
)
MEMINFO = (
    "MemTotal:        8046084 kB\nMemFree:          512000 kB\nMemAvailable:    6291456 kB\nHugePages_Total:       0\n"
)
ROLLUP = """\
00400000-7ffd6e5f2000 ---p 00000000 00:00 0                              [rollup]
Rss:              123456 kB
Pss:              100000 kB
Locked:                0 kB
"""


def tree(root: Path, files: dict[str, str]) -> Host:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Host(root)


@pytest.mark.parametrize(
    ("cpuinfo", "identity"),
    [
        (
            X86.format(number=0, mhz=800) + X86.format(number=1, mhz=3400.5),
            "x86_64; GenuineIntel 6 142 10 Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz; avx avx2 fma fpu lm sse2 ssse3",
        ),
        (RK3588, "aarch64; 0x41 8 0x2 0xd05, 0x41 8 0x4 0xd0b; aes asimd asimddp asimdhp evtstrm fp"),
        (
            RK3588 + "Serial\t\t: 9a3f\n",
            "aarch64; 0x41 8 0x2 0xd05, 0x41 8 0x4 0xd0b; aes asimd asimddp asimdhp evtstrm fp",
        ),
        ("processor\t: 0\nhart\t: 1\nisa\t: rv64imafdc\n", ""),
        ("", ""),
        ("\x00\xff: : :\n::\n", ""),
    ],
)
def test_cpu_identity(tmp_path: Path, cpuinfo: str, identity: str) -> None:
    assert tree(tmp_path, {"/proc/cpuinfo": cpuinfo}).cpu_identity() == identity


def test_one_more_feature_is_another_cpu(tmp_path: Path) -> None:
    plain = tree(tmp_path / "a", {"/proc/cpuinfo": RK3588})
    newer = tree(tmp_path / "b", {"/proc/cpuinfo": RK3588.replace("asimddp", "asimddp i8mm")})
    assert plain.cpu_identity() != newer.cpu_identity()


@pytest.mark.parametrize(
    ("limits", "smallest"),
    [
        ({"/system.slice/skerry.service": "1073741824\n", "/system.slice": "max\n"}, 1 << 30),
        ({"/system.slice/skerry.service": "max\n", "/system.slice": "536870912\n"}, 1 << 29),
        ({"/system.slice/skerry.service": "1073741824\n", "": "268435456\n"}, 1 << 28),  # the root of a container
        ({"/system.slice/skerry.service": "max\n"}, None),
        ({"/other.slice": "4096\n"}, None),
        ({"/system.slice": "nonsense\n"}, None),
        ({}, None),
    ],
)
def test_memory_limit(tmp_path: Path, limits: dict[str, str], smallest: int | None) -> None:
    files = {f"/sys/fs/cgroup{group}/memory.max": text for group, text in limits.items()}
    own = {"/proc/self/cgroup": "4:memory:/legacy\n0::/system.slice/skerry.service\n"}
    assert tree(tmp_path, files | own).memory_limit() == smallest
    assert tree(tmp_path, {"/proc/self/cgroup": "4:memory:/legacy\n"}).memory_limit() is None


def test_memory_in_bytes(tmp_path: Path) -> None:
    host = tree(tmp_path, {"/proc/meminfo": MEMINFO, "/proc/self/smaps_rollup": ROLLUP, "/proc/7/smaps_rollup": ROLLUP})
    assert host.mem_available() == 6 << 30
    assert host.smaps_rollup() == {"Rss": 123456 * 1024, "Pss": 100000 * 1024, "Locked": 0}
    assert host.smaps_rollup(7) == host.smaps_rollup()


def test_consoles(tmp_path: Path) -> None:
    assert tree(tmp_path, {"/sys/class/tty/console/active": "tty0 ttyS2\n"}).consoles() == ["tty0", "ttyS2"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "proc" / "meminfo").mkdir(parents=True)
    host = Host(tmp_path)
    assert host.read("/sys/class/thermal/thermal_zone0/temp") is None
    assert host.read("/proc/meminfo") is None
    assert host.read("/proc/\0") is None
    assert host.mem_available() is None
    assert host.memory_limit() is None
    assert host.cpu_identity() == ""
    assert host.smaps_rollup() == {}
    assert host.consoles() == []


def test_reads_text_without_its_last_newline(tmp_path: Path) -> None:
    host = tree(tmp_path, {"/sys/class/thermal/thermal_zone0/type": "soc-thermal\n"})
    assert host.read("/sys/class/thermal/thermal_zone0/type") == "soc-thermal"


def test_this_machine() -> None:
    host = Host()
    assert host.page_size() in (4096, 16384, 65536)
    assert (host.mem_available() or 0) > 0
    assert host.smaps_rollup()["Rss"] > host.page_size()


@pytest.mark.parametrize(
    ("zones", "hottest"),
    [
        (["48250\n", "51000\n"], 51.0),
        (["-5000\n"], -5.0),
        (["0\n", "-274000\n", "2147483\n", "nonsense", "40500\n"], 40.5),
        (["0\n"], None),
        ([], None),
    ],
)
def test_hottest(tmp_path: Path, zones: list[str], hottest: float | None) -> None:
    files = {f"/sys/class/thermal/thermal_zone{number}/temp": text for number, text in enumerate(zones)}
    assert tree(tmp_path, files).hottest_c() == hottest
