"""What a call gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentkv.logprobs import TokenLogprobs
from agentkv.tool_calls import ToolCall
from agentkv.usage import Usage

__all__ = ["FinishReason", "Reply"]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One finished answer.

    `token_ids` are the sampled ids, the end token among them; `text` ends before the end token or the stop string, and
    holds neither the model's reasoning nor its calls of tools.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of token_ids, where `logprobs=` was asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token, None for the first, where `prompt_logprobs=` was asked for."""
    reasoning: str | None = None
    """What the model wrote between its markers of reasoning, where it wrote any."""
    tool_calls: tuple[ToolCall, ...] = ()
    """In the order in which the model made them, those that cannot be run among them."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's shape, to be appended to a list of messages.

        Sent back to the runtime that gave it, it is encoded by the ids that were produced.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.message for call in self.tool_calls]
        return message
