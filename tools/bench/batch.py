"""Several conversations at once: tokens per second over 1, 2 and 4 slots, and the CPU time of an answer."""

import time
from functools import partial
from typing import Any

from skerry.arena import Arena, Layout
from skerry.core import Message, Role
from skerry.decoder import Decoder, next_chunk
from skerry.text import Text
from tools.bench.ours import open_sessions
from tools.bench.picture import bars
from tools.bench.report import Outcome, Panel, Row, Values, middle
from tools.bench.setting import Setting, in_turn, threads_text

_SLOTS = (1, 2, 4)
_N = 128
_STEPS = 16
_ANSWER = 32
QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Name three fruits.",
    "What does a capacitor do?",
    "How far is the moon?",
    "Tell me about the sea.",
    "What is a thermostat for?",
    "How do I reset a router?",
    "Write a sentence about rain.",
    "What is seven times eight?",
    "Who was Marie Curie?",
    "What eats a mouse?",
    "How does a kettle work?",
    "What is the largest desert?",
    "Give me a tip for saving energy.",
    "What is Linux?",
    "When did the Second World War end?",
    "Say good morning in Spanish.",
)


class Batch:
    """A decode over the first slots of a shared arena, each holding about 128 tokens."""

    def __init__(self, decoder: Decoder, slots: int) -> None:
        self.label = f"{slots} slot{'s' if slots > 1 else ''}"
        self.slots = slots
        self._decoder = decoder

    def rate(self, clock: Any = time.perf_counter) -> float:
        """Tokens per second, over all slots together."""
        for slot in range(self.slots):
            self._decoder.arena.claim(slot, _N + slot)
        start = clock()
        for step in range(_STEPS):
            self._decoder.decode(0, [step + 50] * self.slots, [True] * self.slots)
        return float(_STEPS * self.slots / (clock() - start))

    def cpu_seconds(self) -> float:
        """Of an answer of 32 tokens."""
        return _ANSWER / self.rate(time.process_time)


def measure(setting: Setting) -> Outcome:
    rows: list[Row] = []
    groups: dict[str, dict[str, float | None]] = {}
    for threads in setting.threads:
        model = setting.model
        layout = Layout(model.manifest.geometry, model.manifest.groups, max(_SLOTS), 512)
        decoder = Decoder(model, open_sessions(model, threads, setting.cache), Arena(layout))
        decoder.warm_up()
        contenders = [Batch(decoder, slots) for slots in _SLOTS]
        rounds = setting.pick(12, 2)
        rates: Values = in_turn(f"slots, {threads_text(threads)}", contenders, rounds, Batch.rate)
        cpu: Values = in_turn(f"CPU time, {threads_text(threads)}", contenders, setting.pick(6, 1), Batch.cpu_seconds)
        one = contenders[0].label
        for contender in contenders[1:]:
            ratios = [many / single for many, single in zip(rates[contender.label], rates[one], strict=True)]
            name = f"decode of {contender.label} together, {threads_text(threads)}"
            value, alone = middle(rates[contender.label]), middle(rates[one])
            rows.append(Row(name, value, "tokens/s", "ours, 1 slot", alone, middle(ratios)))
        for contender in contenders:
            name = f"CPU time of an answer of {_ANSWER} tokens, {contender.label}, {threads_text(threads)}"
            rows.append(Row(name, middle(cpu[contender.label]), "s"))
        if threads == 1:
            rows += _equality(decoder, setting)
        groups[threads_text(threads)] = {label: middle(values) for label, values in rates.items()}
    return Outcome(rows, [Panel("Several conversations at once, tokens per second", partial(_draw, groups))])


def _equality(decoder: Decoder, setting: Setting) -> list[Row]:
    """How many greedy answers of a batch are those that each question has alone. Exactly all with 8-bit weights; with
    4-bit ones a row's product may differ in its last bits with the number of rows."""
    tokens = setting.model.manifest.tokens
    text = Text(setting.model.path, tokens.end, tokens.bos, tokens.add_bos)
    prompts = [
        text.encode_chat([Message(Role.USER, question)])
        for question in QUESTIONS[: setting.pick(len(QUESTIONS), max(_SLOTS))]
    ]
    size = max(_SLOTS)
    alone = [_greedy(decoder, [prompt])[0] for prompt in prompts]
    together = [answer for at in range(0, len(prompts), size) for answer in _greedy(decoder, prompts[at : at + size])]
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    agree = [_common(a, b) for a, b in zip(alone, together, strict=True)]
    return [
        Row(f"answers of {_ANSWER} tokens equal in a batch of {size} and alone, of {len(prompts)}", same, "answers"),
        Row("tokens before the first difference, mean", round(sum(agree) / len(agree), 1), f"of {_ANSWER}"),
    ]


def _common(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Answers of 32 tokens, whatever they are."""
    arena = decoder.arena
    answers = []
    for slot, prompt in enumerate(prompts):
        arena.truncate(slot, 0)
        while pending := len(prompt) - arena.length(slot):
            done = arena.length(slot)
            logits = decoder.prefill(slot, prompt[done : done + next_chunk(done, pending)])
        answers.append([int(logits[-1].argmax())])
    while len(answers[0]) < _ANSWER:
        logits = decoder.decode(0, [answer[-1] for answer in answers], [True] * len(answers))
        for answer, row in zip(answers, logits, strict=True):
            answer.append(int(row.argmax()))
    return answers


def _draw(groups: dict[str, dict[str, float | None]], axes: Any) -> None:
    bars(axes, groups)
