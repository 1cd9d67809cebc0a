"""Calls that wait for their results when a session is to go on: a run without a task answers them first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentkv.sync
from agentkv import PendingToolCalls, Runtime, StreamClosed, Tool, ToolResult, TurnEnd
from agentkv.testing import Answer, scripted
from support.families import in_words, served
from support.runtimes import idle_and_sound

BOTH = Answer(calls=[("add", {"a": 2, "b": 3}), ("add", {"a": 4, "b": 5})])


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


HUMAN = Tool("human", "Asks a human.", {"type": "object", "properties": {}})


def reply(asked: list[dict[str, Any]]) -> Any:
    if asked[-1]["role"] == "tool":
        return f"The tool said: {asked[-1]['content']}"
    return BOTH if asked[-1]["content"] == "Add." else "Well."


def shape(session: Any) -> list[tuple[str, str]]:
    return [(m["role"], m["content"] if m["role"] == "tool" else "") for m in session.messages]


WHOLE = [("user", ""), ("assistant", ""), ("tool", "5"), ("tool", "9"), ("assistant", "")]


@pytest.mark.parametrize("history", ["exact", "template"])
async def test_a_run_without_a_task_calls_what_an_ask_left_open_and_goes_on(history: Any) -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[add], history=history)
        whole = runtime.session(tools=[add], history=history)
        await whole.run("Add.")
        await session.ask("Add.")
        run = await session.run()
        assert (run.stopped, run.turns, run.reply.text) == ("answer", 1, "The tool said: 9")
        assert [result.content for result in run.tool_results] == ["5", "9"]
        assert (run.tool_calls.made, run.tool_calls.failed) == (2, 0)
        assert (session.messages, session.token_ids) == (whole.messages, whole.token_ids)
        assert session.report().to_dict()["tool_calls"]["made"] == 2
        idle_and_sound(runtime)


async def test_a_session_of_stored_messages_goes_on_where_they_end() -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[add])
        await session.ask("Add.")
        stored = session.messages
        restored = runtime.session(messages=stored, tools=[add])
        async with restored.run_stream() as stream:
            kinds = [type(event) for event in [event async for event in stream]]
        assert kinds[:2] == [ToolResult, ToolResult]
        assert kinds.count(TurnEnd) == 1
        assert shape(restored) == WHOLE
        first = {"role": "tool", "tool_call_id": stored[-1]["tool_calls"][0]["id"], "content": "by hand"}
        half = runtime.session(messages=[*stored, first], tools=[add])
        assert [result.content for result in (await half.run()).tool_results] == ["9"]
        assert shape(half)[2:4] == [("tool", "by hand"), ("tool", "9")]


async def test_a_task_must_wait_and_the_error_says_what_works() -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[add])
        await session.ask("Add.")
        before = (session.messages, session.token_ids)
        for asking in (session.run("And?"), session.ask("And?"), session.ask()):
            with pytest.raises(PendingToolCalls, match=r"session '\(unnamed\)' waits.*call run\(\) without a task"):
                await asking
        assert (session.messages, session.token_ids) == before
        await session.run(None)
        assert (await session.ask("And?")).text == "Well."


async def test_calls_that_nothing_here_can_run_are_still_to_be_given() -> None:
    async with served(scripted([in_words("human"), "Here."])) as runtime:
        session = runtime.session(tools=[HUMAN, add])
        asked = await session.ask("Ask.")
        for asking in (session.run(), session.ask()):
            with pytest.raises(PendingToolCalls, match=r'role "tool".*run\(\) cannot call human') as caught:
                await asking
            assert "without a task" not in str(caught.value)
        assert not session.busy
        result = {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "yes"}
        assert (await session.run([result])).reply.text == "Here."
        nameless = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
        stored = runtime.session(messages=[{"role": "user", "content": "Add."}, nameless], tools=[add])
        with pytest.raises(PendingToolCalls, match=r"run\(\) cannot call calls without an id"):
            await stored.run()


async def test_denied_unknown_and_broken_calls_get_their_errors_for_results() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"{name}-1", "type": "function", "function": {"name": name, "arguments": arguments}}

    calls = [call("add", '{"a": 1, "b": 2}'), call("nobody", "{}"), call("look", '{"path": ')]
    stored = [{"role": "user", "content": "Go."}, {"role": "assistant", "tool_calls": calls}]
    async with served(scripted(["Well."])) as runtime:
        session = runtime.session(messages=stored, tools=[add, Tool("look", "Looks.", {"type": "object"})])
        session.deny(add, "not today")
        run = await session.run()
        assert run.stopped == "answer"
        denied, unknown, broken = (result.error or "" for result in run.tool_results)
        assert ("not today" in denied, "nobody" in unknown, "malformed" in broken) == (True, True, True)
        counts = run.tool_calls
        assert (counts.made, counts.denied, counts.unknown_tool, counts.malformed) == (3, 1, 1, 1)


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_a_choice_that_the_waiting_calls_meet_forces_no_further_one(choice: str) -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[add], tool_choice=choice)
        await session.ask("Add.", tool_choice="auto")
        assert (await session.run()).turns == 1


@pytest.mark.parametrize("keep", [False, True])
async def test_a_cancel_between_results_leaves_the_calls_waiting_or_all_answered(keep: bool) -> None:
    async def never(b: int) -> int:
        """Wait."""
        await asyncio.Event().wait()
        return b

    calls = Answer(calls=[("add", {"a": 2, "b": 3}), ("never", {"b": 1})])
    async with served(scripted([calls, "Well."])) as runtime:
        session = runtime.session(tools=[add, never])
        await session.ask("Add.")
        before = session.messages
        async with session.run_stream() as stream:
            async for event in stream:
                if isinstance(event, ToolResult):
                    await stream.cancel(keep=keep)
            with pytest.raises(StreamClosed):
                await stream.run()
        assert not session.busy
        if keep:
            assert shape(session)[2:] == [("tool", "5"), ("tool", "cancelled")]
            assert (await session.ask("And?")).text == "Well."
        else:
            assert session.messages == before


async def test_results_stay_where_the_turn_after_them_fails() -> None:
    ran = []

    def once(a: int) -> int:
        """Run."""
        ran.append(a)
        return a

    replies = [Answer(calls=[("once", {"a": 1})]), RuntimeError("broken"), "Better."]
    async with served(scripted(replies)) as runtime:
        session = runtime.session(tools=[once])
        await session.ask("Go.")
        with pytest.raises(Exception, match="broken"):
            await session.run()
        assert (await session.run()).reply.text == "Better."
        assert ran == [1]


async def test_by_chance_it_goes_on_as_if_the_task_had_never_been_cut() -> None:
    async def answer(runtime: Runtime, *, cut: bool) -> tuple[int, ...]:
        session = runtime.session(tools=[add], name="drawn")
        if cut:
            await session.ask("Add.", temperature=1.0)
            return (await session.run(temperature=1.0, max_turns=1)).reply.token_ids
        return (await session.run("Add.", temperature=1.0, max_turns=2)).reply.token_ids

    replies = [BOTH, None]
    async with served(scripted(replies)) as runtime:
        whole = await answer(runtime, cut=False)
    async with served(scripted(replies)) as runtime:
        assert await answer(runtime, cut=True) == whole


def test_without_await_too() -> None:
    with agentkv.sync.Runtime(scripted(reply), num_pages=256) as runtime:
        session = runtime.session(tools=[add])
        session.ask("Add.")
        with pytest.raises(PendingToolCalls):
            session.run("And?")
        assert session.run().reply.text == "The tool said: 9"
        assert shape(session) == WHOLE
