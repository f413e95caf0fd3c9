"""Conversations that the service remembers, and the form in which chat templates take them."""

from skerry.core import Message, Role
from skerry.protocol import Ask, Code, ProtocolError


class Session:
    """A conversation: the turns so far, without the system prompt."""

    def __init__(self, now: float) -> None:
        self.turns: list[Message] = []
        self.last_used = now
        self.busy = False

    @property
    def characters(self) -> int:
        return sum(len(turn.content) for turn in self.turns)

    def shorten(self, characters: int) -> None:
        """Leave out the oldest turns of a history that could not fit a slot anyway."""
        while len(self.turns) > 1 and self.characters > characters:
            del self.turns[0]


def messages_of(ask: Ask) -> list[Message]:
    """What is asked, as messages."""
    return list(ask.messages) if ask.messages is not None else [Message(Role.USER, ask.text or "")]


def repaired(messages: list[Message]) -> list[Message]:
    """A conversation in the form that chat templates take: at most one system message, first; then user and assistant
    in turn, beginning and ending with the user.

    Turns of one role in a row become one. Raises ProtocolError when there is nothing to answer.
    """
    system = [m.content for m in messages if m.role == Role.SYSTEM]
    turns: list[Message] = []
    for message in (m for m in messages if m.role != Role.SYSTEM):
        if turns and turns[-1].role == message.role:
            turns[-1] = Message(message.role, f"{turns[-1].content}\n\n{message.content}")
        elif turns or message.role == Role.USER:
            turns.append(message)
    if not turns or turns[-1].role != Role.USER:
        raise ProtocolError(Code.BAD_MESSAGE, "the conversation does not end with a question", "end it with role user")
    return [Message(Role.SYSTEM, "\n\n".join(system))] * bool(system) + turns
