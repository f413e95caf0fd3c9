"""The service between clients and the engine: fairness, limits, sessions, deadlines, an orderly end."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from skerry import config
from skerry.config import Config
from skerry.conversation import repaired
from skerry.core import Message, Reason, Role
from skerry.daemon import build_engine
from skerry.host import Host
from skerry.protocol import (
    Answer,
    Ask,
    Cancel,
    Code,
    Compact,
    Error,
    GetLimits,
    GetSessions,
    GetStatus,
    LimitsInForce,
    Ok,
    Outgoing,
    ProtocolError,
    Reload,
    Reset,
    Sessions,
    Status,
    TokenText,
    to_line,
)
from skerry.service import Service


class Desk:
    """A client that keeps what it is sent."""

    def __init__(self, name: str, transport: str = "serial") -> None:
        self.name = self.scope = f"{transport}:{name}"
        self.transport = transport
        self.got: list[Outgoing] = []

    def send(self, message: Outgoing) -> None:
        to_line(message)
        self.got.append(message)

    def end_of(self, request_id: str) -> Answer | Error | None:
        return next((m for m in self.got if isinstance(m, Answer | Error) and m.id == request_id), None)

    async def end(self, request_id: str) -> Answer | Error:
        async with asyncio.timeout(60):
            while (found := self.end_of(request_id)) is None:
                await asyncio.sleep(0.005)
        return found

    async def result(self, request_id: str):
        end = await self.end(request_id)
        assert isinstance(end, Answer), end
        return end.result


def run(model: Path, test: Callable[[Service], Awaitable[None]], **sections) -> None:
    """Run a test against a service over the tiny model, then stop it and look at its engine."""
    base = Config(
        model=config.Model(path=str(model), threads=1, spin=False, prepack=False),
        arena=config.Arena(slots=2, max_tokens=256, lock=False),
        chat=config.Chat(max_tokens=12),
        service=config.Service(queue=4, per_client=3, sessions=3, prompt_bytes=2000),
    )
    wanted = msgspec.structs.replace(base, **sections)
    engine = build_engine(wanted, Host())

    async def main() -> None:
        service = Service(engine, wanted, Host(), "node", "tiny")
        try:
            async with asyncio.timeout(120):
                await test(service)
        finally:
            await service.stop(10)

    asyncio.run(main())
    engine.check_integrity()
    assert engine.idle
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


LONG = config.Chat(max_tokens=4000)
SLOW = {"chat": LONG, "arena": config.Arena(slots=1, max_tokens=4000, lock=False)}
"""One slot, and answers that do not end by themselves while a test looks."""


def test_an_answer_streams_and_ends(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, Ask(id="q", text="Hello?"))
        result = await desk.result("q")
        pieces = [m for m in desk.got if isinstance(m, TokenText)]
        assert [piece.seq for piece in pieces] == list(range(len(pieces)))
        assert "".join(piece.text for piece in pieces) == result.text
        assert result.tokens.generated == 12 and result.reason == Reason.LENGTH
        service.receive(desk, Ask(text="Hello?", stream=False))
        while len([m for m in desk.got if isinstance(m, Answer)]) < 2:
            await asyncio.sleep(0.01)
        assert len([m for m in desk.got if isinstance(m, TokenText)]) == len(pieces)

    run(tiny_model, test)


def test_each_of_many_clients_gets_its_own_answer(tiny_model: Path) -> None:
    questions = {f"c{i}": f"{'word ' * i} number {i}" for i in range(4)}
    alone: dict[str, str] = {}

    async def one_by_one(service: Service) -> None:
        for name, text in questions.items():
            desk = Desk(name)
            service.receive(desk, Ask(id="q", text=text))
            alone[name] = (await desk.result("q")).text

    async def at_once(service: Service) -> None:
        desks = [Desk(name, "mqtt" if i % 2 else "serial") for i, name in enumerate(questions)]
        for desk, text in zip(desks, questions.values(), strict=True):
            service.receive(desk, Ask(id="q", text=text))
        for desk, name in zip(desks, questions, strict=True):
            assert (await desk.result("q")).text == alone[name]

    run(tiny_model, one_by_one)
    run(tiny_model, at_once)
    run(tiny_model, at_once, arena=config.Arena(slots=4, max_tokens=256, lock=False))


def test_a_session_remembers_and_others_do_not_see_it(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        one, other = Desk("one"), Desk("other")
        service.receive(one, Ask(id="1", text="My name is Bo.", session="s"))
        first = await one.result("1")
        service.receive(one, Ask(id="2", text="What is my name?", session="s"))
        second = await one.result("2")
        assert second.tokens.prompt > first.tokens.prompt and second.tokens.reused >= first.tokens.prompt
        service.receive(other, Ask(id="1", text="What is my name?", session="s"))
        assert (await other.result("1")).tokens.prompt < second.tokens.prompt
        for desk in (one, other):
            service.receive(desk, GetSessions())
        listed = [m for desk in (one, other) for m in desk.got if isinstance(m, Sessions)]
        assert [[s.turns for s in message.sessions] for message in listed] == [[4], [2]]
        service.receive(one, Reset(session="s"))
        assert one.got[-1] == Ok(did="reset", notes=("s",))
        service.receive(one, Reset(session="s"))
        assert isinstance(one.got[-1], Error) and one.got[-1].code == Code.UNKNOWN

    run(tiny_model, test)


def test_questions_of_one_session_wait_for_each_other(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        for i in range(3):
            service.receive(desk, Ask(id=f"q{i}", text=f"question {i}", session="s"))
        prompts = [(await desk.result(f"q{i}")).tokens.prompt for i in range(3)]
        assert prompts == sorted(prompts) and len(set(prompts)) == 3

    run(tiny_model, test)


def test_the_oldest_idle_session_makes_room(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        for i in range(5):
            service.receive(desk, Ask(id=f"q{i}", text="hello", session=f"s{i}"))
            await desk.result(f"q{i}")
        service.receive(desk, GetSessions())
        (listed,) = [m for m in desk.got if isinstance(m, Sessions)]
        assert [s.session for s in listed.sessions] == ["s2", "s3", "s4"]

    run(tiny_model, test)


def test_limits_answer_busy_and_say_when_to_retry(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        greedy, others = Desk("greedy"), [Desk(f"d{i}", "mqtt") for i in range(6)]
        for i in range(5):
            service.receive(greedy, Ask(id=f"q{i}", text="hello"))
        refused = [m for m in greedy.got if isinstance(m, Error)]
        assert [(m.id, m.code) for m in refused] == [("q3", Code.BUSY), ("q4", Code.BUSY)]
        assert all(m.retry_after_s and m.retry_after_s >= 1 for m in refused)
        for desk in others:
            service.receive(desk, Ask(id="q", text="hello"))
        busy = [desk for desk in others if desk.got and isinstance(desk.got[0], Error)]
        assert len(busy) == 4  # one runs, four wait: greedy's other two and two of these
        for desk in [greedy, *others]:
            service.gone(desk)

    run(tiny_model, test, **SLOW)


def test_transports_and_clients_take_turns(tiny_model: Path) -> None:
    order: list[str] = []

    class Noted(Desk):
        def send(self, message: Outgoing) -> None:
            super().send(message)
            if isinstance(message, Answer):
                order.append(f"{self.name}/{message.id}")

    async def test(service: Service) -> None:
        loud, quiet, far = Noted("loud"), Noted("quiet"), Noted("far", "mqtt")
        for i in range(3):
            service.receive(loud, Ask(id=f"{i}", text="hello"))
        service.receive(quiet, Ask(id="0", text="hello"))
        service.receive(far, Ask(id="0", text="hello"))
        await asyncio.gather(loud.result("2"), quiet.result("0"), far.result("0"))

    one_slot = config.Arena(slots=1, max_tokens=256, lock=False)
    run(tiny_model, test, arena=one_slot, chat=config.Chat(max_tokens=4))
    assert order == ["serial:loud/0", "mqtt:far/0", "serial:quiet/0", "serial:loud/1", "serial:loud/2"]


def test_cancel_ends_a_request_wherever_it_is(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, Ask(id="runs", text="hello"))
        service.receive(desk, Ask(id="waits", text="hello"))
        while not any(isinstance(m, TokenText) for m in desk.got):
            await asyncio.sleep(0.005)
        service.receive(desk, Cancel(id="waits"))
        service.receive(desk, Cancel(id="runs"))
        service.receive(desk, Cancel(id="runs"))
        waits, runs = await desk.result("waits"), await desk.result("runs")
        assert waits.reason == runs.reason == Reason.CANCELLED
        assert waits.text == "" and runs.text != ""
        service.receive(desk, Cancel(id="runs"))
        assert isinstance(desk.got[-1], Error) and desk.got[-1].code == Code.UNKNOWN and desk.got[-1].id == "runs"
        other = Desk("b")
        service.receive(desk, Ask(id="mine", text="hello"))
        service.receive(other, Cancel(id="mine"))
        assert isinstance(other.got[-1], Error)
        service.gone(desk)
        assert (await desk.result("mine")).reason == Reason.CANCELLED

    run(tiny_model, test, **SLOW)


def test_a_deadline_ends_a_request_wherever_it_is(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, Ask(id="runs", text="hello", deadline_s=0.3))
        service.receive(desk, Ask(id="waits", text="hello", deadline_s=0.1))
        waits, runs = await desk.result("waits"), await desk.result("runs")
        assert waits.reason == runs.reason == Reason.DEADLINE
        assert waits.tokens.generated == 0 and runs.tokens.generated > 0

    run(tiny_model, test, **SLOW)


def test_a_cancelled_answer_leaves_a_conversation_that_can_go_on(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        for i, moment in enumerate((0, 3)):  # before anything was said, and in the middle
            service.receive(desk, Ask(id=f"q{i}", text="hello", session="s"))
            while len([m for m in desk.got if isinstance(m, TokenText) and m.id == f"q{i}"]) < moment:
                await asyncio.sleep(0.005)
            service.receive(desk, Cancel(id=f"q{i}"))
            await desk.result(f"q{i}")
        service.receive(desk, Ask(id="last", text="go on", session="s", max_tokens=4))
        assert (await desk.result("last")).tokens.generated == 4

    run(tiny_model, test, **SLOW)


@pytest.mark.parametrize(
    ("ask", "code"),
    [
        (Ask(id="x", text="word " * 500), Code.TOO_LARGE),
        (Ask(id="x", messages=()), Code.BAD_MESSAGE),
        (Ask(id="x", messages=(Message(Role.ASSISTANT, "hello"),)), Code.BAD_MESSAGE),
        (Ask(id="x", messages=(Message(Role.USER, "a"), Message(Role.ASSISTANT, "b"))), Code.BAD_MESSAGE),
        (Ask(id="x", text="~" * 1000), Code.TOO_LARGE),
    ],
)
def test_what_cannot_be_asked_is_one_error_and_the_next_one_works(tiny_model: Path, ask: Ask, code: Code) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, ask)
        end = await desk.end("x")
        assert isinstance(end, Error) and end.code == code
        service.receive(desk, Ask(id="next", text="hello"))
        assert (await desk.result("next")).tokens.generated == 12

    run(tiny_model, test)


def test_an_id_under_way_is_refused(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        for _ in range(2):
            service.receive(desk, Ask(id="q", text="hello"))
        (error,) = [m for m in desk.got if isinstance(m, Error)]
        assert error.code == Code.DUPLICATE
        service.gone(desk)

    run(tiny_model, test, **SLOW)


def test_status_limits_and_what_is_not_there(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, Ask(id="q", text="hello"))
        await desk.result("q")
        for message in (GetStatus(), GetLimits(), Compact(), Reload()):
            service.receive(desk, message)
        status, limits, compact, reload = desk.got[-4:]
        assert isinstance(status, Status) and status.answered == 1 and status.tokens_generated == 12
        assert status.state == "idle" and max(status.slots) > 0 and status.memory["rss"] > 0
        assert isinstance(limits, LimitsInForce) and limits.max_tokens == 12 and limits.slot_tokens == 256
        assert isinstance(compact, Error) and compact.code == Code.UNAVAILABLE
        assert isinstance(reload, Error) and reload.code == Code.UNAVAILABLE

    run(tiny_model, test)


def test_stopping_refuses_new_work_and_finishes_the_old(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk, late = Desk("a"), Desk("b")
        service.receive(desk, Ask(id="runs", text="hello"))
        service.receive(desk, Ask(id="waits", text="hello"))
        stopping = asyncio.create_task(service.stop(30))
        await asyncio.sleep(0)
        service.receive(late, Ask(id="late", text="hello"))
        assert isinstance(late.got[0], Error) and late.got[0].code == Code.SHUTDOWN
        await stopping
        waits = desk.end_of("waits")
        assert isinstance(waits, Error) and waits.code == Code.SHUTDOWN
        assert (await desk.result("runs")).reason == Reason.LENGTH

    run(tiny_model, test, arena=config.Arena(slots=1, max_tokens=256, lock=False))


def test_stopping_does_not_wait_for_ever(tiny_model: Path) -> None:
    async def test(service: Service) -> None:
        desk = Desk("a")
        service.receive(desk, Ask(id="runs", text="hello"))
        await service.stop(0.2)
        assert (await desk.result("runs")).reason == Reason.CANCELLED

    run(tiny_model, test, **SLOW)


U, A, S = Role.USER, Role.ASSISTANT, Role.SYSTEM


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ([(U, "a")], [(U, "a")]),
        ([(U, "a"), (U, "b")], [(U, "a\n\nb")]),
        ([(A, "x"), (U, "a")], [(U, "a")]),
        ([(U, "a"), (S, "s"), (A, "x"), (A, "y"), (U, "b")], [(S, "s"), (U, "a"), (A, "x\n\ny"), (U, "b")]),
        ([(S, "s"), (S, "t"), (U, "a")], [(S, "s\n\nt"), (U, "a")]),
    ],
)
def test_conversations_are_repaired(said, asked) -> None:
    assert repaired([Message(*m) for m in said]) == [Message(*m) for m in asked]


@pytest.mark.parametrize("said", [[], [(A, "x")], [(S, "s")], [(U, "a"), (A, "x")]])
def test_a_conversation_without_a_question_is_refused(said) -> None:
    with pytest.raises(ProtocolError):
        repaired([Message(*m) for m in said])
