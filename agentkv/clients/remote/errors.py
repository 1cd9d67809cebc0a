"""Errors of a server as the same errors that a Runtime in this process raises.

| what the server says                          | what is raised                                            |
|-----------------------------------------------|-----------------------------------------------------------|
| the name of an error as code, in words        | that error; one of fewer figures where they are not told  |
| code context_length_exceeded                  | ContextOverflow                                           |
| code no_room                                  | PoolFull, or CapacityError                                |
| code draining or closed                       | RuntimeClosed                                             |
| code invalid_api_key, other 401, 403          | ConfigError                                               |
| other 400, 413, 422                           | RequestError                                              |
| other 429, 408, 503                           | CapacityError                                             |
| anything else                                 | ServerUnreachable                                         |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from agentkv.errors import (
    AgentKVError,
    CapacityError,
    ConfigError,
    ContextOverflow,
    PoolFull,
    RequestError,
    RuntimeClosed,
    ServerUnreachable,
)

__all__ = ["error_of", "error_of_body"]


def _family(kind: type[AgentKVError]) -> Iterator[type[AgentKVError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _family(one)


_BY_CODE: Mapping[str, type[AgentKVError]] = {
    **{re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in _family(AgentKVError)},
    "closed": RuntimeClosed,
    "context_length_exceeded": ContextOverflow,
    "draining": RuntimeClosed,
    "invalid_api_key": ConfigError,
    "no_room": PoolFull,
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
    except (ValueError, TypeError, KeyError, RecursionError):
        detail = None
    if not isinstance(detail, str) and not (isinstance(detail, Mapping) and "message" in detail):
        return ServerUnreachable(f"{where} answered {status}, and not as a server of OpenAI's protocol does")
    return error_of(detail, status)


def error_of(detail: object, status: int | None = None) -> AgentKVError:
    """Of `{"message", "type", "param", "code", "figures"}`, or of a text, as some servers have it.

    status: None where it came in the middle of a stream
    """
    fields: Mapping[str, Any] = detail if isinstance(detail, Mapping) else {"message": detail}
    message, code, figures = str(fields.get("message")), fields.get("code"), fields.get("figures")
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        kind = _BY_STATUS.get(status) if status is not None else _BY_TYPE.get(str(fields.get("type")))
    if kind is None:
        return ServerUnreachable(message)
    carried = figures if isinstance(figures, Mapping) else {}
    while not carried.keys() >= set(kind.carries):
        # Another server's, which has the code and tells no figures: the next wider error has none.
        (kind,) = (base for base in kind.__bases__ if issubclass(base, AgentKVError))
    return kind.told(message, carried)
