"""OpenAI's way: `{"error": {"message", "type", "param", "code"}}`, `data: [DONE]`, and keys as bearer tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.datastructures import Headers

from ..dialect import Dialect
from ..errors import ApiError
from ..wire import to_json

__all__ = ["OPENAI"]


class _Detail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    figures: dict[str, Any] | None = None


class ErrorBody(BaseModel):
    """What every answer that is no success holds."""

    error: _Detail


def _error_body(error: ApiError) -> dict[str, Any]:
    told = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": told | ({"figures": error.figures} if error.figures else {})}


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"


def _key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


OPENAI = Dialect(
    name="OpenAI",
    error_model=ErrorBody,
    error_body=_error_body,
    event=_event,
    end=b"data: [DONE]\n\n",
    key=_key,
    how_to_send="the header 'Authorization: Bearer KEY'",
    challenge={"WWW-Authenticate": "Bearer"},
    security={"type": "http", "scheme": "bearer"},
)
