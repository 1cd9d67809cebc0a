"""`reasoning_effort` as options of the chat template, which is all that a model learns of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

from agentkv.chat import ChatTemplate

from .errors import ApiError
from .serving import Serving

__all__ = ["Effort", "template_options"]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


async def template_options(serving: Serving, effort: Effort | None, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the chat template is given: the options of the request, and what its effort says beside them.

    ApiError 400 for an effort that would change the answer, and that the template has no word for.
    """
    options = dict(given or {})
    if effort is None or "reasoning_effort" in options:
        return options
    template = serving.runtime.served_now().scribe.template
    # What a template can say is learnt once, by renderings.
    return {**await asyncio.to_thread(_in_its_words, template, effort), **options}


def _in_its_words(template: ChatTemplate, effort: Effort) -> dict[str, Any]:
    words: dict[str, Any] = {}
    if template.names("reasoning_effort"):
        words["reasoning_effort"] = effort
    if template.names("enable_thinking") and (effort == "none" or not words):
        # One that knows on and off alone: the medium is what it does by itself.
        words.update({} if effort == "medium" else {"enable_thinking": effort != "none"})
    elif not words and effort != "medium" and not (effort == "none" and template.traits().reasoning is None):
        raise ApiError(
            400,
            f"reasoning_effort {effort!r} is not supported here: this model's chat template names neither "
            f"reasoning_effort nor enable_thinking, so the answer would be the same; leave it out",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return words
