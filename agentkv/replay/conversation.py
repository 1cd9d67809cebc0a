"""Conversations in OpenAI's shape as recordings: where an assistant spoke, it had been asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .recording import Messages, Recording, Step

__all__ = ["conversations", "is_conversation", "messages_of", "tools_of"]


def is_conversation(value: object) -> bool:
    """Whether this is a list of messages, or an object that holds one."""
    messages = messages_of(value)
    return bool(messages) and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages)


def messages_of(value: object) -> Sequence[Any]:
    """The list itself, or what stands under "messages" or, in tau-bench's episodes, "traj"."""
    if isinstance(value, Mapping):
        value = value.get("messages", value.get("traj"))
    return value if isinstance(value, list) else ()


def tools_of(value: object) -> Messages:
    """The tools of an object that has some."""
    tools = value.get("tools") if isinstance(value, Mapping) else None
    return tuple(tools) if isinstance(tools, list) else ()


def conversations(
    values: Iterable[object], name: str, *, tools: Messages = (), ends_asked: bool = True
) -> list[Recording]:
    """One recording for each conversation; one that goes on where the one before it ended belongs to it.

    tools: of conversations that bring none
    ends_asked: a conversation that does not end with the assistant was about to be answered
    """
    made: list[_Conversation] = []
    for value in values:
        own = tools_of(value) or tools
        messages = tuple(messages_of(value))
        if not made or not made[-1].goes_on_in(messages, own):
            made.append(_Conversation(own))
        made[-1].extend(messages, ends_asked=ends_asked)
    kept = [one for one in made if one.steps]
    names = [name] if len(kept) == 1 else [f"{name}-{number}" for number in range(1, len(kept) + 1)]
    return [Recording(each, tuple(one.steps), one.tools) for each, one in zip(names, kept, strict=True)]


class _Conversation:
    """A conversation while it is read."""

    def __init__(self, tools: Messages) -> None:
        self.tools = tools
        self.steps: list[Step] = []
        self._messages: Messages = ()
        self._asked = 0
        """How many messages the last call's prompt has."""

    def goes_on_in(self, messages: Messages, tools: Messages) -> bool:
        """Whether these messages begin with all of those that are here."""
        return tools == self.tools and messages[: len(self._messages)] == self._messages

    def extend(self, messages: Messages, *, ends_asked: bool) -> None:
        """Take in what is new, and the calls that it tells of."""
        ends = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if ends_asked and messages[-1]["role"] != "assistant":
            ends.append(len(messages))
        for end in ends:
            if end > self._asked:
                self.steps.append(Step(len(self.steps) - 1 if self.steps else None, messages[self._asked : end]))
                self._asked = end
        self._messages = messages
