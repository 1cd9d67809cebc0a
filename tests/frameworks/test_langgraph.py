"""LangGraph: the agent that `langchain.agents` builds as a graph, over ChatOpenAI, asked twice."""

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
)

REASON = "the extra `frameworks` is not installed: no langchain"
langchain_agents = pytest.importorskip("langchain.agents", reason=REASON)
langchain_openai = pytest.importorskip("langchain_openai", reason=REASON)


def chat_model(client: Any, model: str, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model=model,
        async_client=client.chat.completions,
        root_async_client=client,
        api_key="none",
        extra_body={"prompt_cache_key": "library"},
        **more,
    )


def turns_of(messages: Iterable[Any]) -> list[Turn]:
    turns = []
    for message in messages:
        if message.type == "ai":
            usage = message.usage_metadata
            turns.append(
                Turn(usage["input_tokens"], usage["input_token_details"]["cache_read"], usage["output_tokens"])
            )
    return turns


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
async def test_a_graph_with_two_tools_finds_its_resent_history_cached(client_of: Any, streaming: bool) -> None:
    async with Runtime(scripted(librarian()), num_pages=1024) as runtime, client_of(runtime) as client:
        model = chat_model(client, "scripted", streaming=streaming, stream_usage=streaming)
        graph = langchain_agents.create_agent(model, [find_book, shelf_of], system_prompt=INSTRUCTIONS)
        state = await graph.ainvoke({"messages": [("user", QUESTION)]})
        state = await graph.ainvoke({"messages": [*state["messages"], ("user", FOLLOW_UP)]})
        assert state["messages"][-1].content == LAST_ANSWER
        check_resent_history(turns_of(state["messages"]), runtime, "library", least=5)


@pytest.mark.real_model
async def test_a_real_model_that_calls_and_answers_finds_its_history_cached(client_of: Any) -> None:
    from langchain.agents.middleware import wrap_model_call

    @wrap_model_call
    async def call_first(request: Any, handler: Any) -> Any:
        """A call of find_book after each question, then words."""
        asked = request.messages[-1].type == "human"
        return await handler(request.override(tool_choice="find_book" if asked else "none"))

    async with Runtime("smollm2-135m") as runtime, client_of(runtime) as client:
        model = chat_model(client, runtime.model_name, max_tokens=32, temperature=0.0)
        graph = langchain_agents.create_agent(
            model, [find_one_of_two, shelf_of], system_prompt=INSTRUCTIONS, middleware=[call_first]
        )
        state = await graph.ainvoke({"messages": [("user", QUESTION)]})
        state = await graph.ainvoke({"messages": [*state["messages"], ("user", FOLLOW_UP)]})
        check_resent_history(turns_of(state["messages"]), runtime, "library", least=4)
