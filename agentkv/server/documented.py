"""Answers that are the same for many endpoints, as the OpenAPI document tells of them."""

from __future__ import annotations

from typing import Any

from .dialect import Dialect

__all__ = ["STREAMED", "failures"]

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def failures(dialect: Dialect) -> dict[int | str, dict[str, Any]]:
    """Every status that is no success."""
    texts = {
        400: "The request cannot be as it is; `param` names the field.",
        401: "No key, or a wrong one.",
        404: "Another model than the one that is served.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        429: "The queue is full; come again after Retry-After seconds.",
        500: "A fault of the server, or of the model's numbers.",
        503: "Draining, or no room for now.",
    }
    return {status: {"model": dialect.error_model, "description": text} for status, text in texts.items()}
