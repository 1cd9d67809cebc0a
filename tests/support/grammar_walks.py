"""Walks through a grammar as a model might take them: at random, or as long-winded as the mask lets it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerFast

from support import tiny_tokenizers

__all__ = ["Talker", "chatty", "marked_tokenizer", "piecewise_tokenizer", "uniform", "walk"]

Talker = Callable[[random.Random, dict[int, str]], int]
"""Chooses one of the allowed tokens, given with their texts."""


@cache
def marked_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with <|end|> and <call> as tokens of their own."""
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.byte_level(), eos_token="<|end|>")  # type: ignore[no-untyped-call]


@cache
def piecewise_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's kind: ▁ is a space, and what has no piece is bytes."""
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.sentencepiece_llama(), eos_token="<|end|>")  # type: ignore[no-untyped-call]


def uniform(order: random.Random, allowed: dict[int, str]) -> int:
    """Any token, each as likely."""
    return order.choice(list(allowed))


def chatty(order: random.Random, allowed: dict[int, str]) -> int:
    """Never closes anything while something else is allowed."""
    going_on = [token_id for token_id, text in allowed.items() if not set('"]}') & set(text)]
    return order.choice(going_on or list(allowed))


def walk(
    mask: Any, tokenizer: Any, order: random.Random, talker: Talker, end_token_ids: frozenset[int], most: int
) -> list[int]:
    """The output of a model that chooses by `talker`, its end token left out. AssertionError after `most` tokens."""
    texts: dict[int, str] = {}
    output: list[int] = []
    while len(output) < most:
        allowed = mask.allowed(output).nonzero().flatten().tolist()
        for token_id in allowed:
            if token_id not in texts:
                texts[token_id] = str(tokenizer.decode([token_id]))
        chosen = talker(order, {token_id: texts[token_id] for token_id in allowed})
        if chosen in end_token_ids:
            return output
        output.append(chosen)
    raise AssertionError(f"no end after {most} tokens: {tokenizer.decode(output)[:500]}")
