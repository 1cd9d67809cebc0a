"""Calls of one answer as its stream told them, which is how a client that reads the stream sends them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentkv.chat import Message, normalise
from agentkv.events import ReasoningDelta, TextDelta, ToolCallDelta
from agentkv.tool_calls import ToolCall

__all__ = ["ToldCalls"]

_Delta = TextDelta | ReasoningDelta | ToolCallDelta


class ToldCalls:
    """Takes the deltas as they come. alone: of the first call, and of no other one."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._arguments: dict[str, list[str]] = {}
        """What was told of each, by its id, in order."""

    def take(self, deltas: Sequence[_Delta]) -> Sequence[_Delta]:
        """Those that are to be told."""
        if not any(isinstance(delta, ToolCallDelta) for delta in deltas):
            return deltas
        told: list[_Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                if self._alone and self._arguments and delta.id not in self._arguments:
                    continue
                self._arguments.setdefault(delta.id, []).append(delta.arguments_text)
            told.append(delta)
        return told

    def given(self, calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
        """Those that the reply has."""
        return calls[:1] if self._alone else calls

    def message(self, said: Message) -> Message:
        """The reply's message as its deltas add up to it.

        It differs where a call was told in part before it turned out that nobody can read it, whose reply has all that
        the model wrote; and where arguments were written as a text that holds JSON.
        """
        if not said.tool_calls:
            return said
        calls = [call.to_openai() for call in said.tool_calls]
        for call in calls:
            if (arguments := self._arguments.get(call.get("id", ""))) is not None:
                call["function"]["arguments"] = "".join(arguments)
        (told,) = normalise([{"role": "assistant", "content": None, "tool_calls": calls}])
        return replace(said, tool_calls=told.tool_calls)
