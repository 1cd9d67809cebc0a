"""What goes over the wire: JSON, and parts of a body past ASGI."""

from __future__ import annotations

import json
from typing import Any, Protocol

import orjson
from starlette.types import Scope

__all__ = ["WRITER", "BodyWriter", "body_writer", "to_json"]

WRITER = "agentkv.body_writer"
"""Among the `extensions` of a request's scope."""


def to_json(data: Any) -> bytes:
    """UTF-8 without spaces; a lone surrogate, which UTF-8 cannot hold and JSON can, is escaped."""
    try:
        return orjson.dumps(data)
    except TypeError:  # It knows no half characters and no whole numbers beyond 64 bits.
        return json.dumps(data, separators=(",", ":")).encode()


class BodyWriter(Protocol):
    """Writes parts of a body that has begun, without being awaited."""

    def ready(self) -> bool:
        """Whether the head is sent, the body has not ended, and what was written before is on its way."""

    def write(self, part: bytes) -> None:
        """One part, not empty."""


def body_writer(scope: Scope) -> BodyWriter | None:
    """That of a request's connection, where the server has one and the application is as `create_app` made it.

    A middleware that somebody put around it sees the parts of a body as they are sent by ASGI, all of them.
    """
    writer: BodyWriter | None = scope.get("extensions", {}).get(WRITER)
    return writer if writer is not None and len(scope["app"].user_middleware) == 1 else None
