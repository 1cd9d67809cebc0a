"""pydantic-ai: an agent with two tools, asked twice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.testing import scripted
from support.agent_turns import (
    FOLLOW_UP,
    INSTRUCTIONS,
    LAST_ANSWER,
    QUESTION,
    Turn,
    check_resent_history,
    find_book,
    find_one_of_two,
    librarian,
    shelf_of,
    thoughtful,
)

pydantic_ai = pytest.importorskip("pydantic_ai", reason="the extra `frameworks` is not installed: no pydantic-ai")


def an_agent(client: Any, model: str, *, find: Any = find_book, **settings: Any) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return pydantic_ai.Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client)),
        instructions=INSTRUCTIONS,
        tools=[find, shelf_of],
        model_settings={"openai_prompt_cache_key": "library", **settings},
    )


def turns_of(messages: Iterable[Any]) -> list[Turn]:
    return [
        Turn(message.usage.input_tokens, message.usage.cache_read_tokens, message.usage.output_tokens)
        for message in messages
        if message.kind == "response"
    ]


async def whole(agent: Any, question: str, history: Any = None) -> Any:
    return await agent.run(question, message_history=history)


async def streamed(agent: Any, question: str, history: Any = None) -> Any:
    async def read(context: Any, events: Any) -> None:
        async for _ in events:
            pass

    # run_stream would take the text beside a call for the answer, and stop there.
    return await agent.run(question, message_history=history, event_stream_handler=read)


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_an_agent_with_two_tools_finds_its_resent_history_cached(client_of: Any, ask: Any) -> None:
    async with Runtime(scripted(librarian()), num_pages=1024) as runtime, client_of(runtime) as client:
        agent = an_agent(client, "scripted")
        first = await ask(agent, QUESTION)
        last = await ask(agent, FOLLOW_UP, first.all_messages())
        assert last.output == LAST_ANSWER
        check_resent_history(turns_of(last.all_messages()), runtime, "library", least=5)


async def test_reasoning_goes_back_by_itself_and_is_found_cached(client_of: Any) -> None:
    async with Runtime(scripted(thoughtful()), num_pages=1024) as runtime, client_of(runtime) as client:
        result = await an_agent(client, "scripted").run(FOLLOW_UP)
        check_resent_history(turns_of(result.all_messages()), runtime, "library")


def a_call_first(context: Any) -> dict[str, Any]:
    """A call of find_book after each question, then words; a choice that held throughout would never end."""
    return {"tool_choice": ["find_book"] if context.run_step == 1 else "none"}


@pytest.mark.real_model
async def test_a_real_model_that_calls_and_answers_finds_its_history_cached(client_of: Any) -> None:
    async with Runtime("smollm2-135m") as runtime, client_of(runtime) as client:
        agent = an_agent(client, runtime.model_name, find=find_one_of_two, max_tokens=32, temperature=0.0)
        first = await agent.run(QUESTION, model_settings=a_call_first)
        last = await agent.run(FOLLOW_UP, message_history=first.all_messages(), model_settings=a_call_first)
        check_resent_history(turns_of(last.all_messages()), runtime, "library", least=4)
