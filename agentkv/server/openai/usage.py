"""`usage` in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv.reply import Reply

from ..calls import Answered

__all__ = ["usage_of", "usage_of_answers"]


def usage_of_answers(answers: Sequence[Answered]) -> dict[str, Any]:
    """Of a whole answer."""
    reasoning_tokens = sum(each.reasoning_tokens for each in answers)
    return usage_of([each.reply for each in answers], reasoning_tokens=reasoning_tokens)


def usage_of(replies: Sequence[Reply], *, reasoning_tokens: int) -> dict[str, Any]:
    """Of all the choices of a request. `cached_tokens` is always there, 0 where nothing was found."""
    prompt = sum(reply.usage.prompt_tokens for reply in replies)
    completion = sum(reply.usage.output_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(reply.usage.cached_tokens for reply in replies)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
