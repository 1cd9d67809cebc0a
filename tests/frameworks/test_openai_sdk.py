"""The official Python SDK by itself, with the loop that its documentation shows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

import agentkv.sync
from agentkv import Runtime
from agentkv.clients.openai_client import openai_client
from agentkv.testing import scripted
from support.agent_turns import (
    FOLLOW_UP,
    INSTRUCTIONS,
    LAST_ANSWER,
    QUESTION,
    Turn,
    check_resent_history,
    find_book,
    in_odd_cuts,
    librarian,
    nth_answer,
    shelf_of,
    thoughtful,
)
from support.loopback import on_loopback

openai = pytest.importorskip("openai", reason="the extra `openai` is not installed")

FUNCTIONS: dict[str, Callable[..., str]] = {"find_book": find_book, "shelf_of": shelf_of}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "find_book",
            "description": "Look a book up by its title.",
            "parameters": {
                "type": "object",
                "properties": {"title": {"enum": ["atlas", "novel"]}, "section": {"enum": ["maps", "novels"]}},
                "required": ["title", "section"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "shelf_of",
            "parameters": {
                "type": "object",
                "properties": {"numbers": {"type": "array"}, "lent": {"type": "boolean"}},
                "required": ["numbers", "lent"],
            },
        },
    },
]


def turn_of(usage: Any) -> Turn:
    return Turn(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


def results_of(message: Any) -> list[dict[str, Any]]:
    """Each call answered; the message's own object goes back into the conversation as it is."""
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": FUNCTIONS[call.function.name](**json.loads(call.function.arguments)),
        }
        for call in message.tool_calls
    ]


async def whole(client: Any, **request: Any) -> Any:
    return await client.chat.completions.create(**request)


async def streamed(client: Any, **request: Any) -> Any:
    async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as stream:
        return await stream.get_final_completion()


async def chunk_by_chunk(client: Any, **request: Any) -> Any:
    """As programs do that read the chunks themselves; the SDK's own reader raises where an answer is cut."""
    content, usage = "", None
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or ():
                empty = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
                function = calls.setdefault(part.index, empty)["function"]
                function["name"] += part.function.name or ""
                function["arguments"] += part.function.arguments or ""
    message = openai.types.chat.ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": content or None, "tool_calls": list(calls.values()) or None}
    )
    return SimpleNamespace(usage=usage, choices=[SimpleNamespace(message=message)])


async def converse(client: Any, *questions: str, ask: Any = whole) -> tuple[Any, list[Turn]]:
    """The last message, and all turns."""
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}]
    turns: list[Turn] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            answer = await ask(client, model="scripted", messages=messages, tools=TOOLS, prompt_cache_key="librarian")
            turns.append(turn_of(answer.usage))
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += results_of(message)
    return message, turns


@pytest.mark.parametrize("ask", [whole, streamed, chunk_by_chunk])
async def test_an_agent_finds_its_resent_history_cached(client_of: Any, ask: Any) -> None:
    async with Runtime(scripted(librarian()), num_pages=1024) as runtime, client_of(runtime) as client:
        message, turns = await converse(client, QUESTION, FOLLOW_UP, ask=ask)
        assert message.content == LAST_ANSWER
        check_resent_history(turns, runtime, "librarian", least=5)


async def test_reasoning_goes_back_in_the_message_that_brought_it(client_of: Any) -> None:
    async with Runtime(scripted(thoughtful()), num_pages=1024) as runtime, client_of(runtime) as client:
        _, turns = await converse(client, FOLLOW_UP)
        check_resent_history(turns, runtime, "librarian")


@pytest.fixture(params=["http", "in_process"])
def blocking(request: pytest.FixtureRequest) -> Iterator[tuple[Runtime, Any]]:
    with agentkv.sync.Runtime(scripted(librarian()), num_pages=1024) as runtime:
        if request.param == "in_process":
            with openai_client(runtime, sync=True) as client:
                yield runtime.asynchronous, client
        else:
            with (
                on_loopback(runtime.asynchronous) as url,
                openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client,
            ):
                yield runtime.asynchronous, client


def test_the_blocking_client_finds_it_too_and_names_itself_by_a_header(blocking: tuple[Runtime, Any]) -> None:
    runtime, client = blocking
    messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
    turns: list[Turn] = []
    while True:
        answer = client.with_options(default_headers={"X-Session-ID": "by-header"}).chat.completions.create(
            model="scripted", messages=messages, tools=TOOLS
        )
        turns.append(turn_of(answer.usage))
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        messages += results_of(message)
    check_resent_history(turns, runtime, "by-header")


class Found(BaseModel):
    title: str
    shelf: int


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # The SDK's own, of the message that it made.
async def test_a_parsed_message_goes_back_as_it_is_and_hits_wholly(client_of: Any) -> None:
    texts = ['{"title":"Zürich, alt", "shelf": 2}', '{ "shelf":3,"title": "Atlas" }', '{"title": "Novel", "shelf": 4}']
    script = scripted(nth_answer([in_odd_cuts(text) for text in texts]))
    async with Runtime(script, num_pages=1024) as runtime, client_of(runtime) as client:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": QUESTION}]
        turns: list[Turn] = []
        for text in texts:
            answer = await client.chat.completions.parse(model="scripted", messages=messages, response_format=Found)
            message = answer.choices[0].message
            assert message.parsed == Found.model_validate_json(text)
            turns.append(turn_of(answer.usage))
            messages += [message, {"role": "user", "content": FOLLOW_UP}]
        for before, now in itertools.pairwise(turns):
            # The token that ended the answer was never run.
            assert now.cached >= before.prompt + before.output - 1


FIND: Any = {"type": "function", "function": {"name": "find_book"}}
"""Forced, for a model of this size calls nothing by itself."""


@pytest.mark.real_model
async def test_a_real_model_that_calls_and_answers_finds_its_history_cached(client_of: Any) -> None:
    async with Runtime("smollm2-135m") as runtime, client_of(runtime) as client:
        (model,) = (await client.models.list()).data
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": FOLLOW_UP}]
        turns: list[Turn] = []
        # Both a call and an answer are read whole once, and once chunk by chunk.
        for choice, ask in ((FIND, whole), ("none", chunk_by_chunk), (FIND, chunk_by_chunk), ("none", whole)):
            answer = await ask(
                client, model=model.id, messages=messages, tools=TOOLS, tool_choice=choice, seed=1,
                max_tokens=12 if choice == "none" else 40,
                prompt_cache_key="real",
            )  # fmt: skip
            turns.append(turn_of(answer.usage))
            message = answer.choices[0].message
            messages.append(message)
            messages += results_of(message) if message.tool_calls else [{"role": "user", "content": "Go on."}]
        assert sum(message["role"] == "tool" for message in messages if isinstance(message, dict)) == 2
        check_resent_history(turns, runtime, "real", least=4)


@pytest.mark.real_model
def test_a_real_model_asked_by_the_blocking_client_in_process_finds_its_history_cached() -> None:
    with agentkv.sync.Runtime("smollm2-135m") as runtime, openai_client(runtime, sync=True) as client:
        messages: list[Any] = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": FOLLOW_UP}]
        turns: list[Turn] = []
        for choice in (FIND, "none", "none"):
            answer = client.chat.completions.create(
                model=runtime.model_name, messages=messages, tools=TOOLS, tool_choice=choice, seed=1,
                max_tokens=12 if choice == "none" else 40,
                extra_body={"prompt_cache_key": "real"},
            )  # fmt: skip
            turns.append(turn_of(answer.usage))
            message = answer.choices[0].message
            messages.append(message)
            messages += results_of(message) if message.tool_calls else [{"role": "user", "content": "Go on."}]
        check_resent_history(turns, runtime.asynchronous, "real", least=3)
