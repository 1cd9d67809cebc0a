"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse

from ..dialect import Dialect
from ..documented import failures, success
from ..effort import template_options
from ..refusals import refused
from ..serving import Serving
from .answers import Detokenized, Tokenized
from .requests import DetokenizeRequest, TokenizeRequest

__all__ = ["tokens_router"]


def tokens_router(serving: Serving, dialect: Dialect) -> APIRouter:
    """Over one runtime; dialect: of the errors."""
    router = APIRouter(responses=failures(dialect), tags=["Tokens"])

    @router.post(
        "/tokenize",
        summary="The token ids of a text, or of messages by the chat template",
        responses=success(Tokenized),
    )
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        await serving.require_model(body.model)
        prompt, tools = body.asked()
        options = await template_options(serving, body.reasoning_effort, body.chat_template_kwargs)
        try:
            token_ids = await asyncio.to_thread(
                serving.runtime.token_ids, prompt, tools=tools, chat_template_kwargs=options, cache_salt=body.cache_salt
            )
        except (ValueError, TypeError, RecursionError) as error:
            place = "messages" if body.messages is not None else "prompt"
            raise refused(error, body, prompt=place, grammar="tools") from error
        limit = serving.runtime.context_limit
        return JSONResponse({"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids)})

    @router.post("/detokenize", summary="The text of token ids", responses=success(Detokenized))
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        await serving.require_model(body.model)
        try:
            text = await asyncio.to_thread(serving.text_of, body.tokens)
        except (ValueError, TypeError) as error:
            raise refused(error, body, prompt="tokens") from error
        return JSONResponse({"prompt": text})

    return router
