"""A lasting connection to an MQTT 5 broker: connects, backs off, sends what waits, hands over what comes.

The only module that knows paho. It has one thread: packets reach it through a bounded queue, and what it has to tell
reaches the event loop by `call_soon_threadsafe`. Every connection begins anew: certificates and the password are read
again, topics are subscribed again, what was not acknowledged is sent again. All times are monotonic, so a clock that
starts in 1970 matters to certificates only. Knows no topics and no messages.
"""

import asyncio
import logging
import os
import random
import select
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from skerry.config import Mqtt
from skerry.errors import ConfigError
from skerry.transport.door import Door
from skerry.transport.outbox import Outbox, Packet, Queued

log = logging.getLogger(__name__)

LARGEST_PACKET = 4 << 20
"""Bytes; larger ones the broker keeps to itself, so that nobody can fill the board's memory with one message."""

_IN_FLIGHT = 20  # sent and not acknowledged; as many as mosquitto allows by default
_HANDED_OVER = 16  # packets that the event loop has not looked at yet; more stay in the socket
_TAKEN_OVER = 0x8E  # MQTT 5, 3.14.2.1: Session taken over
_NOT_IN_ITS_TIME = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED


class Handler(Protocol):
    """Who uses a link; called on the event loop."""

    def received(self, packet: Packet) -> None: ...

    def connected(self, away_s: float | None) -> None:
        """All topics are subscribed; `away_s` is how long the connection was lost, None at the first time."""

    def rival(self) -> None:
        """The broker said that another client has taken our name."""

    def trouble(self, name: str, message: str) -> None:
        """Something that the operator should know."""


class Backoff:
    """How long to wait before the next attempt: longer after every failure, spread by up to half.

    A connection that held for `stable_s` clears the failures. Who is thrown out by another client of the same name
    waits `rival_s` and more: the two would throw each other out for ever. With the defaults no minute has more than
    4 attempts, whatever the broker does.
    """

    def __init__(
        self,
        first_s: float = 5.0,
        longest_s: float = 120.0,
        stable_s: float = 60.0,
        rival_s: float = 60.0,
        longest_rival_s: float = 3600.0,
        spread: Callable[[], float] = random.random,
    ) -> None:
        self._first_s, self._longest_s, self._stable_s = first_s, longest_s, stable_s
        self._rival_s, self._longest_rival_s, self._spread = rival_s, longest_rival_s, spread
        self._failures = self._rivals = 0

    def next_s(self, lasted_s: float, taken_over: bool = False) -> float:
        """Seconds until the next attempt, after a connection that lasted so long (0: it was not made)."""
        if lasted_s >= self._stable_s:
            self._failures = 0
        if lasted_s >= self._longest_rival_s:
            self._rivals = 0
        if taken_over:
            self._rivals += 1
            base = _doubled(self._rival_s, self._rivals, self._longest_rival_s)
        else:
            self._failures += 1
            base = _doubled(self._first_s, self._failures, self._longest_s)
        return base * (1 + self._spread() / 2)


def _doubled(first_s: float, count: int, longest_s: float) -> float:
    return float(min(first_s * 2 ** min(count - 1, 32), longest_s))


class BrokerLink:
    """See the module. Made on the event loop; raises ConfigError with every problem of the settings and their files.

    Subscribes `topics`, where retained packets are marked as such whenever they come, and the will's topic.
    """

    def __init__(
        self, config: Mqtt, client_id: str, topics: tuple[str, ...], will: Packet, handler: Handler, backoff: Backoff
    ) -> None:
        Door(config)  # the problems that can be told now
        self.config, self.client_id, self.topics, self.will, self.handler = config, client_id, topics, will, handler
        self.outbox = Outbox(config.queue_messages)
        self.ready = False
        self.connections = 0
        self.largest: int | None = None
        """Bytes of the largest packet that the broker takes; None is any. Known once there was a connection."""
        self.rivalled = False
        """Another client is known to use our name; who sets it makes the next wait a long one."""
        self.stopping = threading.Event()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._backoff = backoff
        self._loop = asyncio.get_running_loop()
        self._handed_over = threading.Semaphore(_HANDED_OVER)
        self._lost_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="mqtt", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, packet: Packet) -> None:
        """Send now, or when there is a connection again. Never blocks."""
        self.outbox.put(packet)
        if not self.stopping.is_set():
            os.eventfd_write(self.wake, 1)

    def room(self, packet: Packet) -> int | None:
        """Bytes of payload that the broker takes with the rest of this packet; None is any number."""
        return None if self.largest is None else self.largest - _overhead(packet)

    async def stop(self, grace_s: float = 3.0) -> None:
        """Send what waits, disconnect, end the thread; what takes longer than `grace_s` is left."""
        self.stopping.set()
        os.eventfd_write(self.wake, 1)
        await asyncio.to_thread(self._thread.join, grace_s)
        if self._thread.is_alive():  # in a connect or a name look-up, which ends by itself
            log.warning("the connection to the broker did not end in %.0f s", grace_s)
        else:
            os.close(self.wake)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the event loop do something. Waits while it is behind: a flood then stays in the broker."""
        while not self._handed_over.acquire(timeout=1.0):
            if self.stopping.is_set():
                return
        try:
            self._loop.call_soon_threadsafe(self._handed, function, arguments)
        except RuntimeError:  # the loop is closed: nobody is there any more
            self.stopping.set()

    def _handed(self, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self._handed_over.release()
        function(*arguments)

    def subscribed(self) -> None:
        """The connection can be used."""
        away_s = None if self._lost_at is None else time.monotonic() - self._lost_at
        self._lost_at = None
        self.ready = True
        log.info("connected to %s", self.config.url)
        self.hand_over(self.handler.connected, away_s)

    def _run(self) -> None:
        while not self.stopping.is_set():
            connection = _Connection(self)
            try:
                connection.run()
            except (OSError, ConfigError) as error:
                connection.why = _explained(error)
            except Exception as error:  # a packet that paho cannot read is not worth the agent
                log.exception("the connection failed")
                connection.why = str(error)
            self.ready = False
            self.outbox.give_back(connection.unacknowledged.values())
            if not self.stopping.is_set():
                self._wait(connection)
        log.info("the connection to the broker has ended")

    def _wait(self, connection: "_Connection") -> None:
        now = time.monotonic()
        lasted_s = 0.0
        if connection.ready_at is not None:
            lasted_s, self._lost_at = now - connection.ready_at, now
        delay_s = self._backoff.next_s(lasted_s, connection.taken_over or self.rivalled)
        self.rivalled = False
        if connection.taken_over:
            self.hand_over(self.handler.rival)
        log.warning("%s: %s; the next attempt is in %.1f s", self.config.url, connection.why, delay_s)
        self.stopping.wait(delay_s)


def _explained(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _NOT_IN_ITS_TIME:
        now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        return f"{error.verify_message}; this board's clock says {now} UTC: is it set?"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the broker's certificate is not trusted: {error.verify_message}"
    return str(error)


class _Connection:
    """One connection, from CONNECT to its end; lives on the link's thread."""

    def __init__(self, link: BrokerLink) -> None:
        self.ready_at: float | None = None
        self.taken_over = False
        self.why = "the connection was lost"
        self.unacknowledged: dict[int, Queued] = {}
        self._link = link
        self._topics = (*link.topics, link.will.topic)
        self._qos, self._in_flight = link.config.qos, _IN_FLIGHT
        self._refusals: set[str] = set()
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, link.client_id, protocol=paho.MQTTv5, reconnect_on_failure=False
        )
        client.enable_logger(log.getChild("paho"))
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_subscribe, client.on_publish = self._on_subscribe, self._on_publish
        client.on_message = self._on_message
        client.will_set(link.will.topic, link.will.payload, self._qos, link.will.retain)

    def run(self) -> None:
        """Connect and serve until the connection ends, or until the link stops and everything is sent."""
        door = Door(self._link.config)
        if door.context:
            self._client.tls_set_context(door.context)
        self._client.username_pw_set(door.username, door.password)
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        properties.MaximumPacketSize = LARGEST_PACKET
        try:
            self._client.connect(
                door.host, door.port, self._link.config.keepalive_s, clean_start=True, properties=properties
            )
            self._serve()
        finally:
            if (sock := self._client.socket()) is not None:
                sock.close()

    def _serve(self) -> None:
        client, wake = self._client, self._link.wake
        deadline: float | None = None
        while True:
            if self.ready_at is not None:
                self._send_waiting()
            if self._link.stopping.is_set():
                deadline = deadline or time.monotonic() + 2.0
                if self._all_sent() or time.monotonic() > deadline:
                    client.disconnect()
                    return
            if (sock := client.socket()) is None:
                return
            watched: list[Any] = [sock, wake]
            undecoded = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
            timeout_s = 0.0 if undecoded else 0.1 if deadline else 1.0
            readable, writable, _ = select.select(watched, watched[: client.want_write()], [], timeout_s)
            if wake in readable:
                os.eventfd_read(wake)
            if undecoded or sock in readable:
                client.loop_read()
            if sock in writable:
                client.loop_write()
            client.loop_misc()

    def _all_sent(self) -> bool:
        nothing_to_do = self.ready_at is None or not len(self._link.outbox)
        return nothing_to_do and not self.unacknowledged and not self._client.want_write()

    def _send_waiting(self) -> None:
        while (
            len(self.unacknowledged) < self._in_flight
            and not self._client.want_write()
            and self._client.socket() is not None
            and (queued := self._link.outbox.take())
        ):
            packet = queued.packet
            if (room := self._link.room(packet)) is not None and len(packet.payload) > room:
                log.error("dropped a message on %s: the broker takes %d bytes of it", packet.topic, room)
                self._link.outbox.dropped += 1  # no event: it might be too large as well
                continue
            sent = self._client.publish(packet.topic, packet.payload, self._qos, packet.retain, _properties(packet))
            if self._qos:
                self.unacknowledged[sent.mid] = queued

    def _report(self, name: str, message: str) -> None:
        log.error("%s", message)
        self._link.hand_over(self._link.handler.trouble, name, message)

    # -- what paho calls, from loop_read -------------------------------------------------------------------------------

    def _on_connect(
        self,
        client: paho.Client,
        _data: Any,
        _flags: paho.ConnectFlags,
        code: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if code.is_failure:
            self.why = f"the broker refuses the connection: {code}"
            return
        self._link.connections += 1
        self._link.largest = getattr(properties, "MaximumPacketSize", None)
        self._in_flight = min(_IN_FLIGHT, getattr(properties, "ReceiveMaximum", _IN_FLIGHT))
        self._qos = min(self._qos, getattr(properties, "MaximumQoS", 2))
        # Retained as published: a retained command is told from a new one even when it comes in just now.
        options = SubscribeOptions(self._qos, retainAsPublished=True)
        wanted = [(topic, options) for topic in self._link.topics]
        client.subscribe([*wanted, (self._link.will.topic, SubscribeOptions(self._qos))])

    def _on_subscribe(
        self, _client: paho.Client, _data: Any, _mid: int, codes: list[ReasonCode], _properties: Properties | None
    ) -> None:
        for topic, code in zip(self._topics, codes, strict=False):
            if code.is_failure:
                self._report("refused", f"the broker refuses the subscription of {topic}: {code}")
        self.ready_at = time.monotonic()
        self._link.subscribed()

    def _on_disconnect(
        self, _client: paho.Client, _data: Any, flags: paho.DisconnectFlags, code: ReasonCode, _properties: Any
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self.taken_over = code.value == _TAKEN_OVER
            self.why = f"the broker disconnects: {code}"

    def _on_publish(self, _client: paho.Client, _data: Any, mid: int, code: ReasonCode, _properties: Any) -> None:
        queued = self.unacknowledged.pop(mid, None)
        if queued and code.is_failure and str(code) not in self._refusals:
            self._refusals.add(str(code))  # once for each reason: an answer has hundreds of packets
            self._report("refused", f"the broker refuses a message on {queued.packet.topic}: {code}")

    def _on_message(self, _client: paho.Client, _data: Any, message: paho.MQTTMessage) -> None:
        packet = Packet(
            topic=message.topic,
            payload=bytes(message.payload),
            retain=bool(message.retain),
            response_topic=getattr(message.properties, "ResponseTopic", None),
            correlation=getattr(message.properties, "CorrelationData", None),
        )
        self._link.hand_over(self._link.handler.received, packet)


def _properties(packet: Packet) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
    if packet.correlation is not None:
        properties.CorrelationData = packet.correlation
    if packet.user:
        properties.UserProperty = list(packet.user)
    return properties


def _overhead(packet: Packet) -> int:
    """Bytes of a PUBLISH beside its payload: header and length 5, topic 2 and its own, identifier 2, properties."""
    properties: bytes = _properties(packet).pack()  # type: ignore[no-untyped-call]
    return 9 + len(packet.topic.encode()) + len(properties)
