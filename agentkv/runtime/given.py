"""What a session is given to begin with, and a report to begin at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentkv.chat import Message, normalise, plain_copy, without_implicit
from agentkv.report import Report, ServedBy
from agentkv.session import Conversation

__all__ = ["GivenConversation", "check_since", "first_messages"]

_FEW_MESSAGES = 32
"""Up to so many messages are read when a call is made; of more the reading is left to a thread."""


class GivenConversation:
    """The messages of a call, as they are when this is made: what their owner does to them later changes nothing."""

    def __init__(self, messages: Sequence[object], *, model: str) -> None:
        """Raises RequestError for what is no message, where they are few or cannot be copied unread."""
        self._model = model
        self._copied = plain_copy(messages) if len(messages) > _FEW_MESSAGES else None
        self._read = self._conversation(messages) if self._copied is None else None

    def read(self) -> Conversation:
        """Raises RequestError for what is no message. O(messages), so beside the event loop."""
        return self._read if self._read is not None else self._conversation(self._copied or ())

    def _conversation(self, messages: Sequence[object]) -> Conversation:
        return Conversation.given(without_implicit(normalise(messages, model=self._model)))


def check_since(since: object, served_by: ServedBy) -> None:
    """TypeError for what is no report, ValueError for that of another runtime."""
    if since is None:
        return
    if not isinstance(since, Report):
        raise TypeError(f"since must be an earlier report of this Runtime, got {type(since).__name__}")
    if since.served_by is not served_by:
        raise ValueError(
            f"since must be an earlier report of this Runtime; it is one of another, {since.served_by.model}"
        )


def first_messages(system: object, messages: Iterable[object], *, model: str) -> tuple[Message, ...]:
    """The system text and what was said before, in one form.

    TypeError for a system text that is none, ValueError for two of them, RequestError for what is no message.
    """
    if system is None:
        return normalise(messages, model=model)
    if not isinstance(system, str):
        raise TypeError(f"system must be a str or None, got {type(system).__name__}")
    said = without_implicit(normalise(messages, model=model))
    if said and said[0].role == "system":
        raise ValueError(
            "system= and the first of messages= are both the system text: leave system= out to go on with the stored "
            "one, or give messages=stored[1:] to have the new one"
        )
    return (Message("system", system), *said)
