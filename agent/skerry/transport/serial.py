"""Serial ports: opened when they are there, and again when they come back; bytes in, bytes out.

What comes in is read in small pieces, what goes out waits in a bounded buffer: neither a flood nor a peer that stops
reading holds up anything else. Types of pyserial and pyudev stay here. Knows nothing of lines and messages.
"""

import asyncio
import errno
import logging
import os
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import serial

from skerry import config
from skerry.config import Flow, Parity
from skerry.host import Host
from skerry.service import Service
from skerry.transport.dialogue import Dialogue, Reader

log = logging.getLogger(__name__)

_READ_BYTES = 1024  # per turn of the event loop: what is in them is served before the other ports' turn
_WRITE_BYTES = 4096
_DRAIN_S, _DRAIN_PERIOD_S = 1.0, 0.02
_LONGEST_WAIT = 8  # times retry_s
_PARITY = {Parity.NONE: serial.PARITY_NONE, Parity.EVEN: serial.PARITY_EVEN, Parity.ODD: serial.PARITY_ODD}


class SerialTransport:
    """All configured ports. For the event loop's thread.

    A port that is absent is looked for every `retry_s`, and at once when udev tells of a new one.
    """

    def __init__(self, settings: config.Serial, service: Service, host: Host, retry_s: float = 2.0) -> None:
        self._loop = asyncio.get_running_loop()
        self._ports = [_Port(port, settings, service, host, retry_s) for port in settings.ports]
        self._monitor: Any = None

    def start(self) -> None:
        """Open what is there; never raises for a port that cannot be opened."""
        for port in self._ports:
            port.look()
        if self._ports and (monitor := _udev_monitor()):
            self._monitor = monitor
            self._loop.add_reader(monitor.fileno(), self._plugged)

    async def stop(self) -> None:
        """Let the output go out for a moment, end the ports' requests, close."""
        if self._monitor:
            self._loop.remove_reader(self._monitor.fileno())
        await asyncio.gather(*(port.stop() for port in self._ports))

    def _plugged(self) -> None:
        try:
            device = self._monitor.poll(0)
        except OSError:  # such as ENOBUFS: events were lost, and one of them may have been ours
            device = None
        if device is None or device.action != "remove":
            for port in self._ports:
                port.look()


def _udev_monitor() -> Any:
    """A started pyudev.Monitor of serial ports; None where there is no udev to ask."""
    try:
        import pyudev  # needs libudev, which a small image may leave out

        monitor = pyudev.Monitor.from_netlink(pyudev.Context())
        monitor.filter_by("tty")
        monitor.start()
    except (ImportError, OSError) as error:
        log.info("no udev (%s): absent ports are only looked for now and then", error)
        return None
    return monitor


class _Port:
    """A configured port, there or not."""

    def __init__(
        self, settings: config.Port, limits: config.Serial, service: Service, host: Host, retry_s: float
    ) -> None:
        self._settings, self._limits, self._service, self._host = settings, limits, service, host
        self._loop = asyncio.get_running_loop()
        self._retry_s = self._wait_s = retry_s
        self._connection: _Connection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._trouble = ""
        """Why it is not open, as the log last said."""

    def look(self) -> None:
        """Open the port if it is there and not open; otherwise it is tried again later."""
        if self._connection:
            return
        if self._timer:
            self._timer.cancel()
        try:
            tty = _opened(self._settings)
        except (OSError, ValueError, termios.error) as error:  # ValueError: a baud rate that the driver refuses
            self._say_trouble(_why(error))
            self._timer = self._loop.call_later(self._wait_s, self.look)
            return
        self._timer, self._trouble = None, ""
        log.info("%s: open at %d baud", self._settings.device, self._settings.baud)
        if Path(self._settings.device).resolve().name in self._host.consoles():
            log.warning(
                "%s is the kernel's console: its messages go between the answers; take it out of serial.ports, or "
                "out of console= on the kernel's command line",
                self._settings.device,
            )
        self._connection = _Connection(self._settings.device, tty, self._limits, self._service, self._lost)

    async def stop(self) -> None:
        if self._connection:
            await self._connection.drain()
        if self._connection:  # it was not lost meanwhile
            self._connection.close()
        if self._timer:
            self._timer.cancel()

    def _lost(self, why: str) -> None:
        assert self._connection
        # A broken adapter that comes and goes is not to fill the log.
        self._wait_s = self._retry_s if self._connection.heard else min(2 * self._wait_s, _LONGEST_WAIT * self._retry_s)
        self._connection.close()
        self._connection = None
        log.warning("%s: lost (%s); it is opened again when it is back", self._settings.device, why)
        self._trouble = os.strerror(errno.ENOENT)
        self._timer = self._loop.call_later(self._wait_s, self.look)

    def _say_trouble(self, why: str) -> None:
        if why != self._trouble:
            log.warning("%s: cannot be opened yet: %s", self._settings.device, why)
        self._trouble = why


class _Connection:
    """A port that is open, with one dialogue.

    When a port is opened again, that is another dialogue: what belongs to the old one is not sent to the new one.
    """

    def __init__(
        self, device: str, tty: serial.Serial, limits: config.Serial, service: Service, lost: Callable[[str], None]
    ) -> None:
        self.heard = False
        """Whether anything ever came in."""
        self._device, self._tty, self._service, self._lost = device, tty, service, lost
        self._buffer_bytes = limits.buffer_bytes
        self._loop = asyncio.get_running_loop()
        self._output = bytearray()
        self._dropped: set[Reader] = set()  # who missed output
        self._dialogue = Dialogue(f"serial:{device}", limits.line_bytes, service, self._write)
        self._loop.add_reader(tty.fileno(), self._readable)

    async def drain(self) -> None:
        """Wait a moment until all output is on the wire. Nothing is read any more."""
        self._loop.remove_reader(self._tty.fileno())
        end = self._loop.time() + _DRAIN_S
        with suppress(OSError):  # also of a port that is lost and closed meanwhile
            while (self._output or self._tty.out_waiting) and self._loop.time() < end:
                await asyncio.sleep(_DRAIN_PERIOD_S)

    def close(self) -> None:
        self._dialogue.close()
        self._loop.remove_reader(self._tty.fileno())
        self._loop.remove_writer(self._tty.fileno())
        with suppress(OSError, termios.error):
            if self._tty.out_waiting:  # or closing would wait for a peer that holds back our output
                self._tty.reset_output_buffer()
        with suppress(OSError):
            self._tty.close()

    def _readable(self) -> None:
        try:
            data = os.read(self._tty.fileno(), _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(_why(error))
            return
        if not data:
            self._lost("hung up")
            return
        self.heard = True
        self._dialogue.feed(data)

    def _write(self, data: bytes, reader: Reader) -> bool:
        """Queue some output; False when it was dropped, which it is as a whole. An empty buffer takes any size.

        Once something was dropped, so is all that follows until the buffer is empty and the loss can be told.
        """
        if self._dropped or (self._output and len(self._output) + len(data) > self._buffer_bytes):
            if not self._dropped:
                log.warning("%s: its peer does not read; output is dropped", self._device)
            self._dropped.add(reader)
            self._loop.call_soon(self._service.gone, self._dialogue)  # nobody reads these answers
            return False
        if not self._output:
            self._loop.add_writer(self._tty.fileno(), self._writable)
        self._output += data
        return True

    def _writable(self) -> None:
        try:
            size = os.write(self._tty.fileno(), self._output[:_WRITE_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(_why(error))
            return
        del self._output[:size]
        if not self._output:
            self._loop.remove_writer(self._tty.fileno())
            dropped, self._dropped = self._dropped, set()
            self._dialogue.tell_lost(dropped)


def _opened(settings: config.Port) -> serial.Serial:
    """Raises OSError, ValueError or termios.error."""
    return serial.Serial(
        settings.device,
        settings.baud,
        parity=_PARITY[settings.parity],
        rtscts=settings.flow == Flow.RTSCTS,
        xonxoff=settings.flow == Flow.XONXOFF,
        exclusive=True,
        # Sets VMIN to 1: a read of no bytes then means that the line is gone (termios(3)).
        inter_byte_timeout=0,
    )


def _why(error: Exception) -> str:
    """The bare reason: pyserial's texts name it twice."""
    number = getattr(error, "errno", None)
    if number == errno.EWOULDBLOCK:
        return "another program uses it"
    return os.strerror(number) if number else str(error)
