"""The endpoints of OpenAI's protocol, and the two that open-model servers add to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ..answering import EventStream, Whole
from ..errors import ApiError, ErrorBody
from ..serving import Serving
from .calls import Answered, Asked, answers_of, head, streamed
from .chat_answer import ChatChunks, chat_choice
from .chat_request import ChatRequest
from .completion_answer import CompletionChunks, Echo, completion_choice
from .completion_request import CompletionRequest
from .refusals import refused
from .token_logprobs import TokenTexts
from .tokens import DetokenizeRequest, TokenizeRequest
from .usage import usage_of

__all__ = ["openai_router"]

_FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be as it is; `param` names the field.",
        401: "No key, or a wrong one.",
        404: "Another model than the one that is served.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        429: "The queue is full; come again after Retry-After seconds.",
        500: "A fault of the server, or of the model's numbers.",
        503: "Draining, or no room for now.",
    }.items()
}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its chunks as server-sent events.",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def openai_router(serving: Serving) -> APIRouter:
    """Routes over one runtime."""
    router = APIRouter(responses=_FAILURES)

    @router.post("/v1/chat/completions", responses=_STREAMED, tags=["OpenAI"], summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        await serving.require_model(body.model)
        body.check()

        def blame(error: Exception) -> ApiError:
            return refused(error, body, prompt="messages", grammar="tools" if body.tools else "response_format")

        try:
            stream = serving.runtime.stream(body.messages, name=_caller(request, body), **body.options())
        except (ValueError, TypeError, RecursionError) as error:
            raise blame(error) from error
        asked = Asked([stream], blame, copies=body.copies, one_call=body.parallel_tool_calls is False)
        texts = _texts(serving) if body.logprobs else None
        ids = body.return_token_ids

        if body.stream:
            answer = head("chat.completion.chunk", "chatcmpl", serving.model)
            return EventStream(
                lambda: streamed(
                    asked, answer, lambda index: ChatChunks(index, texts, token_ids=ids), with_usage=body.with_usage
                ),
                param="messages",
            )

        async def whole() -> dict[str, Any]:
            answers = await answers_of(asked)
            choices = [chat_choice(each.reply, index, texts, token_ids=ids) for index, each in enumerate(answers)]
            return head("chat.completion", "chatcmpl", serving.model).with_choices(choices, usage=_usage(answers))

        return Whole(whole, param="messages")

    @router.post("/v1/completions", responses=_STREAMED, tags=["OpenAI"], summary="Continue text or token ids")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        await serving.require_model(body.model)
        body.check()
        options, name = body.options(), _caller(request, body)

        def blame(error: Exception) -> ApiError:
            return refused(error, body, prompt="prompt")

        try:
            streams = [serving.runtime.stream(prompt, name=name, **options) for prompt in body.prompts]
            echoes = await _echoes(serving, body)
        except (ValueError, TypeError) as error:
            raise blame(error) from error
        asked = Asked(streams, blame, copies=body.copies)
        texts = _texts(serving) if body.logprobs is not None else None
        ids, n = body.return_token_ids, body.choices

        def echo(index: int) -> Echo | None:
            return echoes[index // n] if echoes else None

        if body.stream:
            answer = head("text_completion", "cmpl", serving.model)
            return EventStream(
                lambda: streamed(
                    asked,
                    answer,
                    lambda index: CompletionChunks(index, texts, echo=echo(index), token_ids=ids),
                    with_usage=body.with_usage,
                ),
                param="prompt",
            )

        async def whole() -> dict[str, Any]:
            answers = await answers_of(asked)
            choices = [
                completion_choice(each.reply, index, texts, echo=echo(index), token_ids=ids)
                for index, each in enumerate(answers)
            ]
            return head("text_completion", "cmpl", serving.model).with_choices(choices, usage=_usage(answers))

        return Whole(whole, param="prompt")

    @router.get("/v1/models", tags=["OpenAI"], summary="The model that is served")
    async def models() -> dict[str, Any]:
        await serving.runtime.start()
        return {"object": "list", "data": [_model(serving)]}

    @router.get("/v1/models/{model:path}", tags=["OpenAI"], summary="One model")
    async def model(model: str) -> dict[str, Any]:
        await serving.require_model(model)
        return _model(serving)

    @router.post("/tokenize", tags=["Tokens"], summary="The token ids of a text, or of messages by the chat template")
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        await serving.require_model(body.model)
        prompt, tools = body.asked()
        try:
            token_ids = await asyncio.to_thread(serving.runtime.token_ids, prompt, tools=tools)
        except (ValueError, TypeError, RecursionError) as error:
            place = "messages" if body.messages is not None else "prompt"
            raise refused(error, body, prompt=place, grammar="tools") from error
        limit = serving.runtime.context_limit
        return JSONResponse({"count": len(token_ids), "max_model_len": limit, "tokens": list(token_ids)})

    @router.post("/detokenize", tags=["Tokens"], summary="The text of token ids")
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        await serving.require_model(body.model)
        try:
            text = await asyncio.to_thread(serving.text_of, body.tokens)
        except (ValueError, TypeError) as error:
            raise refused(error, body, prompt="tokens") from error
        return JSONResponse({"prompt": text})

    return router


def _caller(request: Request, body: ChatRequest | CompletionRequest) -> str | None:
    """Who calls, in reports: the headers of sessions first, then the field of OpenAI's API."""
    headers = request.headers
    return headers.get("x-session-id") or headers.get("session-id") or body.prompt_cache_key or None


def _usage(answers: Sequence[Answered]) -> dict[str, Any]:
    reasoning_tokens = sum(each.reasoning_tokens for each in answers)
    return usage_of([each.reply for each in answers], reasoning_tokens=reasoning_tokens)


def _texts(serving: Serving) -> TokenTexts:
    return TokenTexts(serving.token_bytes)


async def _echoes(serving: Serving, body: CompletionRequest) -> list[Echo]:
    if not body.echo:
        return []

    def made() -> list[Echo]:
        runtime = serving.runtime
        pairs = [(prompt, runtime.token_ids(prompt)) for prompt in body.prompts]
        return [Echo(prompt if isinstance(prompt, str) else serving.text_of(prompt), ids) for prompt, ids in pairs]

    return await asyncio.to_thread(made)


def _model(serving: Serving) -> dict[str, Any]:
    return {
        "id": serving.model,
        "object": "model",
        "created": 0,
        "owned_by": "agentkv",
        "max_model_len": serving.runtime.context_limit,
    }
