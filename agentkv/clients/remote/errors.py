"""Errors of a server as the same errors that a Runtime in this process raises.

| what the server says                          | what is raised                                  |
|-----------------------------------------------|-------------------------------------------------|
| code context_length_exceeded                  | ContextOverflow, with the numbers of its text   |
| other 400, 413, 422                           | RequestError                                    |
| 401, 403                                      | ConfigError                                     |
| code model_not_found                          | ModelNotFound                                   |
| code queue_full                               | QueueFull, with the numbers of its text         |
| other 429, 408, code no_room, other 503       | CapacityError                                   |
| code draining or closed                       | RuntimeClosed                                   |
| the name of an error as code, in words        | that error                                      |
| anything else                                 | ServerUnreachable                               |
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from agentkv.errors import (
    AgentKVError,
    BrokenLogits,
    CapacityError,
    ConfigError,
    ContentUnsupported,
    ContextOverflow,
    DownloadFailed,
    EngineFailed,
    GrammarDeadEnd,
    InternalError,
    ModelError,
    ModelNotFound,
    QueueFull,
    RequestError,
    RuntimeClosed,
    ServerUnreachable,
)

__all__ = ["error_of", "error_of_body"]

_CONTEXT = re.compile(r"prompt ([\d,]+) \+ max_tokens ([\d,]+) = [\d,]+ tokens; (.+) reads ([\d,]+)\.")
_QUEUE = re.compile(r"(\d+) calls are waiting and max_queue is (\d+)")
_BY_NAME = (BrokenLogits, ContentUnsupported, DownloadFailed, EngineFailed, GrammarDeadEnd, InternalError, ModelError)
_BY_CODE: Mapping[str, type[AgentKVError]] = {
    "closed": RuntimeClosed,
    "draining": RuntimeClosed,
    "invalid_api_key": ConfigError,
    "model_not_found": ModelNotFound,
    "no_room": CapacityError,
    **{re.sub(r"(?<=[a-z])(?=[A-Z])", "_", error.__name__).lower(): error for error in _BY_NAME},
}
_BY_STATUS: Mapping[int, type[AgentKVError]] = {
    400: RequestError,
    401: ConfigError,
    403: ConfigError,
    408: CapacityError,
    413: RequestError,
    422: RequestError,
    429: CapacityError,
    503: CapacityError,
}
_BY_TYPE: Mapping[str, type[AgentKVError]] = {
    "invalid_request_error": RequestError,
    "rate_limit_error": CapacityError,
}
"""For errors in the middle of a stream, which have no status of their own."""


def error_of_body(status: int, body: bytes, where: str) -> AgentKVError:
    """Of an answer that is no success. where: what was asked, for answers that are of no server of this kind."""
    try:
        detail = json.loads(body)["error"]
        message = str(detail["message"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ServerUnreachable(f"{where} answered {status}, and not as a server of OpenAI's protocol does")
    return error_of({**detail, "message": message}, status)


def error_of(detail: Mapping[str, Any], status: int | None = None) -> AgentKVError:
    """Of `{"message", "type", "param", "code"}`; status: None where it came in the middle of a stream."""
    message, code = str(detail.get("message")), detail.get("code")
    if code == "context_length_exceeded" and (found := _CONTEXT.search(message)):
        prompt_tokens, max_tokens, model, limit = found.groups()
        return ContextOverflow(_number(prompt_tokens), _number(max_tokens), _number(limit), model=model)
    if code == "queue_full" and (found := _QUEUE.search(message)):
        return QueueFull(int(found[1]), int(found[2]))
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        kind = _BY_STATUS.get(status) if status is not None else _BY_TYPE.get(str(detail.get("type")))
    return (kind or ServerUnreachable)(message)


def _number(text: str) -> int:
    return int(text.replace(",", ""))
