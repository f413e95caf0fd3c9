"""What the service tells systemd: sd_notify(3) over a datagram socket, and sd-daemon(3)'s priorities in log lines."""

import logging
import os
import socket
from collections.abc import Mapping

_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))


def notify(state: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Send `READY=1`, `WATCHDOG=1` and the like; False when nobody listens, or does not read.

    Never raises, and never blocks: a manager that is busy must not stop the event loop.
    """
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.setblocking(False)
            out.connect(address)
            out.send(state.encode())
    except OSError:
        return False
    return True


def watchdog_period_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """How often to send `WATCHDOG=1`: half of what systemd allows; None when it does not watch this process."""
    text = environment.get("WATCHDOG_USEC", "")
    mine = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 2e6 if text.isdecimal() and int(text) > 0 and mine else None


class JournalFormatter(logging.Formatter):
    """One line for each record, `<6>` and the like before it, which the journal takes as its priority."""

    def format(self, record: logging.LogRecord) -> str:
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        text = super().format(record)
        return "\n".join(f"<{priority}>{line}" for line in text.splitlines() or [""])


def log_handler(environment: Mapping[str, str] = os.environ) -> logging.Handler:
    """To standard error: with priorities where that is the journal, with times where it is not."""
    handler = logging.StreamHandler()
    if "JOURNAL_STREAM" in environment:
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
