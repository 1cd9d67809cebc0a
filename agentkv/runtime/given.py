"""What a session is given to begin with."""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.chat import Message, normalise, without_implicit

__all__ = ["first_messages"]


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
