"""What waits to be sent to the broker: a bounded queue that drops what can be missed. Knows no MQTT and no messages."""

import threading
from collections import deque
from collections.abc import Iterable
from enum import IntEnum

from msgspec import Struct

_TRIES = 3  # connections that may end while a packet is unacknowledged, before it is taken for the cause


class Weight(IntEnum):
    """What is dropped first when the queue is full."""

    PIECE = 0  # of an answer whose end carries the whole text
    REPORT = 1
    REPLY = 2  # never


class Packet(Struct, frozen=True, kw_only=True):
    """One PUBLISH, incoming or outgoing."""

    topic: str
    payload: bytes
    retain: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None
    user: tuple[tuple[str, str], ...] = ()
    weight: Weight = Weight.REPLY


class Queued:
    """A packet that waits, and how often a connection ended before it was acknowledged."""

    def __init__(self, packet: Packet) -> None:
        self.packet = packet
        self.tries = 0


class Outbox:
    """What waits to be sent, about `limit` packets. Any thread.

    When it is full, the oldest piece of an answer is dropped, else the oldest report. Replies are never dropped: they
    may go beyond the limit, by as many as there are requests under way, when no question is taken while it is `full`.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._waiting: deque[Queued] = deque()
        self._replies = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """Whether replies alone reach the limit."""
        return self._replies >= self._limit

    def put(self, packet: Packet) -> None:
        with self._lock:
            self._waiting.append(Queued(packet))
            self._replies += packet.weight == Weight.REPLY
            self._shrink()

    def take(self) -> Queued | None:
        with self._lock:
            if not self._waiting:
                return None
            queued = self._waiting.popleft()
            self._replies -= queued.packet.weight == Weight.REPLY
            return queued

    def give_back(self, unacknowledged: Iterable[Queued]) -> None:
        """To the front, in their order; those that were tried too often are dropped."""
        with self._lock:
            for queued in reversed(list(unacknowledged)):
                queued.tries += 1
                if queued.tries < _TRIES:
                    self._waiting.appendleft(queued)
                    self._replies += queued.packet.weight == Weight.REPLY
                else:
                    self.dropped += 1
            self._shrink()

    def _shrink(self) -> None:
        for weight in (Weight.PIECE, Weight.REPORT):
            while len(self._waiting) > self._limit:
                found = next((i for i, queued in enumerate(self._waiting) if queued.packet.weight == weight), None)
                if found is None:
                    break
                del self._waiting[found]
                self.dropped += 1
