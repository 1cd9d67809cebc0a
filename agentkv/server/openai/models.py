"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ..serving import Serving

__all__ = ["models_router"]


def models_router(serving: Serving) -> APIRouter:
    """The one model that is served."""
    router = APIRouter()

    @router.get("/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        await serving.runtime.start()
        return {"object": "list", "data": [_model(serving)]}

    @router.get("/models/{model:path}", summary="One model")
    async def model(model: str) -> dict[str, Any]:
        await serving.require_model(model)
        return _model(serving)

    return router


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": 0,
        "owned_by": "agentkv",
        "max_model_len": serving.runtime.context_limit,
    }
