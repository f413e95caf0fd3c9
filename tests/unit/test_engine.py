"""The engine over a tiny real model: what it promises to whoever feeds it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from skerry.arena import Arena, Layout
from skerry.core import Done, Message, Reason, Request, Result, Role, Sampling, Token
from skerry.decoder import Decoder
from skerry.engine import Engine
from skerry.errors import CapacityError, RequestError
from skerry.host import Host
from skerry.modelfile import ModelFolder
from skerry.session import Sessions
from skerry.text import Text


def build(folder: Path, slots: int = 1, max_tokens: int = 256) -> Engine:
    model = ModelFolder(folder)
    layout = Layout(model.manifest.geometry, model.manifest.groups, slots, max_tokens)
    sessions = Sessions(model, Host(), f32=False, threads=1, spin=False, cache_dir=None)
    decoder = Decoder(model, sessions, Arena(layout, lock=False))
    decoder.warm_up()
    tokens = model.manifest.tokens
    return Engine(decoder, Text(folder, tokens.end, tokens.bos, tokens.add_bos))


@pytest.fixture
def engine(tiny_model: Path):
    engine = build(tiny_model)
    yield engine
    engine.check_integrity()


def user(text: str, **options) -> Request:
    return Request((Message(Role.USER, text),), **{"max_tokens": 20, **options})


def run(engine: Engine, numbers: Sequence[int]) -> dict[int, Result]:
    """Step until the requests are done; checks that the streamed pieces are the text of the result."""
    pieces: dict[int, list[str]] = {number: [] for number in numbers}
    results: dict[int, Result] = {}
    for _ in range(10_000):
        for event in engine.step():
            if isinstance(event, Token):
                pieces[event.request].append(event.text)
            else:
                assert event.request not in results
                results[event.request] = event.result
                assert "".join(pieces[event.request]) == event.result.text
        if len(results) == len(numbers):
            return results
    raise AssertionError("the engine does not come to an end")


def ask(engine: Engine, request: Request) -> Result:
    number = engine.add(request)
    return run(engine, [number])[number]


def test_the_same_question_has_the_same_answer(engine: Engine) -> None:
    first = ask(engine, user("Where does the sea end?"))
    second = ask(engine, user("Where does the sea end?"))
    assert first.text == second.text and first.tokens.generated == 20 and first.reason == Reason.LENGTH
    assert first.tier == "cold" and first.tokens.reused == 0
    assert second.tier == "prefix" and second.tokens.reused == second.tokens.prompt - 1


def test_a_conversation_that_goes_on_is_not_computed_again(engine: Engine) -> None:
    turns = [Message(Role.SYSTEM, "You are brief."), Message(Role.USER, "Hello there.")]
    first = ask(engine, Request(tuple(turns), max_tokens=8))
    turns += [Message(Role.ASSISTANT, first.text), Message(Role.USER, "And now?")]
    second = ask(engine, Request(tuple(turns), max_tokens=8))
    assert second.tokens.reused >= first.tokens.prompt


def test_many_requests_at_once_answer_as_alone(tiny_model: Path) -> None:
    questions = [f"{'word ' * (3 * i)} number {i}?" for i in range(9)]
    alone = [ask(build(tiny_model), user(question)).text for question in questions]
    for slots in (1, 2, 4):
        engine = build(tiny_model, slots)
        numbers = [engine.add(user(question)) for question in questions]
        results = run(engine, numbers)
        engine.check_integrity()
        assert [results[number].text for number in numbers] == alone
        assert engine.idle


def test_a_prompt_beyond_the_capacity_is_one_clear_error_and_the_next_one_works(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="tokens, a conversation holds 256"):
        engine.add(user("word " * 400))
    assert engine.idle
    assert ask(engine, user("Still there?")).tokens.generated == 20


def test_capacity_reached_is_a_clean_stop(engine: Engine) -> None:
    result = ask(engine, user("Tell me all.", max_tokens=10_000))
    assert result.reason == Reason.CAPACITY
    assert result.tokens.prompt + result.tokens.generated == 256 + 1  # the last token is chosen, not stored
    assert engine.used() == [256]
    assert ask(engine, user("Still there?")).reason == Reason.LENGTH


def test_a_prompt_of_exactly_the_capacity_still_gets_its_token(tiny_model: Path) -> None:
    engine = build(tiny_model)
    empty = len(engine._text.encode_chat([Message(Role.USER, "")]))
    text = "~" * (256 - empty)
    assert len(engine._text.encode_chat([Message(Role.USER, text)])) == 256
    result = ask(engine, user(text))
    assert (result.reason, result.tokens.generated, result.tokens.prompt) == (Reason.CAPACITY, 1, 256)


def test_a_long_conversation_loses_its_oldest_turns_and_keeps_the_system_prompt(engine: Engine) -> None:
    turns = [Message(Role.SYSTEM, "Keep this.")]
    truncated = []
    for i in range(20):
        turns.append(Message(Role.USER, f"Question {i}?"))
        result = ask(engine, Request(tuple(turns), max_tokens=6))
        truncated.append(result.truncated)
        turns.append(Message(Role.ASSISTANT, result.text))
        prompt = engine._text.encode_chat([turns[0]])
        assert engine._history[0].common(np.asarray(prompt[:8])) == 8
    assert not truncated[0] and truncated[-1]
    assert sum(truncated) > 0


def test_an_end_token_ends_the_answer(engine: Engine) -> None:
    expected = ask(engine, user("Count."))
    chosen = engine._text.encode(expected.text)[0]
    engine._text.end_ids = frozenset([chosen])
    result = ask(engine, user("Count."))
    assert result.reason == Reason.STOP and result.tokens.generated == 0 and result.text == ""


def test_a_stop_string_ends_the_answer_before_it(engine: Engine) -> None:
    whole = ask(engine, user("Count.")).text
    stop = whole[5:8]
    result = ask(engine, user("Count.", stop=(stop,)))
    assert result.reason == Reason.STOP
    assert result.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("after", [0, 1, 2, 7])
def test_cancel_at_any_moment(tiny_model: Path, after: int) -> None:
    engine = build(tiny_model)
    number = engine.add(user("word " * 30))
    seen = [event for _ in range(after) for event in engine.step()]
    engine.cancel(number)
    engine.cancel(number)
    engine.cancel(12345)
    seen += engine.step()
    done = [event for event in seen if isinstance(event, Done)]
    assert len(done) == 1 and done[0].result.reason == Reason.CANCELLED
    assert engine.idle
    engine.check_integrity()
    assert ask(engine, user("Next.")).reason == Reason.LENGTH


def test_cancelling_one_leaves_the_others_alone(tiny_model: Path) -> None:
    alone = ask(build(tiny_model), user("stay")).text
    engine = build(tiny_model, slots=3)
    numbers = [engine.add(user(text)) for text in ("go away", "stay", "leave")]
    early = [event for _ in range(5) for event in engine.step()]
    engine.cancel(numbers[0])
    engine.cancel(numbers[2])
    events = early + [event for _ in range(60) for event in engine.step()]
    done = {event.request: event.result for event in events if isinstance(event, Done)}
    assert done[numbers[1]].text == alone
    assert done[numbers[0]].reason == done[numbers[2]].reason == Reason.CANCELLED


def test_sampling_repeats_with_its_seed(engine: Engine) -> None:
    def sample(seed: int) -> str:
        return ask(engine, user("Sing.", sampling=Sampling(temperature=1.5, seed=seed))).text

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("request_", [Request(()), user("\ud800"), user("x", stop=("",))])
def test_an_unreadable_request_is_refused_at_once(engine: Engine, request_: Request) -> None:
    with pytest.raises(RequestError):
        engine.add(request_)
    assert engine.idle


class Faulty:
    """A real session that fails, or returns NaN, when told to: what a broken driver or bad memory would do."""

    def __init__(self, session, logits=None) -> None:
        self._session, self._logits, self.fail = session, logits, ""

    def io_binding(self):
        return self._session.io_binding()

    def run_with_iobinding(self, binding) -> None:
        if self.fail == "raise":
            raise RuntimeError("injected")
        self._session.run_with_iobinding(binding)
        if self.fail == "nan":
            self._logits[0] = np.nan


@pytest.mark.parametrize("when", [0, 1, 4])
@pytest.mark.parametrize("kind", ["raise", "nan"])
def test_a_fault_of_the_model_ends_its_request_and_not_the_engine(tiny_model: Path, kind: str, when: int) -> None:
    good = ask(build(tiny_model), user("word " * 30)).text
    engine = build(tiny_model, slots=2)
    runner = engine._decoder._runner
    faulty = Faulty(runner._head, runner._logits)
    runner._head = faulty
    runner._heads.clear()
    number = engine.add(user("word " * 30))
    events = [event for _ in range(when) for event in engine.step()]
    faulty.fail = kind
    while not any(isinstance(event, Done) for event in events):
        events += engine.step()
    faulty.fail = ""
    (done,) = [event for event in events if isinstance(event, Done)]
    assert done.request == number and done.result.reason == Reason.ERROR and done.error
    engine.check_integrity()
    assert ask(engine, user("word " * 30)).text == good


def test_nan_in_one_slot_leaves_the_others_alone(tiny_model: Path) -> None:
    alone = ask(build(tiny_model), user("second")).text
    engine = build(tiny_model, slots=2)
    runner = engine._decoder._runner
    numbers = [engine.add(user(text)) for text in ("first", "second")]
    events = [event for _ in range(4) for event in engine.step()]
    runner._head = Faulty(runner._head, runner._logits)
    runner._heads.clear()
    runner._head.fail = "nan"  # row 0 only
    events += engine.step()
    runner._head.fail = ""
    events += [event for _ in range(40) for event in engine.step()]
    done = {event.request: event for event in events if isinstance(event, Done)}
    assert done[numbers[0]].result.reason == Reason.ERROR
    assert done[numbers[1]].result.text == alone
    engine.check_integrity()


def test_sliding_layers_answer_beyond_their_window(tiny_models) -> None:
    folder = tiny_models("gemma3")
    engine = build(folder, slots=2, max_tokens=512)
    numbers = [engine.add(user("word " * 60 + str(i), max_tokens=300)) for i in range(2)]
    results = run(engine, numbers)
    engine.check_integrity()
    for i, number in enumerate(numbers):
        alone = ask(build(folder, max_tokens=512), user("word " * 60 + str(i), max_tokens=300))
        assert alone.text == results[number].text


def test_answering_slots_are_moved_next_to_each_other(tiny_model: Path) -> None:
    lengths = [40, 12, 12, 40]
    alone = [ask(build(tiny_model), user(f"number {i}", max_tokens=n)).text for i, n in enumerate(lengths)]
    engine = build(tiny_model, slots=4)
    numbers = [engine.add(user(f"number {i}", max_tokens=n)) for i, n in enumerate(lengths)]
    asked: list[list[bool]] = []
    decode = engine._decoder.decode

    def noted(slot: int, tokens: Sequence[int], active: Sequence[bool]) -> np.ndarray:
        asked.append(list(active))
        return decode(slot, tokens, active)

    engine._decoder.decode = noted
    results = run(engine, numbers)
    engine.check_integrity()
    assert [results[number].text for number in numbers] == alone
    assert all(all(active) for active in asked)  # no idle slot was computed
    assert [True] * 4 in asked and [True] * 2 in asked


def test_slots_that_take_turns_answer_the_same(tiny_model: Path) -> None:
    batched, in_turn = build(tiny_model, slots=3), build(tiny_model, slots=3)
    in_turn._batched = False
    answers = []
    for engine in (batched, in_turn):
        numbers = [engine.add(user(f"number {i}")) for i in range(5)]
        results = run(engine, numbers)
        engine.check_integrity()
        answers.append([results[number].text for number in numbers])
    assert answers[0] == answers[1]
