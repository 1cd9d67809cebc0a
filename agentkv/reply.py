"""What a call gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from agentkv.logprobs import TokenLogprobs
from agentkv.usage import Usage

__all__ = ["FinishReason", "Reply"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One finished answer.

    `token_ids` are the sampled ids, the end token among them; `text` ends before the end token or the stop string.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage = field(default_factory=Usage)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of token_ids, where `logprobs=` was asked for."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One for each prompt token, None for the first, where `prompt_logprobs=` was asked for."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to a list of messages."""
        return {"role": "assistant", "content": self.text}
