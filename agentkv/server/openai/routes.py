"""The endpoints of OpenAI's protocol."""

from __future__ import annotations

from fastapi import APIRouter

from ..documented import failures
from ..serving import Serving
from .chat import chat_router
from .completions import completions_router
from .dialect import OPENAI
from .models import models_router

__all__ = ["openai_router"]


def openai_router(serving: Serving) -> APIRouter:
    """All of them, over one runtime."""
    router = APIRouter(prefix="/v1", responses=failures(OPENAI), tags=["OpenAI"])
    for family in (chat_router, completions_router, models_router):
        router.include_router(family(serving))
    return router
