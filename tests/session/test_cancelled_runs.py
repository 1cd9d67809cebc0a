"""A task that is cancelled, at each moment of it: what is kept, what is not, and that the session goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentkv import PendingToolCalls, Runtime, Session, SessionBusy, StreamClosed, ToolResult, TurnEnd
from agentkv.testing import Answer, scripted
from support.families import in_words, served
from support.runtimes import idle_and_sound


def look(path: str) -> str:
    """Look somewhere.

    Args:
        path: where
    """
    return f"seen {path}"


class Patient:
    """A tool that answers at once, but for "b", where it waits for ever."""

    def __init__(self) -> None:
        self.waits = asyncio.Event()
        self.ended = False

    async def look(self, path: str) -> str:
        """Look somewhere.

        Args:
            path: where
        """
        if path == "b":
            self.waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.ended = True
        return f"seen {path}"


BOTH = Answer(calls=[("look", {"path": "a"}), ("look", {"path": "b"})])


def reply(asked: list[dict[str, Any]]) -> Any:
    return BOTH if asked[-1]["content"] in ("Look.", "seen first") else "Well."


def shape(session: Session) -> list[tuple[str, str]]:
    return [(m["role"], m["content"] if m["role"] == "tool" else "") for m in session.messages]


async def goes_on(runtime: Runtime, session: Session) -> None:
    idle_and_sound(runtime)
    assert not session.busy
    assert (await session.ask("And now?")).text == "Well."


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("entered", [False, True])
async def test_before_its_first_event_nothing_is_computed_and_nothing_kept(entered: bool, keep: bool) -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[look])
        stream = session.run_stream("Look.")
        if entered:
            async with stream:
                await stream.cancel(keep=keep)
        else:
            await stream.cancel(keep=keep)
        for read in (stream.run, stream.reply, stream.__anext__, stream.__aenter__):
            with pytest.raises(StreamClosed, match="before it began"):
                await read()
        assert session.messages == []
        assert runtime.report().to_dict()["calls"] == 0
        await goes_on(runtime, session)


async def test_entering_the_block_holds_the_session_and_raises_what_stands_against_it() -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[look])
        async with session.run_stream("Go.") as stream:
            assert session.busy
            with pytest.raises(SessionBusy):
                await session.run_stream("Another.").__aenter__()
        assert not session.busy
        with pytest.raises(StreamClosed, match="left before its end"):
            await stream.run()
        assert session.messages == []
        await session.ask("Look.")
        with pytest.raises(PendingToolCalls):
            await session.run_stream("Another.").__aenter__()
        assert not session.busy


@pytest.mark.parametrize("keep", [False, True])
async def test_at_the_end_of_a_reply_that_calls_the_turn_is_dropped_or_kept_with_cancelled_results(keep: bool) -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session("Be brief.", tools=[look])
        async with session.run_stream("Look.") as stream:
            async for event in stream:
                if isinstance(event, TurnEnd):
                    await stream.cancel(keep=keep)
            assert [call.name for call in (await stream.reply()).tool_calls] == ["look", "look"]
            with pytest.raises(StreamClosed):
                await stream.run()
        kept = [("user", ""), ("assistant", ""), ("tool", "cancelled"), ("tool", "cancelled")]
        assert shape(session) == [("system", ""), *(kept if keep else [])]
        await goes_on(runtime, session)


@pytest.mark.parametrize("keep", [False, True])
async def test_while_tools_run_the_turn_is_dropped_or_kept_with_the_results_that_came(keep: bool) -> None:
    patient = Patient()
    async with served(scripted(reply)) as runtime:
        session = runtime.session("Be brief.", tools=[patient.look])
        stream = session.run_stream("Look.")
        reading = asyncio.create_task(stream.reply())
        await asyncio.wait_for(patient.waits.wait(), 60)
        await stream.cancel(keep=keep)
        assert patient.ended
        await reading
        kept = [("user", ""), ("assistant", ""), ("tool", "seen a"), ("tool", "cancelled")]
        assert shape(session) == [("system", ""), *(kept if keep else [])]
        await goes_on(runtime, session)


@pytest.mark.parametrize("keep", [False, True])
async def test_between_two_turns_the_finished_one_stays_and_no_other_begins(keep: bool) -> None:
    async with served(scripted(lambda asked: in_words("look", path="a"))) as runtime:
        session = runtime.session(tools=[look])
        turns = 0
        async with session.run_stream("Look.") as stream:
            async for event in stream:
                turns += isinstance(event, TurnEnd)
                if isinstance(event, ToolResult):
                    await stream.cancel(keep=keep)
        assert turns == 1
        assert shape(session) == [("user", ""), ("assistant", ""), ("tool", "seen a")]
        assert runtime.report().to_dict()["calls"] == 1


@pytest.mark.parametrize("keep", [False, True])
async def test_in_the_midst_of_a_reply_of_a_later_turn_the_earlier_ones_stay(keep: bool) -> None:
    script = {1: in_words("look", path="a"), 3: "Hello, " * 200, 5: "Well.", 4: "Well."}
    async with served(scripted(lambda asked: script[len(asked)])) as runtime:
        session = runtime.session(tools=[look])
        async with session.run_stream("Look.") as stream:
            results = 0
            async for event in stream:
                results += isinstance(event, ToolResult)
                if results and getattr(event, "text", ""):
                    await stream.cancel(keep=keep)
                    results = 0
            assert (await stream.reply()).finish_reason == "cancelled"
        first = [("user", ""), ("assistant", ""), ("tool", "seen a")]
        assert shape(session) == [*first, *([("assistant", "")] if keep else [])]
        await goes_on(runtime, session)


async def test_a_task_that_is_done_is_left_as_it_is() -> None:
    async with served(scripted(reply)) as runtime:
        session = runtime.session(tools=[look])
        async with session.run_stream("Hi.") as stream:
            async for event in stream:
                if isinstance(event, TurnEnd):
                    await stream.cancel()
            assert (await stream.run()).stopped == "answer"
        assert shape(session) == [("user", ""), ("assistant", "")]


async def test_an_ask_cut_inside_a_forced_call_and_kept_has_a_pending_call_that_can_be_answered() -> None:
    async with served(scripted([in_words("look", path="a" * 200), "Well."])) as runtime:
        session = runtime.session(tools=[look])
        async with session.stream("Look.", tool_choice="required") as stream:
            async for event in stream:
                if getattr(event, "arguments_text", ""):
                    await stream.cancel(keep=True)
            cut = await stream.reply()
        (call,) = cut.tool_calls
        assert (cut.finish_reason, call.error is None) == ("cancelled", False)
        with pytest.raises(PendingToolCalls):
            await session.ask("And now?")
        result = {"role": "tool", "tool_call_id": call.id, "content": "cancelled"}
        assert (await session.ask([result, {"role": "user", "content": "And now?"}])).text == "Well."


async def test_a_timeout_that_is_not_the_runs_own_comes_through_as_it_is() -> None:
    error = TimeoutError("theirs")
    async with served(scripted([error, error])) as runtime:
        session = runtime.session(tools=[look])
        for timeout in (None, 60):
            with pytest.raises(TimeoutError, match="theirs"):
                await session.run("Look.", timeout=timeout)
        assert not session.busy


async def test_a_turn_that_was_not_finished_changes_no_later_draw() -> None:
    def draws(asked: Any) -> Any:
        return BOTH if asked[-1]["content"] == "Look." else None

    async with served(scripted(draws)) as runtime:
        options: dict[str, Any] = {"name": "one", "tools": [look], "temperature": 1.0, "max_tokens": 12}
        interrupted, other = (runtime.session("Be brief.", **options) for _ in range(2))
        async with interrupted.run_stream("Look.") as stream:
            async for event in stream:
                if isinstance(event, TurnEnd):
                    break
        drawn = [await session.ask("Draw.", tool_choice="none", ignore_eos=True) for session in (interrupted, other)]
        assert drawn[0].token_ids == drawn[1].token_ids
        again = await other.ask("Draw.", tool_choice="none", ignore_eos=True)
        assert again.token_ids != drawn[0].token_ids
