"""From what a caller passes as a prompt to the token ids that the model sees."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from agentkv.errors import ConfigError, ContentUnsupported, RequestError

__all__ = ["Prompt", "PromptEncoder"]

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class PromptEncoder:
    """Encodes raw text, token ids and messages for one model. Called from any thread."""

    def __init__(self, tokenizer: Any, *, vocab_size: int, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._chat_template = chat_template
        # Fast tokenizers may not be entered twice at once.
        self._lock = threading.Lock()

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Token ids, at least one.

        str: raw text with the tokenizer's own special tokens, no template. A list of ints: as it is. Messages: by the
        chat template, with the opening of the assistant's turn. Raises ValueError for an empty prompt, RequestError
        for ids outside the vocabulary, ContentUnsupported for a part that is not text. O(length of the prompt).
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, special_tokens=True) if prompt else []
        elif isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Sequence):
            raise TypeError(
                f"a prompt is a str, a list of token ids or a list of messages, got {type(prompt).__name__}"
            )
        elif len(prompt) and all(isinstance(item, Mapping) for item in prompt):
            ids = self._encode_messages(prompt, chat_template_kwargs)  # type: ignore[arg-type]
        else:
            ids = self._check_ids(prompt)
        if not ids:
            raise ValueError("the prompt is empty; a model needs at least one token to continue from")
        return tuple(ids)

    def _check_ids(self, prompt: Sequence[Any]) -> list[int]:
        for item in prompt:
            if isinstance(item, bool) or not isinstance(item, int):
                raise TypeError(f"a prompt list holds token ids or messages only, got {item!r}")
            if not 0 <= item < self._vocab_size:
                raise RequestError(f"token id {item} is outside the model's vocabulary of {self._vocab_size}")
        return list(prompt)

    def _encode_text(self, text: str, *, special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer: pass token ids, or give Runtime a tokenizer=")
        with self._lock:
            ids: list[int] = self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return ids

    def _encode_messages(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None
    ) -> list[int]:
        if self._tokenizer is None:
            raise ConfigError("this model has no tokenizer: pass token ids, or give Runtime a tokenizer=")
        if self._chat_template is None and getattr(self._tokenizer, "chat_template", None) is None:
            raise ConfigError("this model has no chat template: pass a str, or give Runtime a chat_template=")
        with self._lock:
            text = self._tokenizer.apply_chat_template(
                [_as_text(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._chat_template,
                **(chat_template_kwargs or {}),
            )
        return self._encode_text(text, special_tokens=False)


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the text parts of its content joined."""
    if not isinstance(message.get("role"), str):
        raise RequestError(f"each message needs a role, got keys {sorted(map(str, message))}")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if not isinstance(content, Sequence):
        raise ContentUnsupported(f"content must be text or a list of parts, got {type(content).__name__}")
    parts: list[str] = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "unnamed") if isinstance(part, Mapping) else type(part).__name__
            raise ContentUnsupported(f"a message part of type {kind!r} is not text; only text parts are supported")
        parts.append(part["text"])
    return {**message, "content": "".join(parts)}
