"""Log-probabilities as the two kinds of completions give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from agentkv.logprobs import TokenLogprobs

from ..token_texts import TokenTexts

__all__ = ["chat_logprobs", "completion_logprobs"]

# OpenAI's API has no minus infinity, which JSON cannot hold; it gives this number for what is as good as impossible.
_LEAST = -9999.0


def chat_logprobs(logprobs: Iterable[TokenLogprobs], texts: TokenTexts) -> dict[str, Any]:
    """`choice.logprobs` of a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text, data = texts.of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": data}

    return {
        "content": [
            {**entry(one.token_id, one.logprob), "top_logprobs": [entry(*each) for each in one.top]} for one in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    logprobs: Sequence[TokenLogprobs | None], token_ids: Sequence[int], texts: TokenTexts, offsets: Sequence[int]
) -> dict[str, Any]:
    """`choice.logprobs` of a plain completion.

    A logprob is None for the first token of an echoed prompt. Tokens of one text in `top_logprobs` are one there, as
    OpenAI's shape has it: the likelier.
    """
    tokens: list[str] = []
    tops: list[dict[str, float] | None] = []
    for token_id, one in zip(token_ids, logprobs, strict=True):
        text = texts.of(token_id)[0]
        tokens.append(text)
        if one is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for other, logprob in one.top:
            top.setdefault(texts.of(other)[0], _finite(logprob))
        top.setdefault(text, _finite(one.logprob))
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [None if one is None else _finite(one.logprob) for one in logprobs],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
