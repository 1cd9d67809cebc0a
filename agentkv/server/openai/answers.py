"""Answers as the OpenAPI document describes them. Nothing is checked by these as it is sent: they cost no request."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..documented import Documented

__all__ = ["ChatCompletion", "Completion", "Model", "ModelList"]

_Finish = Literal["stop", "length", "tool_calls", "cancelled"]


class _Called(Documented):
    name: str
    arguments: str


class _ToolCall(Documented):
    id: str
    type: Literal["function"]
    function: _Called


class _ChatMessage(Documented):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: Annotated[list[_ToolCall], Field(default_factory=list)]


class _Likely(Documented):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(_Likely):
    top_logprobs: list[_Likely]


class _ChatLogprobs(Documented):
    content: list[_TokenLogprob]
    refusal: None


class _ChatChoice(Documented):
    index: int
    message: _ChatMessage
    finish_reason: _Finish
    logprobs: _ChatLogprobs | None
    token_ids: Annotated[list[int], Field(default_factory=list)]


class _Cached(Documented):
    cached_tokens: int


class _Reasoned(Documented):
    reasoning_tokens: int


class _Usage(Documented):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached
    completion_tokens_details: _Reasoned


class ChatCompletion(Documented):
    """A whole answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[_ChatChoice]
    usage: _Usage


class _CompletionLogprobs(Documented):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _CompletionChoice(Documented):
    index: int
    text: str
    finish_reason: _Finish
    logprobs: _CompletionLogprobs | None
    token_ids: Annotated[list[int], Field(default_factory=list)]


class Completion(Documented):
    """A whole answer to one prompt or more."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[_CompletionChoice]
    usage: _Usage


class Model(Documented):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Documented):
    """All of them."""

    object: Literal["list"]
    data: list[Model]
