"""Each way in which a model uses its tools, well or badly, over the templates of several model families."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable

import pytest

from agentkv import Run, Runtime, Session, Tool, ToolCallCounts
from agentkv.testing import Answer, ScriptedModel, scripted
from agentkv.tools import as_tool
from support.families import WITHOUT_TOOLS, families, in_words, served, turned

Family = Callable[..., ScriptedModel]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: what to say
    """
    return text.upper()


def broken(path: str) -> str:
    """Read a file that is not there.

    Args:
        path: which
    """
    raise FileNotFoundError(f"no file {path}")


TOOLS = (add, shout, broken)


def check_history_is_whole(runtime: Runtime, session: Session, run: Run) -> None:
    """Every result stands in the prompt that followed it, and the ids of every turn are still there."""
    text = runtime.tokenizer.decode(session.token_ids)
    for result in run.tool_results:
        assert result.content in text
    assert turned(run.reply) == session.token_ids[-len(turned(run.reply)) :]


def check_counted(runtime: Runtime, session: Session, run: Run, **failures: int) -> None:
    """One call was made; run, session and runtime say alike what became of it."""
    counts = {**ToolCallCounts(made=1).to_dict(), **failures}
    assert run.tool_calls.to_dict() == counts
    assert session.report().to_dict()["tool_calls"] == counts
    assert runtime.report().to_dict()["tool_calls"] == counts
    for report in (session.report(), runtime.report()):
        told = [line for line in str(report).split("\n") if line.startswith("tool calls")]
        assert told == [f"tool calls 1: 1 {name.replace('_', ' ')}" for name in failures]


async def run_script(model: ScriptedModel, **failures: int) -> tuple[Session, Run]:
    async with served(model) as runtime:
        session = runtime.session("Be brief.", tools=TOOLS, name="worker")
        run = await session.run("Do it.")
        check_history_is_whole(runtime, session, run)
        check_counted(runtime, session, run, **failures)
        return session, run


@families
async def test_calls_made_side_by_side_run_at_once_and_answer_in_their_order(family: Family) -> None:
    both = threading.Barrier(2, timeout=30)

    def early(text: str) -> str:
        """Wait for the other one."""
        both.wait()
        return f"early {text}"

    def late(text: str) -> str:
        """Wait for the other one."""
        both.wait()
        return f"late {text}"

    model = family([Answer(calls=[("late", {"text": "x"}), ("early", {"text": "y"})]), "Both done."])
    async with served(model) as runtime:
        session = runtime.session(tools=[early, late])
        run = await session.run("Do both.")
        assert [result.content for result in run.tool_results] == ["late x", "early y"]
        assert [result.call.name for result in run.tool_results] == ["late", "early"]
        assert (run.turns, run.stopped, run.reply.text) == (2, "answer", "Both done.")
        asked = model.asked[-1]
        assert [message["content"] for message in asked[-2:]] == ["late x", "early y"]
        assert [message["tool_call_id"] for message in asked[-2:]] == [call["id"] for call in asked[-3]["tool_calls"]]
        check_history_is_whole(runtime, session, run)


@families
async def test_a_malformed_call_is_answered_with_what_is_wrong_and_counted(family: Family) -> None:
    model = family(['<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>', "I am sorry."])
    _, run = await run_script(model, malformed=1)
    (result,) = run.tool_results
    assert result.error is not None
    assert result.call.error is not None
    assert result.content.startswith("Error: ")
    assert (run.turns, run.stopped) == (2, "answer")
    assert model.asked[-1][-1]["content"] == result.content


@families
async def test_a_call_of_a_tool_that_is_not_there_is_answered_with_those_that_are(family: Family) -> None:
    _, run = await run_script(family([in_words("ad", a=1, b=2), "I see."]), unknown_tool=1)
    (result,) = run.tool_results
    assert result.error is not None
    assert "no tool 'ad'" in result.error
    assert "add" in result.error


@families
async def test_arguments_of_the_wrong_type_are_answered_by_name_and_nothing_runs(family: Family) -> None:
    _, run = await run_script(family([in_words("add", a="many", b=2), "I see."]), wrong_arguments=1)
    (result,) = run.tool_results
    assert result.error is not None
    assert "wrong arguments for add" in result.error
    assert "a" in result.error


@families
async def test_what_a_tool_raises_is_read_by_the_model_and_the_run_goes_on(family: Family) -> None:
    _, run = await run_script(family([in_words("broken", path="/x"), "Not there."]), raised=1)
    (result,) = run.tool_results
    assert result.error == "broken raised FileNotFoundError: no file /x"
    assert run.stopped == "answer"


@families
async def test_a_denied_tool_is_answered_with_the_reason_and_no_token_of_the_prompt_changes(family: Family) -> None:
    async with served(family([in_words("add", a=1, b=2), "Never mind.", in_words("add", a=1, b=2), "3"])) as runtime:
        session = runtime.session("Be brief.", tools=TOOLS)
        session.append("Do it.")
        before = session.token_ids
        session.deny("add", "the office is closed")
        assert session.token_ids == before
        run = await session.run()
        assert run.tool_results[0].error == "add may not be used: the office is closed"
        check_counted(runtime, session, run, denied=1)
        session.allow(add)
        run = await session.run("Again.")
        assert run.tool_results[0].content == "3"
        assert session.token_ids[: len(before)] == before


async def test_a_tool_that_is_not_done_in_its_time_is_given_up_and_counted() -> None:
    async def forever() -> str:
        """Never return."""
        await asyncio.Event().wait()
        return ""

    async with served(scripted([in_words("forever"), "Never mind."])) as runtime:
        session = runtime.session(tools=[dataclasses.replace(as_tool(forever), timeout=0.001)], name="worker")
        run = await session.run("Do it.")
        check_counted(runtime, session, run, timed_out=1)


async def test_calls_of_stateless_replies_are_counted_and_a_report_since_another_tells_what_came_after_it() -> None:
    replies = [in_words("ad", a=1, b=2), in_words("add", a="many", b=2), in_words("add", a=1, b=2), "Done."]
    async with served(scripted(replies)) as runtime:
        reports = []
        for number in range(len(replies)):
            reports.append(runtime.report())
            await runtime.generate([{"role": "user", "content": str(number)}], tools=TOOLS)
        counted = ToolCallCounts(made=3, unknown_tool=1, wrong_arguments=1)
        assert runtime.report().to_dict()["tool_calls"] == counted.to_dict()
        assert counted.failed == 2
        later = runtime.report(since=reports[1]).to_dict()["tool_calls"]
        assert later == ToolCallCounts(made=2, wrong_arguments=1).to_dict()


@families
async def test_text_and_a_call_in_one_reply_are_told_apart_and_both_kept(family: Family) -> None:
    model = family([Answer("I shall add.", [("add", {"a": 1, "b": 2})]), "It is 3."])
    session, run = await run_script(model)
    first = next(message for message in session.messages if message["role"] == "assistant")
    assert first["content"] == "I shall add."
    assert json.loads(first["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert [result.content for result in run.tool_results] == ["3"]


@families
async def test_each_turn_of_a_run_finds_all_of_the_turn_before_it(family: Family) -> None:
    """Of the second prompt only what the template puts behind the first reply is computed."""
    async with served(family([in_words("add", a=1, b=2), in_words("shout", text="hi"), "3, HI."])) as runtime:
        session = runtime.session("Be brief.", tools=TOOLS)
        async with session.run_stream("Do it.") as stream:
            replies = [event.reply async for event in stream if type(event).__name__ == "TurnEnd"]
        ledgers = [reply.usage.prompt_tokens + len(turned(reply)) for reply in replies]
        assert [reply.usage.cached_tokens for reply in replies[1:]] == ledgers[:2]
        assert len(session.token_ids) == ledgers[2]


@families
async def test_a_call_that_no_function_answers_ends_the_run_and_waits_for_its_result(family: Family) -> None:
    asking = Tool("ask_human", "Asks a human.", {"type": "object", "properties": {"question": {"type": "string"}}})
    async with served(family([in_words("ask_human", question="Which?"), "Blue it is."])) as runtime:
        session = runtime.session(tools=[asking])
        run = await session.run("Choose a colour.")
        assert run.stopped == "tool_calls"
        (call,) = run.reply.tool_calls
        reply = await session.ask({"role": "tool", "tool_call_id": call.id, "content": "Blue."})
        assert reply.text == "Blue it is."


async def test_a_template_that_knows_no_tools_is_told_of_them_in_the_system_text() -> None:
    async with served(scripted([in_words("add", a=20, b=3), "23"], template=WITHOUT_TOOLS)) as runtime:
        session = runtime.session("Be brief.", tools=TOOLS)
        run = await session.run("20 + 3?")
        text = runtime.tokenizer.decode(session.token_ids)
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
        for named in ("add", "shout", "broken", "Add two numbers.", "<tool_response>\n23\n</tool_response>"):
            assert named in text
        assert [result.content for result in run.tool_results] == ["23"]
        assert session.system == "Be brief."


@pytest.mark.parametrize("choice", ["required", "add"])
async def test_an_unscripted_reply_under_a_tool_choice_is_one_call_that_runs(choice: str) -> None:
    """The model's weights are random: the grammar alone makes the call."""
    async with served(scripted([None, "Done."])) as runtime:
        session = runtime.session(tools=[add])
        run = await session.run("Add something.", tool_choice=choice)
        (result,) = run.tool_results
        assert result.error is None
        assert int(result.content) == result.call.arguments["a"] + result.call.arguments["b"]
        assert run.stopped == "answer"


async def test_tools_with_tool_choice_none_are_never_called() -> None:
    async with served(scripted([in_words("add", a=1, b=2)])) as runtime:
        reply = await runtime.session(tools=[add]).ask("Add.", tool_choice="none")
        assert reply.tool_calls == ()
        assert "<tool_call>" in reply.text


async def test_results_come_as_events_as_soon_as_they_are_there() -> None:
    may_end = asyncio.Event()

    async def slow(text: str) -> str:
        """Take long."""
        await may_end.wait()
        return text

    calls = Answer(calls=[("slow", {"text": "a"}), ("shout", {"text": "b"})])
    async with served(scripted([calls, "Done."])) as runtime:
        session = runtime.session(tools=[slow, shout])
        seen = []
        async with session.run_stream("Do both.") as stream:
            async for event in stream:
                if type(event).__name__ == "ToolResult":
                    seen.append(event.content)
                    may_end.set()
            run = await stream.run()
        assert seen == ["B", "a"]
        assert [result.content for result in run.tool_results] == ["a", "B"]
