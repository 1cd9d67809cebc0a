"""Who asks."""

from __future__ import annotations

from fastapi import Request

from .fields import CompletionFields

__all__ = ["caller_of"]


def caller_of(request: Request, body: CompletionFields) -> str | None:
    """The name in reports: the headers of sessions first, then the field of OpenAI's API."""
    headers = request.headers
    return headers.get("x-session-id") or headers.get("session-id") or body.prompt_cache_key or None
