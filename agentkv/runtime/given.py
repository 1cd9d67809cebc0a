"""What a session is given to begin with, and a report to begin at."""

from __future__ import annotations

from collections.abc import Iterable

from agentkv.chat import Message, normalise, without_implicit
from agentkv.report import Report, ServedBy

__all__ = ["check_since", "first_messages"]


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
