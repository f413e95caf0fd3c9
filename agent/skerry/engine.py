"""Requests in, tokens out: owns the slots, and decides what the next step of the model is. No I/O, no threads.

One step is one prefill chunk of one slot, or one decode over all slots that are answering. While some slots answer and
others wait for their prompt, chunks and decodes take turns, so that nobody stands still.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from skerry.core import Done, Event, Message, Reason, Request, Result, Role, Timings, Token, TokenCounts
from skerry.decoder import Decoder, next_chunk
from skerry.errors import CapacityError, SkerryError
from skerry.sampler import Sampler
from skerry.text import StopStrings, Text

log = logging.getLogger(__name__)

COLD, PREFIX = "cold", "prefix"
"""Tiers: nothing was reused; rows of the slot's own past were."""


class Engine:
    """One model, its slots, and the requests in them."""

    def __init__(
        self, decoder: Decoder, text: Text, batched: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """batched: decode all answering slots in one batch, else in turn."""
        self._decoder, self._text, self._batched, self._clock = decoder, text, batched, clock
        self._arena = decoder.arena
        layout = self._arena.layout
        self._history = [_History(layout.max_tokens) for _ in range(layout.slots)]
        self._waiting: deque[_Answer] = deque()
        self._active: list[_Answer] = []
        self._events: list[Event] = []
        self._ids = itertools.count(1)
        self._prefilled_last = False

    @property
    def idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._waiting or self._active or self._events)

    @property
    def capacity(self) -> int:
        """Tokens of one slot."""
        return self._arena.layout.max_tokens

    def add(self, request: Request) -> int:
        """Queue a request; its events carry the returned number.

        A conversation that outgrew a slot loses its oldest turns, never its system prompt, and is marked truncated.
        Raises CapacityError for a question that no slot can hold, RequestError for one that cannot be read.
        """
        prompt, truncated = self._fitted(request.messages)
        sampler = Sampler(request.sampling, self._decoder.vocab_size)
        answer = _Answer(next(self._ids), request, prompt, truncated, sampler, self._text, self._clock())
        self._waiting.append(answer)
        return answer.number

    def cancel(self, number: int, reason: Reason = Reason.CANCELLED) -> None:
        """End a request; its Done comes with the next step. Unknown and finished numbers are ignored."""
        for answers in (self._waiting, self._active):
            for answer in list(answers):
                if answer.number == number:
                    self._finish(answer, reason)

    def step(self) -> list[Event]:
        """Do one step of work and return what came of it. Never raises for a fault of one request."""
        self._admit()
        filling = next((answer for answer in self._active if answer.pending), None)
        decoding = [answer for answer in self._active if not answer.pending]
        if filling and not (decoding and self._prefilled_last):
            self._prefilled_last = True
            self._guarded(partial(self._prefill, filling), [filling])
        elif decoding:
            self._prefilled_last = False
            if self._batched:
                self._gather(decoding)
            else:  # the one that waited longest
                decoding = [min(decoding, key=lambda answer: self._history[answer.slot].last_used)]
            self._guarded(partial(self._decode, decoding), decoding)
        events, self._events = self._events, []
        return events

    def used(self) -> list[int]:
        """Tokens in each slot."""
        return [self._arena.length(slot) for slot in range(self._arena.layout.slots)]

    def check_integrity(self) -> None:
        """Raises SkerryError when the arena, or what is known of it, contradicts itself."""
        self._arena.check_integrity()
        for slot, history in enumerate(self._history):
            if history.length != self._arena.length(slot):
                raise SkerryError(f"slot {slot}: {history.length} token ids for {self._arena.length(slot)} rows")

    def _fitted(self, messages: tuple[Message, ...]) -> tuple[npt.NDArray[np.int64], bool]:
        """Token ids of a conversation, and whether it had to lose turns for its beginning to fit.

        It then shrinks to half a slot in one go, so that the next turns go on with the same beginning.
        """
        prompt = self._text.encode_chat(messages)
        truncated = False
        system = messages[:1] if messages and messages[0].role == Role.SYSTEM else ()
        turns = messages[len(system) :]
        while len(turns) > 1 and len(prompt) > (self.capacity // 2 if truncated else self.capacity * 3 // 4):
            # A turn begins with the user's message.
            begin = next((i for i in range(1, len(turns)) if turns[i].role == Role.USER), len(turns) - 1)
            turns = turns[begin:]
            truncated = True
            prompt = self._text.encode_chat(system + turns)
        if len(prompt) > self.capacity:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens, a conversation holds {self.capacity}",
                "shorten it, or raise arena.max_tokens",
            )
        return np.asarray(prompt, np.int64), truncated

    def _admit(self) -> None:
        taken = {answer.slot for answer in self._active}
        free = [slot for slot in range(len(self._history)) if slot not in taken]
        while self._waiting and free:
            answer = self._waiting.popleft()
            answer.slot = self._choose_slot(answer.prompt, free)
            free.remove(answer.slot)
            # The last token always runs again: its logits are wanted.
            common = min(self._history[answer.slot].common(answer.prompt), len(answer.prompt) - 1)
            answer.reused = self._forget(answer.slot, common)
            answer.pending -= answer.reused
            answer.started = self._clock()
            self._active.append(answer)

    def _choose_slot(self, prompt: npt.NDArray[np.int64], free: list[int]) -> int:
        """The slot whose conversation the prompt goes on with, else an empty one, else the longest unused."""
        for slot in sorted(free, key=lambda slot: -self._history[slot].common(prompt)):
            if (history := self._history[slot]).length and 2 * history.common(prompt) >= history.length:
                return slot
        return min(free, key=lambda slot: (self._history[slot].length > 0, self._history[slot].last_used))

    def _forget(self, slot: int, length: int) -> int:
        kept = self._arena.truncate(slot, length)
        self._history[slot].length = kept
        return kept

    def _guarded(self, work: Callable[[], None], answers: list["_Answer"]) -> None:
        """Do some work; a fault ends the answers that it was for, and nothing else."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, SkerryError):
                log.exception("the step failed")
            for answer in answers:  # what the slot holds now is not known
                if answer in self._active:
                    self._finish(answer, Reason.ERROR, str(error))
                    self._forget(answer.slot, 0)

    def _prefill(self, answer: "_Answer") -> None:
        length = self._arena.length(answer.slot)
        size = next_chunk(length, answer.pending)
        chunk = answer.prompt[length : length + size]
        logits = self._decoder.prefill(answer.slot, chunk, logits=int(size == answer.pending))
        self._history[answer.slot].append(chunk)
        answer.pending -= size
        if not answer.pending:
            answer.prefilled = self._clock()
            self._next_token(answer, logits[-1])

    def _gather(self, decoding: list["_Answer"]) -> None:
        """Move the answering slots next to each other: an idle one between them costs as much as they do at every
        token, a move the time of about one."""
        while True:
            at = {answer.slot: answer for answer in decoding}
            hole = next((slot for slot in range(min(at), max(at)) if slot not in at), None)
            if hole is None:
                return
            moved, last = at[max(at)], max(at)
            for answer in self._active:  # one whose prompt is being read
                if answer.slot == hole:
                    answer.slot = last
            moved.slot = hole
            self._arena.swap(hole, last)
            self._history[hole], self._history[last] = self._history[last], self._history[hole]

    def _decode(self, answers: list["_Answer"]) -> None:
        by_slot = {answer.slot: answer for answer in answers}
        first, last = min(by_slot), max(by_slot)
        span = range(first, last + 1)
        tokens = [by_slot[slot].token if slot in by_slot else 0 for slot in span]
        logits = self._decoder.decode(first, tokens, [slot in by_slot for slot in span])
        now = self._clock()
        for slot, answer in by_slot.items():
            self._history[slot].append(np.asarray([answer.token]))
            self._history[slot].last_used = now
            self._guarded(partial(self._next_token, answer, logits[slot - first]), [answer])

    def _next_token(self, answer: "_Answer", logits: npt.NDArray[np.float32]) -> None:
        """Choose the token that follows, show its text, and see whether the answer ends with it."""
        answer.token = answer.sampler.choose(logits)
        if answer.token in self._text.end_ids:
            self._finish(answer, Reason.STOP)
            return
        answer.generated += 1
        answer.sampler.accept(answer.token)
        self._show(answer, answer.stops.feed(answer.detokenizer.feed(answer.token)))
        answer.first = answer.first or self._clock()
        if answer.stops.hit:
            self._finish(answer, Reason.STOP)
        elif answer.generated >= answer.request.max_tokens:
            self._finish(answer, Reason.LENGTH)
        elif self._arena.room(answer.slot) == 0:
            self._finish(answer, Reason.CAPACITY)

    def _show(self, answer: "_Answer", text: str) -> None:
        if text:
            answer.text.append(text)
            self._events.append(Token(answer.number, text))

    def _finish(self, answer: "_Answer", reason: Reason, error: str = "") -> None:
        if answer in self._active:
            self._active.remove(answer)
        else:
            self._waiting.remove(answer)
        self._show(answer, answer.stops.feed(answer.detokenizer.flush()) + answer.stops.flush())
        self._events.append(Done(answer.number, answer.result(reason, self._clock()), error))


class _History:
    """The token ids behind the rows of a slot, so that a conversation that goes on is not computed again."""

    def __init__(self, capacity: int) -> None:
        self._ids = np.zeros(capacity, np.int64)
        self.length = 0
        self.last_used = 0.0

    def append(self, ids: npt.NDArray[np.int64]) -> None:
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def common(self, prompt: npt.NDArray[np.int64]) -> int:
        """Length of the common beginning."""
        size = min(self.length, len(prompt))
        differ = np.flatnonzero(self._ids[:size] != prompt[:size])
        return int(differ[0]) if len(differ) else size


class _Answer:
    """A request on its way."""

    def __init__(
        self,
        number: int,
        request: Request,
        prompt: npt.NDArray[np.int64],
        truncated: bool,
        sampler: Sampler,
        text: Text,
        now: float,
    ) -> None:
        self.number, self.request, self.prompt, self.truncated = number, request, prompt, truncated
        self.sampler = sampler
        sampler.accept(prompt.tolist())
        self.detokenizer, self.stops = text.detokenizer(), StopStrings(request.stop)
        self.slot = -1
        self.reused = 0
        self.pending = len(self.prompt)
        self.token = -1
        self.generated = 0
        self.text: list[str] = []
        self.added = now
        self.started = self.prefilled = self.first = 0.0

    def result(self, reason: Reason, now: float) -> Result:
        def since(begin: float, end: float) -> float:
            return round(1000 * (end - begin), 3) if begin and end else 0.0

        return Result(
            text="".join(self.text),
            reason=reason,
            tier=PREFIX if self.reused else COLD,
            compacted=False,
            truncated=self.truncated,
            tokens=TokenCounts(prompt=len(self.prompt), reused=self.reused, generated=self.generated),
            timings_ms=Timings(
                queue=since(self.added, self.started or now),
                prefill=since(self.started, self.prefilled),
                first=since(self.added, self.first),
                total=since(self.added, now),
            ),
        )
