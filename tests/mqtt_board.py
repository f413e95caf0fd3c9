"""A board for tests: a service over a tiny model with its MQTT transport, and a client of the broker.

python -m tests.mqtt_board MODEL URL: a board in a process of its own, to be killed.
"""

import asyncio
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from skerry import config
from skerry.arena import Arena, Layout
from skerry.decoder import Decoder
from skerry.engine import Engine
from skerry.host import Host
from skerry.modelfile import ModelFolder
from skerry.service import Service
from skerry.session import Sessions
from skerry.text import Text
from skerry.transport.broker import Backoff
from skerry.transport.mqtt import MqttTransport

NODE = "rock"
SLOTS = 2
TIMEOUT_S = 20.0


def tiny_engine(folder: Path, dictate: str | None = None) -> Engine:
    """An engine over a tiny model; with `dictate`, its answers are this text."""
    model = ModelFolder(folder)
    tokens = model.manifest.tokens
    text = Text(folder, tokens.end, tokens.bos, tokens.add_bos)
    slots = SLOTS if dictate is None else 1
    layout = Layout(model.manifest.geometry, model.manifest.groups, slots, 4096)
    decoder = Decoder(
        model, Sessions(model, Host(), f32=False, threads=1, spin=False, cache_dir=None), Arena(layout, lock=False)
    )
    decoder.warm_up()
    if dictate is not None:
        decoder = Dictated(decoder, [*text.encode(dictate), tokens.end[0]])
    return Engine(decoder, text)


class Dictated:
    """A real decoder of one slot whose logits are bent to say the given tokens."""

    def __init__(self, decoder: Decoder, ids: list[int]) -> None:
        self._decoder, self._ids, self._next = decoder, ids, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def prefill(self, slot: int, tokens: Any, logits: int = 1) -> Any:
        self._next = 0
        return self._bent(self._decoder.prefill(slot, tokens, logits)) if logits else None

    def decode(self, *arguments: Any) -> Any:
        return self._bent(self._decoder.decode(*arguments))

    def _bent(self, logits: Any) -> Any:
        bent = np.zeros_like(logits)
        bent[..., self._ids[self._next]] = 1
        self._next += 1
        return bent


class Stepwise:
    """An engine that does only the steps it is allowed; after `go` it is free."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._left, self._changed = engine, float(steps), threading.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def go(self) -> None:
        with self._changed:
            self._left = math.inf
            self._changed.notify()

    def step(self) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._left > 0, TIMEOUT_S), "the test does not go on"
            self._left -= 1
        return self._engine.step()


class Board:
    """A board on an event loop in a thread of its own. What its loop or thread let escape fails the test."""

    def __init__(self, engine: Any, mqtt: config.Mqtt, node: str = NODE, **more: Any) -> None:
        """more: `host`, `backoff`, and the configuration's `service` and `chat`."""
        self._host = more.pop("host", Host(Path("/nowhere")))
        self._backoff = more.pop("backoff", None) or Backoff(first_s=0.1, longest_s=0.5, rival_s=0.5)
        arena = config.Arena(slots=engine._arena.layout.slots, max_tokens=engine.capacity)
        self._config = config.Config(arena=arena, mqtt=mqtt, **more)
        self._engine, self._node = engine, node
        self._begun = threading.Event()
        self._escaped: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="board")

    def __enter__(self) -> "Board":
        self._thread.start()
        assert self._begun.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        assert not self._escaped

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    @property
    def state(self) -> str:
        return self._service.state

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(lambda _loop, context: self._escaped.append(context))
        self._service = service = Service(self._engine, self._config, self._host, self._node, "tiny")
        transport = MqttTransport(self._config.mqtt, service, self._host, self._backoff)
        transport.start()
        self._begun.set()
        await self._end.wait()
        await service.stop(5.0)
        await transport.stop()


class Got(NamedTuple):
    topic: str
    payload: bytes
    retain: bool
    correlation: bytes | None
    user: dict[str, str]

    @property
    def message(self) -> dict[str, Any]:
        return json.loads(self.payload.decode())  # strictly UTF-8


class Peer:
    """A client of the broker, with paho's own reconnecting switched off."""

    def __init__(
        self,
        port: int,
        *topics: str,
        client_id: str = "",
        user: str = "",
        will: tuple[str, str] | None = None,
        keep_s: int = 0,
        **tls: str,
    ) -> None:
        """will: topic and retained payload; keep_s: how long the broker keeps the session while this client is away."""
        self._got: queue.SimpleQueue[Got] = queue.SimpleQueue()
        self._subscribed, self.ended = threading.Event(), threading.Event()
        self._topics, self._port = topics, port
        self._properties = Properties(PacketTypes.CONNECT)
        self._properties.SessionExpiryInterval = keep_s
        self._client = client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5, reconnect_on_failure=False
        )
        if user:
            client.username_pw_set(user, f"{user}-secret")
        if will:
            client.will_set(*will, qos=1, retain=True)
        if tls:
            client.tls_set(**tls)
        client.on_connect = lambda *_: client.subscribe([(topic, 1) for topic in topics or ("nothing",)])
        client.on_subscribe = lambda *_: self._subscribed.set()
        client.on_message = self._on_message
        client.on_disconnect = lambda *_: self.ended.set()
        self.connect(clean=True)

    def connect(self, clean: bool = False) -> None:
        """Connect again; without `clean` to the session that the broker kept."""
        self._client.loop_stop()  # its thread may not be quite at its end
        self._subscribed.clear()
        self.ended.clear()
        self._client.connect("127.0.0.1", self._port, clean_start=clean, properties=self._properties)
        self._client.loop_start()
        assert self._subscribed.wait(TIMEOUT_S)

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()

    def _on_message(self, _client: Any, _data: Any, message: paho.MQTTMessage) -> None:
        properties = message.properties
        self._got.put(
            Got(
                message.topic,
                message.payload,
                message.retain,
                getattr(properties, "CorrelationData", None),
                dict(getattr(properties, "UserProperty", [])),
            )
        )

    def publish(
        self, topic: str, message: Any, to: str | None = None, correlation: bytes | None = None, retain: bool = False
    ) -> None:
        """Publish a dict as JSON, or text, or bytes; `to` is the response topic."""
        properties = Properties(PacketTypes.PUBLISH)
        if to is not None:
            properties.ResponseTopic = to
        if correlation is not None:
            properties.CorrelationData = correlation
        payload = json.dumps(message) if isinstance(message, dict) else message
        self._client.publish(topic, payload, 1, retain, properties).wait_for_publish(TIMEOUT_S)

    def ask(self, message: dict[str, Any], to: str | None = None, **options: Any) -> None:
        self.publish(f"skerry/{NODE}/ask", {"type": "ask", **message}, to, **options)

    def messages(self) -> Iterator[Got]:
        """As they come; fails when none comes for long."""
        while True:
            try:
                yield self._got.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise AssertionError("nothing comes") from None

    def wait(self, wanted: Callable[[Got], bool]) -> Got:
        """The first message that is wanted; the others before it are lost."""
        return next(got for got in self.messages() if wanted(got))

    def online(self, node: str = NODE) -> Got:
        """Wait until a board says that it listens; the status topic must be subscribed."""
        return self.wait(lambda got: got.topic == f"skerry/{node}/status" and got.message["state"] != "offline")

    def event(self, name: str) -> dict[str, Any]:
        return self.wait(lambda got: got.topic.endswith("/event") and got.message["event"] == name).message

    def answer(self, request_id: str) -> list[Got]:
        """Everything about a request until its end."""
        found = []
        for got in self.messages():
            if got.topic.endswith(("/ask", "/cancel")):  # what clients say
                continue
            message = got.message
            if message.get("id") == request_id:
                found.append(got)
                if message["type"] in ("done", "error"):
                    return found
        raise AssertionError("no end")


def text_of(answer: list[Got]) -> str:
    """The text of a streamed answer, checked against its pieces."""
    *pieces, end = [got.message for got in answer]
    assert end["type"] == "done", end
    assert [piece["seq"] for piece in pieces] == list(range(len(pieces)))
    assert "".join(piece["text"] for piece in pieces) == end["result"]["text"]
    return str(end["result"]["text"])


if __name__ == "__main__":
    with Board(tiny_engine(Path(sys.argv[1])), config.Mqtt(url=sys.argv[2])):
        while True:
            time.sleep(1)
