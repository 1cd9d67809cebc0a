"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from agentkv.streams import CallStream

from ..answering import EventStream, Whole
from ..bodies import is_large
from ..calls import Asked, answers_of
from ..documented import success_or_stream
from ..effort import template_options
from ..errors import ApiError
from ..prompts import known_tools
from ..refusals import refused
from ..serving import Serving
from .answers import ChatCompletion
from .caller import caller_of
from .chat_answer import ChatChunks, chat_choice
from .chat_request import ChatRequest
from .chunks import streamed
from .dialect import OPENAI
from .head import head
from .usage import usage_of_answers

__all__ = ["add_chat"]


def add_chat(router: APIRouter, serving: Serving) -> None:
    """Conversations."""

    @router.post("/chat/completions", responses=success_or_stream(ChatCompletion), summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        await serving.require_model(body.model, request.receive)
        body.check()

        def blame(error: Exception) -> ApiError:
            return refused(error, body, prompt="messages", grammar="tools" if body.tools else "response_format")

        texts = await serving.token_texts() if body.logprobs else None
        for_template = await template_options(serving, body.reasoning_effort, body.chat_template_kwargs)

        def call() -> CallStream:
            return serving.runtime.stream(body.messages, name=caller_of(request, body), **body.options(for_template))

        try:
            # The schemas of tools that are new are checked, which takes milliseconds each.
            beside = await is_large(request) or known_tools(body.tools) is None
            stream = await asyncio.to_thread(call) if beside else call()
        except (ValueError, TypeError, RecursionError) as error:
            raise blame(error) from error
        asked = Asked([stream], blame, copies=body.copies)
        ids = body.return_token_ids

        if body.stream:
            answer = head("chat.completion.chunk", "chatcmpl", serving.model)
            return EventStream(
                lambda now: streamed(
                    asked,
                    answer,
                    lambda index: ChatChunks(index, texts, token_ids=ids),
                    with_usage=body.with_usage,
                    now=now,
                ),
                OPENAI,
                param="messages",
                patience=serving.patience,
            )

        async def whole() -> dict[str, Any]:
            answers = await answers_of(asked)
            choices = [chat_choice(each.reply, index, texts, token_ids=ids) for index, each in enumerate(answers)]
            answer = head("chat.completion", "chatcmpl", serving.model)
            return answer.with_choices(choices, usage=usage_of_answers(answers))

        return Whole(whole, OPENAI, param="messages")
