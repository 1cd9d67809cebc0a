"""Answers that are the same for many endpoints, as the OpenAPI document tells of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from .dialect import Dialect

__all__ = ["Documented", "failures", "success", "success_or_stream"]


class Documented(BaseModel):
    """Of what is sent: no other field is, and one with a default may be absent. Never made of an answer."""

    model_config = ConfigDict(extra="forbid")


def success(model: type[Documented]) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint."""
    return {200: {"model": model, "description": "The answer."}}


def success_or_stream(model: type[Documented]) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint that streams where it is asked to."""
    return {
        200: {
            "model": model,
            "description": "The answer, or with `stream` its chunks as server-sent events.",
            "content": {"text/event-stream": {}},
        }
    }


def failures(dialect: Dialect) -> dict[int | str, dict[str, Any]]:
    """Every status that is no success."""
    texts = {
        400: "The request cannot be as it is; `param` names the field.",
        401: "No key, or a wrong one.",
        403: "A page of another site asks, or by another name than the server's.",
        404: "Another model than the one that is served.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        429: "The queue is full; come again after Retry-After seconds.",
        500: "A fault of the server, or of the model's numbers.",
        503: "Draining, or no room for now.",
    }
    return {status: {"model": dialect.error_model, "description": text} for status, text in texts.items()}
