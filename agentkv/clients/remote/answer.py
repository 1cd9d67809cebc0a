"""Chunks of an answer as events, and the replies that they add up to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from agentkv.chat.call_reader import malformed_call
from agentkv.errors import ServerUnreachable
from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta
from agentkv.reply import FinishReason, Reply
from agentkv.tool_calls import ToolCall
from agentkv.tools import Tool, check_call
from agentkv.usage import Usage

__all__ = ["Answer"]


@dataclass(slots=True)
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    finish_reason: FinishReason | None = None


class Answer:
    """All choices of one call, of which more and more is known."""

    def __init__(self, n: int, tools: Mapping[str, Tool], denied: Mapping[str, str]) -> None:
        self._choices = [_Choice() for _ in range(n)]
        self._tools, self._denied = tools, denied
        self._usage = Usage()

    def read(self, chunk: Mapping[str, Any]) -> list[StreamEvent]:
        """What a chunk adds, of chat or of a plain completion. ServerUnreachable for what is none."""
        try:
            if chunk.get("usage"):
                self._usage = _usage(chunk["usage"])
            return [event for choice in chunk.get("choices") or () for event in self._of(choice)]
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
            raise ServerUnreachable(
                f"the answer is not what a server of OpenAI's protocol sends: {type(error).__name__} {error}"
            ) from error

    def replies(self, *, ttft: float | None, duration: float) -> list[Reply]:
        """Those of all choices; one that has no end yet was cancelled. Seconds are those of the client.

        What the call cost stands in the first, for the server tells the sum.
        """
        usage = replace(self._usage, ttft=ttft, duration=duration)
        return [self._reply(one, Usage() if index else usage) for index, one in enumerate(self._choices)]

    def _of(self, choice: Mapping[str, Any]) -> list[StreamEvent]:
        index = choice.get("index", 0)
        if index not in range(len(self._choices)):
            raise LookupError(f"choice {index!r} of {len(self._choices)}")
        state = self._choices[index]
        delta = choice.get("delta") or {}
        events: list[StreamEvent] = []
        if reasoning := _text(delta.get("reasoning_content")):
            state.reasoning.append(reasoning)
            events.append(ReasoningDelta(reasoning, (), index))
        if text := _text(delta.get("content")) or _text(choice.get("text")):
            state.texts.append(text)
            events.append(TextDelta(text, (), index))
        for part in delta.get("tool_calls") or ():
            call = state.calls.setdefault(int(part["index"]), _Call())
            function = part.get("function") or {}
            call.id = _text(part.get("id")) or call.id
            call.name = _text(function.get("name")) or call.name
            call.arguments.append(_text(function.get("arguments")))
            events.append(ToolCallDelta(index, call.id, call.name, call.arguments[-1]))
        if ended := choice.get("finish_reason"):
            state.finish_reason = ended if ended in ("stop", "length", "tool_calls", "cancelled") else "stop"
        return events

    def _reply(self, state: _Choice, usage: Usage) -> Reply:
        cut = state.finish_reason != "tool_calls"
        calls = [_tool_call(call, cut=cut) for _, call in sorted(state.calls.items())]
        return Reply(
            text="".join(state.texts),
            token_ids=(),
            finish_reason=state.finish_reason or "cancelled",
            usage=usage,
            reasoning="".join(state.reasoning) if state.reasoning else None,
            tool_calls=tuple(check_call(call, self._tools, self._denied) for call in calls),
        )


def _text(told: object) -> str:
    if told is not None and not isinstance(told, str):
        raise TypeError(f"{told!r:.60} where a text belongs")
    return told or ""


def _usage(told: Mapping[str, Any]) -> Usage:
    """prompt, cached and output tokens; why the others missed is not told, so that `misses` is all zero."""
    prompt, output = _count(told, "prompt_tokens"), _count(told, "completion_tokens")
    cached = _count(told.get("prompt_tokens_details") or {}, "cached_tokens")
    if cached > prompt:
        raise ValueError(f"{cached} cached tokens of a prompt of {prompt}")
    return Usage(prompt_tokens=prompt, cached_tokens=cached, computed_tokens=prompt - cached, output_tokens=output)


def _count(told: Mapping[str, Any], name: str) -> int:
    count = int(told.get(name) or 0)
    if count < 0:
        raise ValueError(f"{name} is {count}")
    return count


def _tool_call(call: _Call, *, cut: bool) -> ToolCall:
    written = "".join(call.arguments)
    try:
        arguments = json.loads(written, parse_constant=_no_json)
        reason = None if isinstance(arguments, dict) else "the arguments are no JSON object"
    except (ValueError, RecursionError) as error:
        reason = "it was cut off" if cut else f"the arguments are no JSON: {error}"
    if reason is not None:
        return malformed_call(call.id, call.name, written, reason, "arguments")
    return ToolCall(call.id, call.name, arguments, written)


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is none")
