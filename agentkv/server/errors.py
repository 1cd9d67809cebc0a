"""Errors as answers: a status, and what any protocol's error body is made of.

| status | what happened                                              |
|--------|------------------------------------------------------------|
| 400    | the request cannot be as it is; `param` names the field     |
| 401    | no key, or a wrong one                                      |
| 403    | another site's page asks, or by a name that is not ours     |
| 404    | unknown model or path                                       |
| 405    | known path, other method                                    |
| 408    | the body did not come in time                               |
| 413    | the body is too large                                       |
| 431    | the head is too large                                       |
| 429    | the queue is full; Retry-After says when to come again      |
| 500    | a fault of ours, or of the model's numbers                  |
| 503    | draining, closed, or no room for now                        |
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from agentkv.errors import (
    AgentKVError,
    CapacityError,
    ContextOverflow,
    EngineFailed,
    GrammarDeadEnd,
    PoolFull,
    QueueFull,
    RequestError,
    RuntimeClosed,
)

__all__ = ["ApiError", "api_error", "code_of", "unavailable"]

_log = logging.getLogger("agentkv.server")

RETRY_AFTER_SECONDS = 1

_CODES: Mapping[type[AgentKVError], str] = {
    CapacityError: "no_room",
    ContextOverflow: "context_length_exceeded",  # OpenAI's own, which frameworks look for.
    PoolFull: "no_room",
    RuntimeClosed: "closed",
}


class ApiError(Exception):
    """A request that ends with a status and a body that says why, in the shape of the client's protocol."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """figures: what the message says in words."""
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.headers, self.figures = dict(headers or {}), dict(figures or {})


def api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """Any error of a call as the answer that tells the client what it can do.

    param: the field that a request error is about, where the caller knows it.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError | GrammarDeadEnd):
        return ApiError(400, str(error), param=param, code=code_of(error), figures=error.carried)
    if isinstance(error, QueueFull):
        return ApiError(
            429, str(error), type="rate_limit_error", code=code_of(error), figures=error.carried,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )  # fmt: skip
    if isinstance(error, RuntimeClosed):
        return unavailable("the server is closing", code=code_of(error))
    if isinstance(error, CapacityError):
        return unavailable(str(error), code=code_of(error), figures=error.carried)
    if isinstance(error, EngineFailed | AgentKVError):
        return ApiError(500, str(error), type="server_error", code=code_of(error), figures=error.carried)
    # A bug of ours: what it says may hold anything, so it goes to the log and not to the client.
    _log.error("a request ended by an unexpected error", exc_info=error)
    return ApiError(500, "an internal error; the server's log has it", type="server_error", code="internal_error")


def code_of(error: AgentKVError) -> str:
    """Its class in words, `grammar_dead_end`, where clients do not know another code for it."""
    return _CODES.get(type(error)) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()


def unavailable(message: str, *, code: str, figures: Mapping[str, Any] | None = None) -> ApiError:
    """503 with Retry-After."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return ApiError(503, message, type="server_error", code=code, headers=headers, figures=figures)
