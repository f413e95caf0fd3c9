"""MQTT: which topic takes what, where replies go, and what the board tells of itself. docs/mqtt.md is for integrators.

Knows no sockets, threads or retries (broker.py has them), and nothing of what a message means.
"""

import asyncio
import logging
import time
from typing import Any
from uuid import uuid4

import msgspec

from skerry.config import Mqtt
from skerry.errors import ConfigError
from skerry.host import Host
from skerry.protocol import (
    Ask,
    Cancel,
    Code,
    Incoming,
    Name,
    Outgoing,
    Part,
    ProtocolError,
    TokenText,
    parse,
    to_line,
)
from skerry.service import Service
from skerry.transport.broker import Backoff, BrokerLink
from skerry.transport.discovery import announcements
from skerry.transport.door import Door
from skerry.transport.outbox import Packet, Weight

log = logging.getLogger(__name__)

_FLEET = "fleet"
_FLEET_ASK = f"skerry/{_FLEET}/ask"
_SHARED = f"$share/skerry/{_FLEET_ASK}"

_WATCH_PERIOD_S = 1.0
_PROPERTY_BYTES = 256
"""Of a response topic, and of correlation data: both go out with every piece of an answer."""

_MESSAGE_BYTES = 65_536
"""What a payload may have beyond twice the prompt, which its JSON may need for escapes."""


def check_mqtt(config: Mqtt, node: str) -> None:
    """Whether a transport could be made of these settings, without a broker. Raises ConfigError."""
    _check_node(node)
    Door(config)


def _check_node(node: str) -> None:
    if node == _FLEET or node.startswith("$") or not node.isprintable() or set("/+#") & set(node):
        raise ConfigError([f"service.node: {node!r} cannot be a part of MQTT topics"], "set another name")


class MqttTransport:
    """Made on the event loop. Raises ConfigError with every problem of the settings."""

    def __init__(self, config: Mqtt, service: Service, host: Host, backoff: Backoff | None = None) -> None:
        node = service.node
        _check_node(node)
        self._config, self._service, self._host = config, service, host
        self._topics = {
            name: f"skerry/{node}/{name}" for name in ("ask", "cancel", "reply", "status", "telemetry", "event")
        }
        self._has_temperature = host.hottest_c() is not None
        self._instance = uuid4().hex[:12]
        self._sightings = 0
        self._shown_state = ""
        self._telemetry_due = 0.0
        self._untaken = self._reported = 0
        self._retained_seen: set[str] = set()
        self._link = BrokerLink(
            config,
            config.client_id or f"skerry-{node}",
            (self._topics["ask"], self._topics["cancel"], *((_SHARED,) if config.fleet else ())),
            self._status({"type": "status", "node": node, "state": "offline"}),
            self,
            backoff or Backoff(),
        )

    def start(self) -> None:
        """Connect, and stay connected; returns at once."""
        self._link.start()
        self._watching = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """Send what waits, say goodbye and disconnect."""
        self._watching.cancel()
        self._link.send(self._link.will)
        await self._link.stop()

    # -- what comes ----------------------------------------------------------------------------------------------------

    def received(self, packet: Packet) -> None:
        """A command, or what the status topic holds. Every fault of a command is a reply."""
        if packet.topic == self._topics["status"]:
            self._look_for_rival(packet)
            return
        if packet.retain:  # it would be carried out again after every reconnect
            self._ignore_retained(packet.topic)
            return
        if self._link.outbox.full:
            self._untaken += 1
            return
        fault = _unusable(packet)
        client = _Client(self, packet if fault is None else None, fleet=packet.topic == _FLEET_ASK)
        try:
            if fault:
                raise ProtocolError(Code.BAD_MESSAGE, fault, "docs/mqtt.md says what can be used")
            message = self._understood(packet)
        except ProtocolError as error:
            client.send(error.reply())
            return
        self._service.receive(client, message)

    def _understood(self, packet: Packet) -> Incoming:
        """The message in a payload, which may also be plain text. Raises ProtocolError."""
        size, payload = len(packet.payload), packet.payload
        limit = 2 * self._service.config.service.prompt_bytes + _MESSAGE_BYTES
        if size > limit:
            raise ProtocolError(Code.TOO_LARGE, f"the message has {size} bytes, the limit is {limit}", "shorten it")
        cancels = packet.topic == self._topics["cancel"]
        if not payload.lstrip().startswith(b"{"):
            try:
                text = payload.decode()
            except UnicodeDecodeError as error:
                raise ProtocolError(Code.BAD_MESSAGE, f"neither JSON nor text in UTF-8: {error}") from None
            if not text.strip():
                raise ProtocolError(Code.BAD_MESSAGE, "the message is empty")
            plain = {"type": "cancel", "id": text.strip()} if cancels else {"type": "ask", "text": text}
            payload = msgspec.json.encode(plain)
        message = parse(payload)
        allowed = Cancel if cancels else Ask if packet.topic == _FLEET_ASK else Incoming
        if not isinstance(message, allowed):
            raise ProtocolError(Code.BAD_MESSAGE, "this topic does not take such a message", "use the board's own /ask")
        if isinstance(message, Ask) and message.id is None:
            return msgspec.structs.replace(message, id=uuid4().hex[:12])
        return message

    def _ignore_retained(self, topic: str) -> None:
        if topic not in self._retained_seen:
            self._retained_seen.add(topic)
            log.warning("retained messages on %s are ignored; publish without retain", topic)
            self.trouble("retained_ignored", f"{topic}: publish without retain")

    def _look_for_rival(self, packet: Packet) -> None:
        """Another board that says to be this one. Not every broker tells the one that is thrown out why, but the status
        that is found at a reconnect, be it only the other's last will, has the other's mark.

        Found at the first connect it may be this board's own from before a restart; found once, a broker's that came
        back from an old backup.
        """
        try:
            instance = msgspec.json.decode(packet.payload, type=_Mark).instance
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if instance in ("", self._instance) or (packet.retain and self._link.connections == 1):
            return
        self._sightings += 1
        if self._sightings > 1:
            self._link.rivalled = True
            if self._sightings.bit_count() == 1:  # ever more rarely
                self.rival()

    # -- what goes -----------------------------------------------------------------------------------------------------

    def reply(self, message: Outgoing, topic: str | None, correlation: bytes | None, fleet: bool) -> None:
        """Send a reply to its topic, in parts when the broker does not take it whole."""
        request_id = getattr(message, "id", None)
        packet = Packet(
            topic=topic or f"{self._topics['reply']}/{_topic_level(request_id)}",
            payload=to_line(message),
            correlation=correlation,
            user=(("node", self._service.node),) if fleet else (),
            weight=Weight.PIECE if isinstance(message, TokenText) else Weight.REPLY,
        )
        room = self._link.room(packet)
        if room is None or len(packet.payload) <= room:
            self._link.send(packet)
            return
        for part in parts(packet.payload, request_id, room):
            self._link.send(msgspec.structs.replace(packet, payload=part))

    def connected(self, away_s: float | None) -> None:
        """The board listens: say so."""
        if away_s is not None:
            self.trouble("reconnected", f"the connection was lost for {away_s:.1f} s")
        if self._config.discovery_prefix:
            status = self._service.status()
            for topic, sensor in announcements(
                self._config.discovery_prefix,
                status.node,
                status.model,
                status.version,
                self._topics,
                self._has_temperature,
            ):
                self._link.send(
                    Packet(topic=topic, payload=msgspec.json.encode(sensor), retain=True, weight=Weight.REPORT)
                )
        self._publish_status()
        self._telemetry_due = 0.0

    def rival(self) -> None:
        """Another client says to be this board."""
        message = f"two boards are called {self._service.node}, or another client uses this board's client id"
        log.error("%s", message)
        self.trouble("duplicate", message)

    def trouble(self, name: str, message: str) -> None:
        """Publish an event."""
        self._link.send(self._packet("event", {"type": "event", "event": name, "message": message}))

    async def _watch(self) -> None:
        """Publish the status when the state changes, at most once in a period, and telemetry when it is due."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            if not self._link.ready:
                continue
            try:
                if self._service.state != self._shown_state:
                    self._publish_status()
                if time.monotonic() >= self._telemetry_due:
                    await self._publish_telemetry()
            except Exception:
                log.exception("the status could not be published")

    def _publish_status(self) -> None:
        status = self._service.status()
        self._shown_state = status.state
        self._link.send(self._status(msgspec.to_builtins(status)))

    async def _publish_telemetry(self) -> None:
        self._telemetry_due = time.monotonic() + self._config.telemetry_period_s
        temperature_c = await asyncio.to_thread(self._host.hottest_c)
        lost = self._link.outbox.dropped + self._untaken
        if lost > self._reported:
            log.warning("%d messages could not be kept or taken: the broker is away or slow", lost - self._reported)
            self.trouble("dropped", f"{lost - self._reported} messages: the broker is away or slow")
            self._reported = lost
        status: dict[str, Any] = msgspec.to_builtins(self._service.status())
        more = {"type": "telemetry", "temperature_c": temperature_c, "dropped": lost}
        self._link.send(self._packet("telemetry", status | more))

    def _status(self, message: dict[str, Any]) -> Packet:
        return self._packet("status", message | {"instance": self._instance}, retain=True)

    def _packet(self, name: str, message: dict[str, Any], retain: bool = False) -> Packet:
        payload = msgspec.json.encode(message)
        return Packet(topic=self._topics[name], payload=payload, retain=retain, weight=Weight.REPORT)


class _Client:
    """Where the replies to one message go. Limits count per response topic; sessions are shared by all of MQTT."""

    scope = transport = "mqtt"

    def __init__(self, owner: MqttTransport, packet: Packet | None, fleet: bool) -> None:
        """Without a packet, replies go to the default topic."""
        self._owner, self._fleet = owner, fleet
        self._topic = packet.response_topic if packet else None
        self._correlation = packet.correlation if packet else None
        self.name = f"mqtt:{self._topic or 'default'}"

    def send(self, message: Outgoing) -> None:
        self._owner.reply(message, self._topic, self._correlation, self._fleet)


class _Mark(msgspec.Struct):
    """What a status says of who wrote it."""

    instance: str = ""


def parts(line: bytes, request_id: str | None, room: int) -> list[bytes]:
    """A message as `part` messages of at most `room` bytes each; none when the room is too small for any."""
    envelope = len(to_line(Part(id=request_id, part=len(line), of=len(line), text="")))
    size = (room - envelope) // 2  # a byte of JSON has at most two as a JSON string: quotes and backslashes are escaped
    if size < 16:
        log.error("a reply of %d bytes cannot be sent: the broker takes %d bytes", len(line), room)
        return []
    pieces, begin = [], 0
    while begin < len(line):
        end = begin + size
        while end < len(line) and line[end] & 0xC0 == 0x80:  # not within a character
            end -= 1
        pieces.append(line[begin:end].decode())
        begin = end
    return [to_line(Part(id=request_id, part=i, of=len(pieces), text=piece)) for i, piece in enumerate(pieces)]


def _unusable(packet: Packet) -> str | None:
    """Why the reply properties of a message cannot be used."""
    topic = packet.response_topic
    if len(packet.correlation or b"") > _PROPERTY_BYTES:
        return f"the correlation data is longer than {_PROPERTY_BYTES} bytes"
    if topic is None:
        return None
    if len(topic.encode()) > _PROPERTY_BYTES:
        return f"the response topic is longer than {_PROPERTY_BYTES} bytes"
    if not topic or topic.startswith("$") or not topic.isprintable() or set("+#") & set(topic):
        return "the response topic is not one that can be published to"
    if topic.startswith("skerry/") and "/reply/" not in topic:
        return "the response topic belongs to a board"
    return None


def _topic_level(request_id: str | None) -> str:
    """A request's id as the last level of a topic; `-` when there is none, or when it is none that we would take."""
    try:
        return msgspec.convert(request_id, Name)
    except msgspec.ValidationError:
        return "-"
