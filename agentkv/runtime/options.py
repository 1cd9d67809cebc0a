"""The options of a call, checked before it is sent, and the length that its answer may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentkv.errors import ConfigError, ContextOverflow, PromptTooLarge
from agentkv.sampling_params import SamplingParams

from .opening import Opened

__all__ = ["check_options", "refuse_tools", "with_max_tokens"]

_DEFAULT_MAX_TOKENS = 1024


def with_max_tokens(
    params: SamplingParams, prompt_tokens: int, n: int, opened: Opened, *, use_cache: bool
) -> SamplingParams:
    """The parameters with max_tokens set, or ContextOverflow or PromptTooLarge with the numbers."""
    context_left = opened.context_limit - prompt_tokens
    # The n answers share the prompt's whole pages, if they may share at all, and each goes on in pages of its own.
    shared = prompt_tokens // opened.page_size if n > 1 and use_cache else 0
    max_tokens = params.max_tokens
    if max_tokens is None:
        pages_each = shared + (opened.usable_pages - shared) // n
        max_tokens = max(1, min(_DEFAULT_MAX_TOKENS, context_left, pages_each * opened.page_size - prompt_tokens))
    if max_tokens > context_left:
        raise ContextOverflow(prompt_tokens, max_tokens, opened.context_limit)
    each = -(-(prompt_tokens + max_tokens) // opened.page_size) - shared
    if shared + n * each > opened.usable_pages:
        raise PromptTooLarge(shared + n * each, opened.usable_pages, opened.page_size)
    return SamplingParams.from_kwargs(params, max_tokens=max_tokens)


def check_options(*, cache: object, cache_salt: object, name: object, tags: object) -> None:
    if not isinstance(cache, bool):
        raise TypeError(f"cache must be True or False, got {cache!r}")
    for option, value in (("cache_salt", cache_salt), ("name", name)):
        if value is not None and not isinstance(value, str):
            raise TypeError(f"{option} must be a str or None, got {value!r}")
    if tags != ():
        raise ConfigError("tags= comes with the reports of a later version of agentkv; leave it out")


def refuse_tools(tools: Sequence[Any], tool_choice: str) -> None:
    if tools or tool_choice != "auto":
        raise ConfigError("tools= and tool_choice= come with a later version of agentkv; leave them out")
