"""Between the transports and the engine: sessions, a bounded fair queue, limits per client, deadlines.

The event loop owns everything here but the engine. The engine runs in a thread of its own, and the two hand over in one
way each: commands through a queue, events by `call_soon_threadsafe`. Knows no bytes, and nothing of serial or MQTT.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from skerry import __version__
from skerry.config import Config
from skerry.conversation import Session, messages_of, repaired
from skerry.core import Event, Message, Reason, Request, Result, Role, Timings, Token, TokenCounts
from skerry.engine import Engine
from skerry.errors import CapacityError, SkerryError
from skerry.host import Host
from skerry.protocol import (
    Answer,
    Ask,
    Cancel,
    Code,
    Compact,
    GetLimits,
    GetSessions,
    GetStatus,
    Incoming,
    LimitsInForce,
    Ok,
    Outgoing,
    ProtocolError,
    Reload,
    Reset,
    SessionInfo,
    Sessions,
    Status,
    TokenText,
)

log = logging.getLogger(__name__)

_IDLE_PERIOD_S = 1.0
_CHARACTERS_PER_TOKEN = 8
"""More than any text has in the mean: a history longer than this times a slot's tokens cannot fit it."""


class Client(Protocol):
    """Who asks: a serial port, an MQTT reply topic. `send` is called on the event loop and must not block.

    name: limits count by it; scope: sessions are looked up in it; transport: fairness is between these.
    """

    name: str
    scope: str
    transport: str

    def send(self, message: Outgoing) -> None: ...


class EngineThread:
    """Runs the engine. `progress` grows with every step, and every second while there is nothing to do."""

    def __init__(self, engine: Engine, deliver: Callable[[list[Event]], None], loop: asyncio.AbstractEventLoop) -> None:
        self.progress = 0
        self._engine, self._deliver, self._loop = engine, deliver, loop
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something between two steps."""
        self._commands.put(command)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current step; False when it did not end in time."""
        self._commands.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the event loop do something; from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits for it any more
            log.debug("the event loop is gone")

    def _run(self) -> None:
        while True:
            try:
                while True:
                    command = self._commands.get(self._engine.idle, _IDLE_PERIOD_S)
                    if command is None:
                        return
                    command()
            except queue.Empty:
                pass
            if not self._engine.idle and (events := self._engine.step()):
                self.hand_over(self._deliver, events)
            self.progress += 1


class Pending:
    """A request from its arrival to its end."""

    def __init__(self, client: Client, ask: Ask, request_id: str, arrival: int, now: float) -> None:
        self.client, self.ask, self.id, self.arrival, self.added = client, ask, request_id, arrival, now
        self.number: int | None = None  # the engine's, once it is there
        self.begun = False
        self.waited_ms = 0.0
        self.end_early: Reason | None = None
        self.seq = 0
        self.timer: asyncio.TimerHandle | None = None


class Service:
    """See the module. All methods are for the event loop."""

    def __init__(self, engine: Engine, config: Config, host: Host, node: str, model: str) -> None:
        self.config = config
        self.node = node
        self.on_reload: Callable[[], tuple[str, ...]] | None = None
        self._engine, self._host, self._model = engine, host, model
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(engine, self._deliver, self._loop)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._waiting: list[Pending] = []
        self._begun: list[Pending] = []
        self._arrivals = itertools.count(1)
        self._served: dict[str, int] = {}  # transport or client -> when it was last served
        self._started = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._tokens_per_s = 0.0
        self._mean_answer_s = 5.0  # a guess until there are answers
        self._stopping = False
        self._ended = asyncio.Event()

    # -- what transports call ------------------------------------------------------------------------------------------

    def receive(self, client: Client, message: Incoming) -> None:
        """Serve a message; every reply goes to the client's `send`. Never raises."""
        try:
            match message:
                case Ask():
                    self._ask(client, message)
                case Cancel():
                    self._cancel(self._find(client, message.id), Reason.CANCELLED)
                case GetStatus():
                    client.send(self.status())
                case GetSessions():
                    client.send(self._list_sessions(client))
                case Reset():
                    client.send(self._reset(client, message.session))
                case GetLimits():
                    client.send(self._limits())
                case Compact():
                    raise ProtocolError(Code.UNAVAILABLE, "this model's conversations cannot be compacted")
                case Reload():
                    client.send(self.reload())
        except ProtocolError as error:
            if isinstance(message, Ask | Cancel):
                error.id = error.id or message.id or ""
            client.send(error.reply())

    def gone(self, client: Client) -> None:
        """A client that will not read its answers: end its requests."""
        for pending in [p for p in self._waiting + self._begun if p.client.name == client.name]:
            self._cancel(pending, Reason.CANCELLED)

    @property
    def state(self) -> str:
        """Of the status, without the cost of the rest."""
        return "stopping" if self._stopping else "busy" if self._waiting or self._begun else "idle"

    def status(self) -> Status:
        return Status(
            version=__version__,
            node=self.node,
            model=self._model,
            state=self.state,
            uptime_s=round(time.monotonic() - self._started, 1),
            waiting=len(self._waiting),
            answering=len(self._begun),
            slots=tuple(self._engine.used()),
            slot_tokens=self._engine.capacity,
            answered=self._counts["answered"],
            failed=self._counts["failed"],
            tokens_generated=self._counts["tokens"],
            tokens_per_s=self._tokens_per_s,
            memory={name.lower(): size for name, size in self._host.smaps_rollup().items() if name in _MEMORY},
        )

    # -- what the daemon calls -----------------------------------------------------------------------------------------

    @property
    def progress(self) -> int:
        """Grows while the engine is alive; for the watchdog."""
        return self._thread.progress

    def reload(self) -> Ok:
        """Read the configuration again. Raises ProtocolError with every problem; the old one then stays in force."""
        if self.on_reload is None:
            raise ProtocolError(Code.UNAVAILABLE, "there is no configuration to reload")
        try:
            return Ok(did="reload", notes=self.on_reload())
        except SkerryError as error:
            raise ProtocolError(Code.FAILED, f"the old configuration stays in force: {error}") from None

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, let answers finish for `drain_s`, end the rest, end the engine's thread."""
        self._stopping = True
        for pending in list(self._waiting):
            self._fail(pending, ProtocolError(Code.SHUTDOWN, "the service is stopping", "ask again later"))
        if self._begun:
            self._ended.clear()
            try:
                await asyncio.wait_for(self._ended.wait(), drain_s)
            except TimeoutError:
                for pending in list(self._begun):
                    self._cancel(pending, Reason.CANCELLED)
                try:
                    await asyncio.wait_for(self._ended.wait(), drain_s)
                except TimeoutError:
                    log.error("answers did not end in time")
        await asyncio.to_thread(self._thread.stop, drain_s)

    # -- requests ------------------------------------------------------------------------------------------------------

    def _ask(self, client: Client, ask: Ask) -> None:
        request_id = ask.id or f"r{next(self._arrivals)}"
        mine = [pending for pending in self._waiting + self._begun if pending.client.name == client.name]
        limits = self.config.service
        if self._stopping:
            raise ProtocolError(Code.SHUTDOWN, "the service is stopping", "ask again later", request_id)
        if ask.messages is not None:
            repaired(list(ask.messages))  # refuse now what could not be asked later
        if any(pending.id == request_id for pending in mine):
            raise ProtocolError(Code.DUPLICATE, f"request {request_id} is under way", "use another id", request_id)
        if len(mine) >= limits.per_client:
            raise self._busy(request_id, f"this client has {len(mine)} requests")
        if len(self._waiting) >= limits.queue:
            raise self._busy(request_id, f"{len(self._waiting)} requests are waiting")
        size = sum(len(m.content.encode(errors="replace")) for m in messages_of(ask))
        if size > limits.prompt_bytes:
            raise ProtocolError(
                Code.TOO_LARGE,
                f"the prompt has {size} bytes, the limit is {limits.prompt_bytes}",
                "shorten it",
                request_id,
            )
        pending = Pending(client, ask, request_id, next(self._arrivals), time.monotonic())
        if ask.deadline_s is not None:
            pending.timer = self._loop.call_later(ask.deadline_s, self._cancel, pending, Reason.DEADLINE)
        self._waiting.append(pending)
        self._begin_waiting()

    def _busy(self, request_id: str, why: str) -> ProtocolError:
        ahead = len(self._waiting) + len(self._begun)
        wait_s = max(1.0, self._mean_answer_s * ahead / self.config.arena.slots)
        return ProtocolError(Code.BUSY, f"busy: {why}", "", request_id, retry_after_s=round(wait_s, 1))

    def _begin_waiting(self) -> None:
        """Hand requests to the engine while it has free slots: in turn between transports, then between clients."""
        while len(self._begun) < self.config.arena.slots:
            eligible = [p for p in self._waiting if not ((session := self._session(p)) and session.busy)]
            if not eligible:
                return
            pending = min(
                eligible,
                key=lambda p: (self._served.get(p.client.transport, 0), self._served.get(p.client.name, 0), p.arrival),
            )
            turn = next(self._arrivals)
            self._served[pending.client.transport] = self._served[pending.client.name] = turn
            self._waiting.remove(pending)
            self._begun.append(pending)
            pending.begun = True
            pending.waited_ms = 1000 * (time.monotonic() - pending.added)
            if session := self._session(pending):
                session.busy = True
                session.turns.append(messages_of(pending.ask)[0])
                session.shorten(_CHARACTERS_PER_TOKEN * self._engine.capacity)
            self._thread.call(partial(self._add, pending, self._request(pending)))

    def _request(self, pending: Pending) -> Request:
        chat, ask = self.config.chat, pending.ask
        session = self._session(pending)
        turns = repaired(session.turns if session else messages_of(ask))
        if chat.system_prompt and turns[0].role != Role.SYSTEM:
            turns.insert(0, Message(Role.SYSTEM, chat.system_prompt))
        return Request(
            messages=tuple(turns),
            max_tokens=min(ask.max_tokens or chat.max_tokens, chat.max_tokens),
            sampling=ask.sampling or self.config.sampling,
            stop=chat.stop if ask.stop is None else ask.stop,
        )

    def _add(self, pending: Pending, request: Request) -> None:
        """On the engine's thread."""
        try:
            pending.number = self._engine.add(request)
        except CapacityError as error:
            self._thread.hand_over(self._fail, pending, ProtocolError(Code.TOO_LARGE, error.message, error.hint))
        except SkerryError as error:
            self._thread.hand_over(self._fail, pending, ProtocolError(Code.BAD_MESSAGE, error.message, error.hint))
        except Exception as error:
            log.exception("a request could not be added")
            self._thread.hand_over(self._fail, pending, ProtocolError(Code.FAILED, str(error)))
        else:
            if pending.end_early:
                self._engine.cancel(pending.number, pending.end_early)

    def _find(self, client: Client, request_id: str) -> Pending:
        for pending in self._waiting + self._begun:
            if pending.id == request_id and pending.client.name == client.name:
                return pending
        raise ProtocolError(Code.UNKNOWN, f"no request {request_id} is under way", "", request_id)

    def _cancel(self, pending: Pending, reason: Reason) -> None:
        if pending in self._waiting:
            self._waiting.remove(pending)
            waited = round(1000 * (time.monotonic() - pending.added), 3)
            times = Timings(queue=waited, total=waited)
            self._finish(pending, Result("", reason, "cold", False, False, TokenCounts(), times))
        elif pending in self._begun and pending.end_early is None:
            pending.end_early = reason
            self._thread.call(partial(self._end_early, pending, reason))

    def _end_early(self, pending: Pending, reason: Reason) -> None:
        """On the engine's thread."""
        if pending.number is not None:
            self._engine.cancel(pending.number, reason)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            pending = next((p for p in self._begun if p.number == event.request), None)
            if pending is None:
                continue
            if isinstance(event, Token):
                if pending.ask.stream:
                    pending.client.send(TokenText(id=pending.id, seq=pending.seq, text=event.text))
                pending.seq += 1
            else:
                result = _with_wait(event.result, pending.waited_ms)
                if event.error:
                    self._fail(pending, ProtocolError(Code.FAILED, event.error), result)
                else:
                    self._finish(pending, result)

    def _finish(self, pending: Pending, result: Result) -> None:
        self._close(pending, result)
        self._count(result)
        pending.client.send(Answer(id=pending.id, session=pending.ask.session, result=result))
        self._log(pending, str(result.reason), result)
        self._begin_waiting()

    def _fail(self, pending: Pending, error: ProtocolError, result: Result | None = None) -> None:
        error.id = pending.id
        self._close(pending, result)
        self._counts["failed"] += 1
        pending.client.send(error.reply())
        self._log(pending, f"error: {error.message}", result)
        if not self._stopping:
            self._begin_waiting()

    def _close(self, pending: Pending, result: Result | None) -> None:
        if pending.timer:
            pending.timer.cancel()
        for requests in (self._waiting, self._begun):
            if pending in requests:
                requests.remove(pending)
        # Who has nothing under way has no turn to keep: the table stays as small as the queue.
        alive = {name for p in self._waiting + self._begun for name in (p.client.name, p.client.transport)}
        self._served = {name: turn for name, turn in self._served.items() if name in alive}
        if pending.begun and (session := self._session(pending)):
            session.busy = False
            session.last_used = time.monotonic()
            if result and result.text:
                session.turns.append(Message(Role.ASSISTANT, result.text))
            elif session.turns and session.turns[-1].role == Role.USER:
                session.turns.pop()  # nothing came of it: as if it had not been asked
        if not self._begun:
            self._ended.set()

    def _count(self, result: Result) -> None:
        self._counts["answered"] += 1
        self._counts["tokens"] += result.tokens.generated
        seconds = (result.timings_ms.total - result.timings_ms.first) / 1000
        if result.tokens.generated > 1 and seconds > 0:
            self._tokens_per_s = round((result.tokens.generated - 1) / seconds, 2)
        self._mean_answer_s += 0.2 * (result.timings_ms.total / 1000 - self._mean_answer_s)

    def _log(self, pending: Pending, outcome: str, result: Result | None) -> None:
        """One line for each request; what people say only where the configuration wants it."""
        tokens, times = (result.tokens, result.timings_ms) if result else (TokenCounts(), Timings())
        line = (
            f"request {pending.id} of {pending.client.name}: {outcome}; tokens {tokens.prompt} prompt, "
            f"{tokens.reused} reused, {tokens.generated} generated; {times.first:.0f} ms to the first, "
            f"{times.total:.0f} ms in all"
        )
        if self.config.service.log_text:
            line += f"; asked {messages_of(pending.ask)[-1].content!r}; answered {result.text if result else ''!r}"
        log.info("%s", line)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def _session(self, pending: Pending) -> Session | None:
        """The session of a request, made when it is new; the oldest idle one makes room for it."""
        if pending.ask.session is None:
            return None
        key = pending.client.scope, pending.ask.session
        if key not in self._sessions:
            idle = [k for k, session in self._sessions.items() if not session.busy]
            if len(self._sessions) >= self.config.service.sessions and idle:
                del self._sessions[min(idle, key=lambda k: self._sessions[k].last_used)]
            self._sessions[key] = Session(time.monotonic())
        return self._sessions[key]

    def _list_sessions(self, client: Client) -> Sessions:
        now = time.monotonic()
        return Sessions(
            sessions=tuple(
                SessionInfo(
                    session=name, turns=len(s.turns), characters=s.characters, idle_s=round(now - s.last_used, 1)
                )
                for (scope, name), s in self._sessions.items()
                if scope == client.scope
            )
        )

    def _reset(self, client: Client, name: str | None) -> Ok:
        found = [key for key in self._sessions if key[0] == client.scope and name in (None, key[1])]
        if name is not None and not found:
            raise ProtocolError(Code.UNKNOWN, f"there is no session {name}")
        if busy := [key[1] for key in found if self._sessions[key].busy]:
            raise ProtocolError(Code.UNAVAILABLE, f"session {busy[0]} is being answered", "cancel it first")
        for key in found:
            del self._sessions[key]
        return Ok(did="reset", notes=tuple(key[1] for key in found))

    def _limits(self) -> LimitsInForce:
        limits = self.config.service
        return LimitsInForce(
            max_tokens=self.config.chat.max_tokens,
            slot_tokens=self._engine.capacity,
            slots=self.config.arena.slots,
            queue=limits.queue,
            per_client=limits.per_client,
            prompt_bytes=limits.prompt_bytes,
        )


_MEMORY = ("Rss", "Pss", "Anonymous", "Locked", "Swap")


def _with_wait(result: Result, waited_ms: float) -> Result:
    """The engine counts from the moment that it got the request; the client counts from when it asked."""
    times = result.timings_ms
    later = {name: round(getattr(times, name) + waited_ms, 3) for name in ("queue", "first", "total")}
    if not times.first:
        del later["first"]
    return msgspec.structs.replace(result, timings_ms=msgspec.structs.replace(times, **later))
