"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from ..documented import success
from ..serving import Serving
from .answers import Model, ModelList

__all__ = ["add_models"]


def add_models(router: APIRouter, serving: Serving) -> None:
    """The one model that is served."""

    @router.get("/models", summary="The model that is served", responses=success(ModelList))
    async def models(request: Request) -> JSONResponse:
        await serving.require_loaded(request.receive)
        return JSONResponse({"object": "list", "data": [_model(serving)]})

    @router.get("/models/{model:path}", summary="One model", responses=success(Model))
    async def model(model: str, request: Request) -> JSONResponse:
        await serving.require_model(model, request.receive)
        return JSONResponse(_model(serving))


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": 0,
        "owned_by": "agentkv",
        "max_model_len": serving.runtime.context_limit,
    }
