"""Calls as bodies of OpenAI's protocol, and which options of a call have no place there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from agentkv.chat import Message, to_openai
from agentkv.errors import NotOverHTTP
from agentkv.sampling_params import SamplingParams
from agentkv.session import CallOptions

__all__ = ["CHAT", "TEXT", "chat_body", "refuse_what_cannot_be_sent", "text_body"]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

_DEFAULTS = SamplingParams()
_SENT = tuple(
    field.name for field in fields(SamplingParams) if field.name not in ("temperature", "logprobs", "prompt_logprobs")
)


def refuse_what_cannot_be_sent(options: CallOptions) -> None:
    """Raise NotOverHTTP for an option that would be lost on the way."""
    instead = "leave it out, or open the model in this process with agentkv.Runtime"
    if not options.cache:
        raise NotOverHTTP("cache=False", f"{instead}; a cache_salt of its own shares no page with other calls")
    if options.tags:
        raise NotOverHTTP("tags", f"{instead}; a name is told to the server")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(options.params, name) is not None:
            raise NotOverHTTP(name, f"the server tells texts and no token ids; {instead}")


def chat_body(model: str, messages: Sequence[Message], options: CallOptions) -> dict[str, Any]:
    """Of a conversation."""
    body = {**_body(model, options), "messages": to_openai(messages)}
    if options.tools:
        body["tools"] = options.schemas
        choice = options.tool_choice
        named = {"type": "function", "function": {"name": choice}}
        body["tool_choice"] = choice if choice in ("auto", "none", "required") else named
        if not options.parallel_tool_calls:
            body["parallel_tool_calls"] = False
    if options.answer_format is not None:
        schema = options.answer_format.schema
        by_schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body["response_format"] = {"type": "json_object"} if schema is None else by_schema
    if options.template_kwargs:
        body["chat_template_kwargs"] = dict(options.template_kwargs)
    return body


def text_body(model: str, prompt: str | Sequence[int], options: CallOptions) -> dict[str, Any]:
    """Of a plain prompt."""
    return {**_body(model, options), "prompt": prompt if isinstance(prompt, str) else list(prompt)}


def _body(model: str, options: CallOptions) -> dict[str, Any]:
    # An absent temperature is 1.0 in this protocol and 0 here, so it is always sent.
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": options.params.temperature,
        **_changed(options.params),
    }
    others: Mapping[str, Any] = {
        "n": options.n if options.n > 1 else None,
        "prompt_cache_key": options.name,
        "cache_salt": options.cache_salt,
    }
    return body | {name: value for name, value in others.items() if value is not None}


def _changed(params: SamplingParams) -> dict[str, Any]:
    """What is not as it is by default, as JSON has it."""
    changed = {}
    for name in _SENT:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            changed[name] = list(value) if isinstance(value, (tuple, list)) else value
    return changed
