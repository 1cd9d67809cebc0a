"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..answering import EventStream, Now, Whole
from ..calls import Asked, answers_of
from ..documented import success_or_stream
from ..errors import ApiError
from ..refusals import refused
from ..serving import Serving
from .answers import Completion
from .caller import caller_of
from .chunks import streamed
from .completion_answer import CompletionChunks, Echo, completion_choice
from .completion_request import CompletionRequest
from .dialect import OPENAI
from .head import head
from .usage import usage_of_answers

__all__ = ["add_completions"]


def add_completions(router: APIRouter, serving: Serving) -> None:
    """Text and token ids."""

    @router.post("/completions", responses=success_or_stream(Completion), summary="Continue text or token ids")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        await serving.require_model(body.model, request.receive)
        body.check()
        name = caller_of(request, body)

        def blame(error: Exception) -> ApiError:
            return refused(error, body, prompt="prompt")

        try:
            streams = [serving.runtime.stream(prompt, name=name, **body.options()) for prompt in body.prompts]
        except (ValueError, TypeError) as error:
            raise blame(error) from error
        asked = Asked(streams, blame, copies=body.copies, prompt_only=body.prompt_only)
        texts = await serving.token_texts() if body.logprobs is not None else None
        ids = body.return_token_ids

        if body.stream:
            answer = head("text_completion", "cmpl", serving.model)

            async def chunks(now: Now) -> AsyncGenerator[Mapping[str, Any]]:
                echoes = await _echoes(serving, body, blame)
                made = streamed(
                    asked,
                    answer,
                    lambda index: CompletionChunks(index, texts, echo=echoes[index], token_ids=ids),
                    with_usage=body.with_usage,
                    now=now,
                )
                async with aclosing(made):
                    async for chunk in made:
                        yield chunk

            return EventStream(
                chunks,
                OPENAI,
                param="prompt",
                patience=serving.patience,
            )

        async def whole() -> dict[str, Any]:
            echoes = await _echoes(serving, body, blame)
            answers = await answers_of(asked)
            choices = [
                completion_choice(each.reply, index, texts, echo=echoes[index], token_ids=ids)
                for index, each in enumerate(answers)
            ]
            answer = head("text_completion", "cmpl", serving.model)
            return answer.with_choices(choices, usage=usage_of_answers(answers))

        return Whole(whole, OPENAI, param="prompt")


async def _echoes(
    serving: Serving, body: CompletionRequest, blame: Callable[[Exception], ApiError]
) -> Sequence[Echo | None]:
    """For each choice."""
    if not body.echo:
        return [None] * (len(body.prompts) * body.choices)

    def made() -> list[Echo]:
        runtime = serving.runtime
        pairs = [(prompt, runtime.token_ids(prompt)) for prompt in body.prompts]
        return [Echo(prompt if isinstance(prompt, str) else serving.text_of(prompt), ids) for prompt, ids in pairs]

    try:
        return [echo for echo in await asyncio.to_thread(made) for _ in range(body.choices)]
    except (ValueError, TypeError) as error:
        raise blame(error) from error
