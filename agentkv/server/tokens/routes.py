"""`POST /tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answering import Whole
from ..bodies import LargeBodyRoute
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
    router = APIRouter(responses=failures(dialect), tags=["Tokens"], route_class=LargeBodyRoute)

    @router.post(
        "/tokenize",
        summary="The token ids of a text, or of messages by the chat template",
        responses=success(Tokenized),
    )
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        await serving.require_model(body.model, request.receive)

        async def made() -> dict[str, Any]:
            options = await template_options(serving, body.reasoning_effort, body.chat_template_kwargs)
            try:
                token_ids = await asyncio.to_thread(_token_ids, serving, body, options)
            except (ValueError, TypeError, RecursionError) as error:
                place = "messages" if body.messages is not None else "prompt"
                raise refused(error, body, prompt=place, grammar="tools") from error
            limit = serving.runtime.context_limit
            return {"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids)}

        return Whole(made, dialect)

    @router.post("/detokenize", summary="The text of token ids", responses=success(Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        await serving.require_model(body.model, request.receive)

        async def made() -> dict[str, Any]:
            try:
                return {"prompt": await asyncio.to_thread(serving.text_of, body.tokens)}
            except (ValueError, TypeError) as error:
                raise refused(error, body, prompt="tokens") from error

        return Whole(made, dialect)

    return router


def _token_ids(serving: Serving, body: TokenizeRequest, options: Mapping[str, Any]) -> Sequence[int]:
    prompt, tools = body.asked()
    return serving.runtime.token_ids(prompt, tools=tools, chat_template_kwargs=options, cache_salt=body.cache_salt)
