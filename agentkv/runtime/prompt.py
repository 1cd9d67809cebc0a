"""From what a caller passes as a prompt to the token ids that the model sees."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.errors import ConfigError, RequestError

from .token_bounds import most_bytes_per_token

__all__ = ["Prompt", "PromptEncoder", "is_messages"]

_LONG_TEXT = 50_000
"""Characters from which on a text is measured before it is encoded, which takes milliseconds from there on."""

Prompt = str | Sequence[int] | Sequence[Any]


def is_messages(prompt: Prompt) -> bool:
    """Whether a prompt is a list of messages. Raises TypeError for what is no prompt at all, ValueError for nothing."""
    if isinstance(prompt, str):
        empty = not prompt
    elif isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Sequence):
        raise TypeError(f"a prompt is a str, a list of token ids or a list of messages, got {type(prompt).__name__}")
    else:
        empty = len(prompt) == 0
    if empty:
        raise ValueError("the prompt is empty; a model needs at least one token to continue from")
    if isinstance(prompt, str):
        return False
    return all(isinstance(item, Mapping) or callable(getattr(item, "model_dump", None)) for item in prompt)


class PromptEncoder:
    """Encodes raw text and token ids for one model. Called from any thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        # Fast tokenizers may not be entered twice at once.
        self._lock = threading.RLock()
        self._most_bytes: int | None = None
        """Of a token; 0 where nothing bounds it. Looked for when the first long text comes."""

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids, at least one.

        str: raw text with the tokenizer's own special tokens. A list of ints: as it is. Raises RequestError for ids
        outside the vocabulary. O(length of the prompt).
        """
        ids = self.encode_text(prompt, special_tokens=True) if isinstance(prompt, str) else self._check_ids(prompt)
        if not ids:
            raise ValueError("the prompt is empty; a model needs at least one token to continue from")
        return tuple(ids)

    def encode_now(self, prompt: str | Sequence[int]) -> tuple[int, ...] | None:
        """As `encode`, or None where it would have to wait: another thread may be at a text of megabytes."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.encode(prompt)
        finally:
            self._lock.release()

    def fewest(self, text: str) -> int:
        """So many ids a text has at least; 0 for one that is short, or where the tokenizer gives no bound.

        O(text), at a small part of what encoding it costs; the first time O(vocabulary).
        """
        if len(text) < _LONG_TEXT:
            return 0
        if self._most_bytes is None:
            with self._lock:
                self._most_bytes = most_bytes_per_token(self._tokenizer) or 0
        if not self._most_bytes:
            return 0
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-num_bytes // self._most_bytes)

    def encode_text(self, text: str, *, special_tokens: bool = False) -> list[int]:
        """The ids of a text. Raises ConfigError where there is no tokenizer.

        RequestError for what is no text, and for tokens that the model does not have.
        """
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer: pass token ids, or give Runtime a tokenizer=")
        with self._lock:
            try:
                # Not verbose: that a prompt is too long is told by the error that it raises.
                tokens = self._tokenizer(text, add_special_tokens=special_tokens, verbose=False)
            except Exception:
                _require_unicode(text)
                raise
        ids: list[int] = tokens["input_ids"]
        if max(ids, default=0) >= self._vocab_size:
            outside = next(token_id for token_id in ids if token_id >= self._vocab_size)
            raise RequestError(
                f"the tokenizer gives {self._tokenizer.convert_ids_to_tokens(outside)!r} the id {outside}, and the "
                f"model's vocabulary is {self._vocab_size}: leave this token out, or give Runtime the model's own "
                f"tokenizer"
            )
        return ids

    def _check_ids(self, prompt: Sequence[Any]) -> list[int]:
        for item in prompt:
            if isinstance(item, bool) or not isinstance(item, int):
                raise TypeError(f"a prompt list holds token ids or messages only, got {item!r}")
            if not 0 <= item < self._vocab_size:
                raise RequestError(f"token id {item} is outside the model's vocabulary of {self._vocab_size}")
        return list(prompt)


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt holds {text[error.start]!r} at character {error.start}, one half of a surrogate pair, which "
            f"is no text. text.encode(errors='replace').decode() puts a ? in its place"
        ) from error
