"""The endpoints of OpenAI's protocol."""

from __future__ import annotations

from fastapi import APIRouter

from ..bodies import LargeBodyRoute
from ..documented import failures
from ..serving import Serving
from .chat import add_chat
from .completions import add_completions
from .dialect import OPENAI
from .models import add_models

__all__ = ["openai_router"]


def openai_router(serving: Serving) -> APIRouter:
    """All of them, over one runtime. One router, for each that lies in another is looked through by every request."""
    router = APIRouter(prefix="/v1", responses=failures(OPENAI), tags=["OpenAI"], route_class=LargeBodyRoute)
    add_chat(router, serving)
    add_completions(router, serving)
    add_models(router, serving)
    return router
