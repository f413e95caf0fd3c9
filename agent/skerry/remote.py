"""A board at the other end of a serial line or a broker, as a client sees it. Knows messages, not what they are for."""

import contextlib
import queue
import secrets
from types import TracebackType
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import paho.mqtt.client as paho
import serial
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from skerry.errors import SkerryError
from skerry.protocol import Incoming, Outgoing, Part, ProtocolError, parse_outgoing, to_line

_PORTS = {"mqtt": 1883, "mqtts": 8883}
_CONNECT_S = 10.0
_LONGEST_LINE = 1 << 20


class Link(Protocol):
    """Where messages go and come from."""

    def send(self, message: Incoming) -> None:
        """Raises SkerryError when the link is lost."""

    def receive(self, timeout_s: float) -> Outgoing | None:
        """The next message of the board; None when none came in time. Raises SkerryError when the link is lost."""

    def close(self) -> None: ...

    def __enter__(self) -> "Link": ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class SerialLink:
    """A serial port; lines that are no messages, such as a prompt for people, are passed over."""

    def __init__(self, device: str, baud: int) -> None:
        """Raises SkerryError when the port cannot be opened."""
        try:
            self._port = serial.Serial(device, baud, timeout=0, write_timeout=_CONNECT_S, exclusive=True)
            self._port.write(b"\x15")  # Ctrl-U drops what noise, or somebody before us, has left on the line
        except (OSError, ValueError) as error:
            raise SkerryError(
                f"{device}: {error}", "name the port, such as /dev/ttyUSB0, and check who may open it"
            ) from None
        self._device, self._received = device, bytearray()

    def __enter__(self) -> "SerialLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Incoming) -> None:
        try:
            self._port.write(to_line(message) + b"\n")
        except OSError as error:
            raise SkerryError(f"{self._device}: {error}") from None

    def receive(self, timeout_s: float) -> Outgoing | None:
        while True:
            while b"\n" in self._received:
                line, _, rest = bytes(self._received).partition(b"\n")
                self._received[:] = rest
                with contextlib.suppress(ProtocolError):
                    return parse_outgoing(line[line.index(b"{") :] if b"{" in line else line)
            del self._received[:-_LONGEST_LINE]
            self._port.timeout = timeout_s
            try:
                data = self._port.read(1)
                data += self._port.read(self._port.in_waiting) if data else b""
            except OSError as error:
                raise SkerryError(f"{self._device}: {error}") from None
            if not data:
                return None
            self._received += data

    def close(self) -> None:
        self._port.close()


class MqttLink:
    """A board behind a broker: mqtt://[user[:password]@]host[:port]/NODE, or mqtts:// with the system's trust."""

    def __init__(self, url: str) -> None:
        """Raises SkerryError when the URL is not of that form or the broker does not take us."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise _bad_url(url) from None
        node = unquote(parts.path.strip("/"))
        if not parts.hostname or not node or set(node) & set("+#/"):
            raise _bad_url(url)
        self._topic, self._replies = f"skerry/{node}/ask", f"skerry-chat/{secrets.token_hex(8)}"
        self._inbox: queue.SimpleQueue[bytes | SkerryError] = queue.SimpleQueue()
        self._parts: dict[int, str] = {}
        self._client = client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        if parts.username is not None:
            client.username_pw_set(unquote(parts.username), unquote(parts.password or "") or None)
        if parts.scheme == "mqtts":
            client.tls_set()
        ready: queue.SimpleQueue[str] = queue.SimpleQueue()

        def connected(_client: Any, _data: Any, _flags: Any, code: Any, _properties: Any) -> None:
            if code.is_failure:
                ready.put(str(code))
            else:
                client.subscribe(self._replies, qos=1)

        def failed(*_: Any) -> None:
            ready.put("it cannot be reached")

        client.on_connect = connected
        client.on_connect_fail = failed
        client.on_subscribe = lambda *_: ready.put("")
        client.on_message = lambda _client, _data, message: self._inbox.put(bytes(message.payload))
        client.on_disconnect = lambda *_: self._inbox.put(SkerryError(f"{parts.hostname}: the broker is gone"))
        try:
            client.connect(parts.hostname, port, keepalive=30)
            client.loop_start()
            trouble = ready.get(timeout=_CONNECT_S)
        except (OSError, ValueError) as error:
            raise SkerryError(f"{parts.hostname}:{port}: {error}", "check the broker's address") from None
        except queue.Empty:
            trouble = "it does not answer"
        if trouble:
            self.close()
            raise SkerryError(f"{parts.hostname}:{port}: {trouble}", "check the broker's address, user and password")

    def __enter__(self) -> "MqttLink":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: Incoming) -> None:
        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.ResponseTopic = self._replies
        self._client.publish(self._topic, to_line(message), qos=1, properties=properties)

    def receive(self, timeout_s: float) -> Outgoing | None:
        try:
            found = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, SkerryError):
            raise found
        message = parse_outgoing(found)
        if not isinstance(message, Part):
            return message
        self._parts[message.part] = message.text
        if len(self._parts) < message.of:
            return self.receive(timeout_s)
        whole = "".join(self._parts[number] for number in sorted(self._parts))
        self._parts.clear()
        return parse_outgoing(whole.encode())

    def close(self) -> None:
        self._client.on_disconnect = None
        self._client.disconnect()
        self._client.loop_stop()


def _bad_url(url: str) -> SkerryError:
    return SkerryError(f"{url!r} is no address of a board", "write mqtt://broker/NODE, NODE being the board's name")
