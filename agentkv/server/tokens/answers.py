"""Answers as the OpenAPI document describes them."""

from __future__ import annotations

from ..documented import Documented

__all__ = ["Detokenized", "Tokenized"]


class Tokenized(Documented):
    """The ids, and the room that there is for them."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Documented):
    """The text."""

    prompt: str
