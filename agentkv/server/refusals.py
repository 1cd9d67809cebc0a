"""A call that the runtime cannot make as it was asked: whose field it is, in the words that the runtime has for it."""

from __future__ import annotations

import re

from pydantic import BaseModel

from agentkv.errors import AgentKVError, ConfigError, ContextOverflow

from .errors import ApiError, api_error, code_of

__all__ = ["refused"]


def refused(error: Exception, body: BaseModel, *, prompt: str, grammar: str | None = None) -> ApiError:
    """What the runtime says of its arguments is for the client, 400 with the field.

    The runtime names an option first in what it says of it, and options that fields set have the fields' names.

    prompt: the field that all else is about; grammar: the one whose schemas no grammar expresses, which is a
    ConfigError of a call that has begun
    """
    if isinstance(error, RecursionError):
        return ApiError(400, "the request is nested too deeply to be read", param=prompt)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), param=grammar or prompt, code=code_of(error))
    if isinstance(error, AgentKVError):
        return api_error(error, param=_length_asked(error, body) or prompt)
    named = re.match(r"\w+", str(error))
    fields = type(body).model_fields
    param = named[0] if named is not None and named[0] in fields else prompt
    return ApiError(400, str(error), param=param)


def _length_asked(error: AgentKVError, body: BaseModel) -> str | None:
    """The field that asks for a longer answer than any prompt leaves room for."""
    if not isinstance(error, ContextOverflow) or error.max_tokens < error.limit:
        return None
    fields = ("max_completion_tokens", "max_tokens")
    return next((field for field in fields if getattr(body, field, None) is not None), None)
