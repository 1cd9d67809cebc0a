"""What protocols do each in their own way around their answers: errors, events, and where a client puts its key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.responses import Response

from .errors import ApiError
from .wire import to_json

__all__ = ["Dialect", "error_event", "error_response"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One for each protocol; the application chooses it by the request's path.

    name          of the protocol, as the document has it
    error_model   of the document
    event         a server-sent event with this data
    end           what follows a stream's last event, if it ended well
    key           the one that a request brings; None where it brings none
    how_to_send   a key, in the words of the answer to a request without
    challenge     headers of that answer
    security      a key, as the document has it
    """

    name: str
    error_model: type[BaseModel]
    error_body: Callable[[ApiError], Mapping[str, Any]]
    event: Callable[[Mapping[str, Any]], bytes]
    end: bytes
    key: Callable[[Headers], str | None]
    how_to_send: str
    challenge: Mapping[str, str]
    security: Mapping[str, str]


def error_response(error: ApiError, dialect: Dialect) -> Response:
    """The whole answer."""
    body = to_json(dialect.error_body(error))
    return Response(body, status_code=error.status, headers=error.headers, media_type="application/json")


def error_event(error: ApiError, dialect: Dialect) -> bytes:
    """The last event of a stream that fails after it began."""
    return dialect.event(dialect.error_body(error))
