"""What systemd is told, over a real socket."""

import logging
import os
import socket
from pathlib import Path

import pytest

from skerry.systemd import JournalFormatter, notify, watchdog_period_s


@pytest.fixture
def manager(tmp_path: Path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(5)
        yield manager


def test_notices_arrive(manager: socket.socket) -> None:
    assert notify("READY=1", {"NOTIFY_SOCKET": manager.getsockname()})
    assert manager.recv(100) == b"READY=1"


def test_abstract_sockets() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"skerry-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        manager.settimeout(5)
        assert notify("READY=1", {"NOTIFY_SOCKET": f"@{name}"})
        assert manager.recv(100) == b"READY=1"


def test_a_manager_that_does_not_read_blocks_nothing(manager: socket.socket) -> None:
    sent = [notify("WATCHDOG=1", {"NOTIFY_SOCKET": manager.getsockname()}) for _ in range(10_000)]
    assert sent[0] and not sent[-1]


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "@nobody-listens-here", "\0"])
def test_nobody_listens(address: str) -> None:
    assert not notify("READY=1", {"NOTIFY_SOCKET": address})


@pytest.mark.parametrize(
    ("environment", "period"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog_period(environment: dict[str, str], period: float | None) -> None:
    assert watchdog_period_s(environment) == period


def test_log_lines_carry_the_journals_priorities() -> None:
    record = logging.LogRecord("skerry", logging.WARNING, "", 0, "two\nlines", None, None)
    assert JournalFormatter("%(name)s: %(message)s").format(record) == "<4>skerry: two\n<4>lines"
