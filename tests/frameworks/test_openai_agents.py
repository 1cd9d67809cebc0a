"""openai-agents: a runner with two tools, and a handoff that keeps the head of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    in_odd_cuts,
    librarian,
    nth_answer,
    shelf_of,
    thoughtful,
    tool_call,
)

agents = pytest.importorskip("agents", reason="the extra `frameworks` is not installed: there is no openai-agents")

TOOLS = [agents.function_tool(find_book), agents.function_tool(shelf_of)]
QUIET = agents.RunConfig(tracing_disabled=True)  # Traces would go to OpenAI.


def an_agent(name: str, client: Any, model: str, instructions: str = INSTRUCTIONS, **settings: Any) -> Any:
    return agents.Agent(
        name,
        instructions=instructions,
        tools=TOOLS,
        # By itself it sends reasoning back to DeepSeek's models alone.
        model=agents.OpenAIChatCompletionsModel(model, client, should_replay_reasoning_content=lambda context: True),
        model_settings=agents.ModelSettings(extra_args={"prompt_cache_key": "library"}, **settings),
    )


def turns_of(responses: Iterable[Any]) -> list[Turn]:
    return [
        Turn(each.usage.input_tokens, each.usage.input_tokens_details.cached_tokens, each.usage.output_tokens)
        for each in responses
    ]


async def two_questions(agent: Any, *, streamed: bool = False) -> tuple[Any, list[Turn]]:
    async def run(asked: Any) -> Any:
        if not streamed:
            return await agents.Runner.run(agent, asked, run_config=QUIET)
        result = agents.Runner.run_streamed(agent, asked, run_config=QUIET)
        async for _ in result.stream_events():
            pass
        return result

    first = await run(QUESTION)
    last = await run([*first.to_input_list(), {"role": "user", "content": FOLLOW_UP}])
    return last, turns_of([*first.raw_responses, *last.raw_responses])


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_runner_with_two_tools_finds_its_resent_history_cached(client_of: Any, streamed: bool) -> None:
    async with Runtime(scripted(librarian()), num_pages=1024) as runtime, client_of(runtime) as client:
        # Without it the runner asks for no usage where it streams, and shows zeros.
        agent = an_agent("porter", client, "scripted", include_usage=True)
        result, turns = await two_questions(agent, streamed=streamed)
        assert result.final_output == LAST_ANSWER
        check_resent_history(turns, runtime, "library", least=5)


async def test_reasoning_that_the_model_is_told_to_send_back_is_found_cached(client_of: Any) -> None:
    async with Runtime(scripted(thoughtful()), num_pages=1024) as runtime, client_of(runtime) as client:
        result = await agents.Runner.run(an_agent("porter", client, "scripted"), FOLLOW_UP, run_config=QUIET)
        check_resent_history(turns_of(result.raw_responses), runtime, "library")


def handing_off(replies: Sequence[str]) -> Any:
    return scripted(nth_answer([in_odd_cuts(reply) for reply in replies]))


HANDED_OFF = [
    tool_call("find_book", section="maps", title="atlas"),
    tool_call("transfer_to_binder"),
    tool_call("shelf_of", numbers=[7], lent=False),
    LAST_ANSWER,
]


async def test_a_handoff_between_agents_with_one_head_hits_like_any_turn(client_of: Any) -> None:
    async with Runtime(handing_off(HANDED_OFF), num_pages=1024) as runtime, client_of(runtime) as client:
        porter, binder = (an_agent(name, client, "scripted") for name in ("porter", "binder"))
        # Handoffs are shown to the model as tools, so that both agents must offer the same ones.
        porter.handoffs = binder.handoffs = [porter, binder]
        result = await agents.Runner.run(porter, QUESTION, run_config=QUIET)
        assert (result.last_agent.name, result.final_output) == ("binder", LAST_ANSWER)
        check_resent_history(turns_of(result.raw_responses), runtime, "library", least=4)


async def test_a_handoff_to_another_head_computes_the_history_again_and_the_report_says_diverged(
    client_of: Any,
) -> None:
    async with Runtime(handing_off(HANDED_OFF), num_pages=1024) as runtime, client_of(runtime) as client:
        porter = an_agent("porter", client, "scripted")
        binder = an_agent("binder", client, "scripted", instructions="You bind books. " + INSTRUCTIONS)
        porter.handoffs = [binder]
        result = await agents.Runner.run(porter, QUESTION, run_config=QUIET)
        before, after = turns_of(result.raw_responses)[1:3]
        assert after.cached < 0.2 * (before.prompt + before.output)
        row = runtime.report().to_dict()["by_name"]["library"]
        assert row["misses"]["diverged"] + row["leaves_in_first_page"] > 0


@pytest.mark.real_model
async def test_a_real_model_that_calls_and_answers_finds_its_history_cached(client_of: Any) -> None:
    async with Runtime("smollm2-135m") as runtime, client_of(runtime) as client:
        # Required for the first call of each run; the runner goes back to "auto" by itself.
        agent = an_agent(
            "porter", client, runtime.model_name, tool_choice="find_book", max_tokens=32, temperature=0.0
        )  # fmt: skip
        agent.tools = [agents.function_tool(find_one_of_two), agents.function_tool(shelf_of)]
        _, turns = await two_questions(agent)
        check_resent_history(turns, runtime, "library", least=4)
