"""Replies and events as chat completions and their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply

from ..token_texts import TokenTexts
from .token_logprobs import chat_logprobs

__all__ = ["ChatChunks", "chat_choice"]


def chat_choice(reply: Reply, index: int, texts: TokenTexts | None, *, token_ids: bool) -> dict[str, Any]:
    """One of `choices`. texts: where log-probabilities were asked for.

    Calls whose name nobody can read, cut before it for one, are left out: a client can answer none, and frameworks
    break at a tool named "". One with a name stays, however broken its arguments are.
    """
    calls = [call.message for call in reply.tool_calls if call.name]
    message = {"refusal": None, **reply.message}
    if calls:
        message["tool_calls"] = calls
        message["content"] = reply.text or None
    else:
        message.pop("tool_calls", None)
        message["content"] = reply.text
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": _finish_reason(reply),
        "logprobs": chat_logprobs(reply.logprobs, texts) if texts is not None and reply.logprobs is not None else None,
    }
    if token_ids:
        choice["token_ids"] = list(reply.token_ids)
    return choice


def _finish_reason(reply: Reply) -> str:
    """ "tool_calls" needs one to be there."""
    if reply.finish_reason == "tool_calls" and not any(call.name for call in reply.tool_calls):
        return "stop"
    return reply.finish_reason


class ChatChunks:
    """The chunks of one choice."""

    def __init__(self, index: int, texts: TokenTexts | None, *, token_ids: bool) -> None:
        self._index, self._texts, self._token_ids = index, texts, token_ids
        self._calls: list[str] = []
        """Ids of the calls begun, in order."""

    def first(self) -> dict[str, Any]:
        """Says that an assistant speaks."""
        return self._choice({"role": "assistant", "content": ""})

    def of(self, event: StreamEvent, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The event's choice; None where it holds nothing that a client sees.

        logprobs: of the tokens that the event brings.
        """
        choice = None
        if isinstance(event, TextDelta | ReasoningDelta):
            name = "content" if isinstance(event, TextDelta) else "reasoning_content"
            if event.text or (self._texts is not None and logprobs) or (self._token_ids and event.token_ids):
                choice = self._choice({name: event.text} if event.text else {})
                if self._texts is not None and logprobs:
                    choice["logprobs"] = chat_logprobs(logprobs, self._texts)
                if self._token_ids:
                    choice["token_ids"] = list(event.token_ids)
        elif isinstance(event, ToolCallDelta):
            if not event.name and event.id not in self._calls:
                return None  # See `chat_choice`.
            choice = self._choice({"tool_calls": [self._call(event)]})
        elif isinstance(event, TurnEnd):
            choice = self._choice({}, finish_reason=_finish_reason(event.reply))
        return choice

    def _call(self, event: ToolCallDelta) -> dict[str, Any]:
        if event.id in self._calls:
            return {"index": self._calls.index(event.id), "function": {"arguments": event.arguments_text}}
        self._calls.append(event.id)
        function = {"name": event.name, "arguments": event.arguments_text}
        return {"index": len(self._calls) - 1, "id": event.id, "type": "function", "function": function}

    def _choice(self, delta: dict[str, Any], *, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
