"""What a tool returned, as the text that the model reads."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

__all__ = ["MAX_RESULT_CHARS", "cut_in_the_middle", "result_text"]

MAX_RESULT_CHARS = 20_000
"""A result that is longer is cut in its middle: about 5,000 tokens of English."""

_AS_JSON = (type(None), bool, int, float, dict, list, tuple, set, frozenset, enum.Enum)


def result_text(value: object) -> str:
    """A str as it is; what JSON can hold as JSON (None is `null`); bytes as UTF-8; anything else by str().

    Dataclasses and pydantic models are JSON too. What UTF-8 cannot hold (lone surrogates) becomes "?", since no
    tokenizer reads it. O(size); run it off the event loop.
    """
    if isinstance(value, str):
        return _encodable(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    return _encodable(_json(value) if _is_json(value) else str(value))


def cut_in_the_middle(text: str, max_chars: int) -> str:
    """The text itself, or its beginning and end with a note between them; never longer than max_chars.

    The note takes about 40 characters; where max_chars leaves no room for it, the text is cut without one.
    """
    if len(text) <= max_chars:
        return text
    # The note's length depends on the figure in it; the figure's on the length. The longest figure settles both.
    room = max_chars - len(_note(len(text)))
    if room <= 0:
        return text[:max_chars]
    head = (room + 1) // 2
    tail = room - head
    return text[:head] + _note(len(text) - room) + text[len(text) - tail :]


def _note(num_chars: int) -> str:
    return f"\n[… {num_chars:,} characters left out …]\n"


def _is_json(value: object) -> bool:
    from pydantic import BaseModel

    if isinstance(value, (BaseModel, *_AS_JSON)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _json(value: Any) -> str:
    from pydantic_core import to_json

    try:
        return to_json(value, fallback=str, inf_nan_mode="constants", bytes_mode="utf8").decode()
    except (ValueError, TypeError, RecursionError):  # It contains itself, or holds what UTF-8 cannot.
        return str(value)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text
