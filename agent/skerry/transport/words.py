"""What a person at a serial port reads: the board's messages in plain words. Pure.

Lines end with `\\n` here. Knows nothing of ports, and of when something is shown.
"""

from skerry.core import Reason, Result
from skerry.protocol import Answer, Code, Error, LimitsInForce, Ok, Outgoing, Status, TokenText, to_line
from skerry.transport.lineedit import harmless

HELP = """\
Type a question and press Enter. Ctrl-C ends an answer, or clears the line.
/help    this
/status  what the board is doing
/limits  how long questions and answers may be
/reset   forget this conversation
/cancel  end the answer"""


def in_words(message: Outgoing) -> str:
    """A message for a person; empty when there is nothing to say."""
    match message:
        case TokenText():
            text = message.text
        case Answer():
            text = _notes(message.result)
        case Error(code=Code.UNKNOWN):  # of a person's messages only /reset names what may not be there
            text = "(there is no conversation to forget)"
        case Error():
            hint = f"; {message.hint}" if message.hint else ""
            retry = f"; try again in {message.retry_after_s:.0f} s" if message.retry_after_s else ""
            text = f"({message.message}{hint}{retry})"
        case Ok(did="reset"):
            text = "(a new conversation)"
        case Status():
            text = _status(message)
        case LimitsInForce():
            text = (
                f"an answer has at most {message.max_tokens} tokens, a question {message.prompt_bytes} bytes\n"
                f"a conversation has {message.slot_tokens} tokens; then its oldest turns are left out\n"
                f"{_many(message.slots, 'answer')} at a time, {_many(message.queue, 'request')} may wait"
            )
        case _:
            text = to_line(message).decode()
    return harmless(text)


def _notes(result: Result) -> str:
    """What there is to know about an answer besides its text."""
    ended = {
        Reason.LENGTH: f"cut off after {_many(result.tokens.generated, 'token')}",
        Reason.CAPACITY: "cut off: the conversation is full, /reset begins a new one",
        Reason.CANCELLED: "cancelled",
        Reason.DEADLINE: "cut off: out of time",
    }
    notes = [ended[result.reason]] if result.reason in ended else []
    notes += ["older turns were left out"] * result.truncated
    return f"({'; '.join(notes)})" if notes else ""


def _status(status: Status) -> str:
    slots = ", ".join(f"{used} of {status.slot_tokens}" for used in status.slots)
    lines = [
        f"{status.node}: {status.state}, {status.model}, Skerry {status.version}",
        f"up {_duration(status.uptime_s)}; {status.answered} answered, {status.failed} failed",
        f"{status.answering} being answered, {status.waiting} waiting",
        f"tokens in memory: {slots}",
    ]
    if status.tokens_per_s:
        lines.append(f"last answer: {status.tokens_per_s:.1f} tokens/s")
    if "rss" in status.memory:
        lines.append(f"memory: {status.memory['rss'] / 1e6:.0f} MB")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes = int(seconds) // 60
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // (24 * 60)} days"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
