"""Runs and turns at their edges: how they stop, what they leave, and who answers what."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Literal

import pytest

from agentkv import Runtime, StreamClosed, TurnEnd
from agentkv.testing import Answer, ScriptedModel, scripted
from support.families import families, in_words, served, turned
from support.runtimes import idle_and_sound

Family = Callable[..., ScriptedModel]


def look(path: str) -> str:
    """Look somewhere.

    Args:
        path: where
    """
    return f"seen {path}"


def choose(colour: Literal["red", "green"]) -> str:
    """Choose a colour.

    Args:
        colour: which
    """
    return f"{colour} it is"


def roles(session: Any) -> list[str]:
    return [message["role"] for message in session.messages]


@pytest.mark.parametrize("where", ["of the session", "of the run"])
@pytest.mark.parametrize("choice", ["required", "choose"])
async def test_a_required_call_is_required_until_it_has_been_answered_once(where: str, choice: str) -> None:
    """Unscripted at first, so that the grammar alone makes the call; then the model is free to answer."""
    async with served(scripted([None, None])) as runtime:
        in_session = where == "of the session"
        session = runtime.session(tools=[choose], tool_choice=choice if in_session else "auto", max_tokens=80)
        run = await session.run("Choose.", tool_choice=None if in_session else choice, max_turns=2)
        assert [result.error for result in run.tool_results] == [None]
        assert run.turns == 2
        # The second reply is no call: random words, which no grammar held.
        assert run.reply.tool_calls == ()


async def test_a_run_stops_after_max_turns_with_every_call_answered() -> None:
    async with served(scripted(lambda asked: in_words("look", path="a"))) as runtime:
        session = runtime.session(tools=[look])
        run = await session.run("Look.", max_turns=3)
        assert (run.turns, run.stopped, len(run.tool_results)) == (3, "max_turns", 3)
        assert roles(session) == ["user", *["assistant", "tool"] * 3]
        assert run.usage.prompt_tokens == session.usage.prompt_tokens


async def test_a_reply_cut_in_the_midst_of_a_call_stops_the_run_and_the_session_can_go_on() -> None:
    async with served(scripted([in_words("look", path="a" * 60), "Well."])) as runtime:
        session = runtime.session(tools=[look])
        run = await session.run("Look.", max_tokens=30)
        assert run.stopped == "length"
        (result,) = run.tool_results
        assert result.error is not None
        assert roles(session) == ["user", "assistant", "tool"]
        assert (await session.run("Go on.")).reply.text == "Well."


async def test_a_reply_cut_in_its_text_stops_the_run() -> None:
    async with served(scripted(["Hello, you are this."])) as runtime:
        session = runtime.session(tools=[look])
        run = await session.run("Hi.", max_tokens=2)
        assert (run.stopped, run.turns, run.tool_results) == ("length", 1, ())


async def test_equal_calls_in_one_reply_have_ids_of_their_own_and_each_its_result() -> None:
    calls = Answer(calls=[("look", {"path": "a"}), ("look", {"path": "a"})])
    async with served(scripted([calls, "Done."])) as runtime:
        session = runtime.session(tools=[look])
        run = await session.run("Look twice.")
        assert len({result.call.id for result in run.tool_results}) == 2
        assert roles(session) == ["user", "assistant", "tool", "tool", "assistant"]


@families
async def test_results_given_in_any_order_and_one_by_one_stand_in_the_order_of_their_calls(family: Family) -> None:
    calls = Answer(calls=[("look", {"path": name}) for name in "abc"])
    async with served(family(lambda asked: calls if asked[-1]["role"] == "user" else "Done.")) as runtime:
        session = runtime.session(tools=[look])
        reply = await session.ask("Look.")
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": look(**call.arguments)} for call in reply.tool_calls
        ]
        expected = None
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            at_once, one_by_one = session.fork(2)
            answered = await at_once.ask([results[place] for place in order])
            for place in order:
                one_by_one.append(results[place])
            await one_by_one.ask()
            expected = expected or at_once.token_ids
            assert at_once.token_ids == one_by_one.token_ids == expected
            assert answered.usage.cached_tokens >= len(session.token_ids)


@families
async def test_an_empty_reply_is_a_turn_like_any_other(family: Family) -> None:
    async with served(family(["", "Hello."])) as runtime:
        session = runtime.session("Be brief.")
        empty = await session.ask("Say nothing.")
        assert (empty.text, turned(empty)) == ("", ())
        ledger = session.token_ids
        reply = await session.ask("And now?")
        assert reply.text == "Hello."
        assert session.token_ids[: len(ledger)] == ledger
        assert reply.usage.cached_tokens >= len(ledger)


@families
@pytest.mark.parametrize(
    "said", ["  Hello.  ", "\nHello.\n\n", "Hello.\n```\ncode\n```\n", "{}", "<tool", "日本 👍🏽 é"]
)
async def test_replies_keep_their_odd_white_space_and_letters_in_the_ids_and_the_next_turn_hits(
    family: Family, said: str
) -> None:
    async with served(family([said, "Good."])) as runtime:
        session = runtime.session("Be brief.", tools=[look])
        first = await session.ask("Say it.")
        assert runtime.tokenizer.decode(turned(first)) == said
        assert first.text.strip() == said.strip()
        ledger = session.token_ids
        second = await session.ask("Again?")
        assert second.usage.cached_tokens >= len(ledger)
        assert session.token_ids[: len(ledger)] == ledger


async def test_a_cancelled_stream_that_is_not_kept_leaves_the_conversation_as_it_was() -> None:
    async with served(scripted(lambda asked: "Hello, " * 200)) as runtime:
        session = runtime.session("Be brief.")
        before = session.messages, session.token_ids, session.usage
        async with session.stream("Hi?") as stream:
            await anext(stream)
            await stream.cancel()
            reply = await stream.reply()
        assert reply.finish_reason == "cancelled"
        assert (session.messages, session.token_ids, session.usage) == before
        assert not session.busy


async def test_a_run_cancelled_among_its_events_keeps_the_turns_that_were_finished() -> None:
    async with served(scripted([in_words("look", path="a"), "Hello, " * 200])) as runtime:
        session = runtime.session("Be brief.", tools=[look])
        turns = 0
        async with session.run_stream("Look.") as stream:
            async for event in stream:
                turns += isinstance(event, TurnEnd)
                if turns == 1 and getattr(event, "text", ""):
                    await stream.cancel()
                    break
        idle_and_sound(runtime)
        assert roles(session) == ["system", "user", "assistant", "tool"]
        assert not session.busy


async def test_a_run_that_takes_too_long_says_so_and_keeps_the_turns_that_were_finished() -> None:
    async def wait(path: str) -> str:
        """Wait.

        Args:
            path: where
        """
        if path == "b":
            await asyncio.Event().wait()
        return "waited"

    replies = {1: in_words("wait", path="a"), 3: in_words("wait", path="b")}
    async with served(scripted(lambda asked: replies[len(asked)])) as runtime:
        session = runtime.session(tools=[wait])
        with pytest.raises(TimeoutError, match=r"the task was not done within 1\.5 s"):
            await session.run("Wait.", timeout=1.5)
        idle_and_sound(runtime)
        assert roles(session) == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timeout": "1s"}, TypeError, "timeout must be a number of seconds"),
        ({"timeout": 0}, ValueError, "timeout must be above 0"),
        ({"timeout": 10**400}, ValueError, "that a float can hold"),
        ({"max_turns": 0}, ValueError, "max_turns must be an int of at least 1"),
        ({"tool_choice": "jump"}, ValueError, "the tools are look"),
    ],
    ids=str,
)
async def test_a_wrong_argument_of_a_run_is_named_and_leaves_the_session_free(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with served(scripted(["Yes."])) as runtime:
        session = runtime.session(tools=[look])
        with pytest.raises(error, match=message):
            await session.run("Go.", **options)
        assert (await session.run("Go.")).reply.text == "Yes."


async def test_a_run_that_another_task_cancels_before_it_begins_never_begins_and_frees_its_session() -> None:
    async with served(scripted(["Yes."])) as runtime:
        session = runtime.session()
        before = session.messages
        stream = session.run_stream("Go.")
        reading = asyncio.create_task(stream.run())
        while not session.busy:
            await asyncio.sleep(0)
        await asyncio.wait_for(stream.cancel(), 10)
        with pytest.raises(StreamClosed):
            await asyncio.wait_for(reading, 10)
        assert not session.busy
        assert session.messages == before


async def test_a_stream_that_was_left_has_no_reply_and_says_so() -> None:
    async with served(scripted(lambda asked: "Hello, " * 200)) as runtime:
        session = runtime.session()
        async with session.stream("Hi?") as stream:
            await anext(stream)
        with pytest.raises(StreamClosed):
            await stream.reply()


async def test_one_tenants_produced_ids_do_not_shape_the_prompt_of_another() -> None:
    def replies(asked: Any) -> Any:
        return odd if len(asked) == 1 else "Yes."

    async with served(scripted(replies)) as runtime:
        letters = [runtime.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "answer that"]
        odd = Answer(token_ids=letters)
        first: list[Any] = [{"role": "user", "content": "Hi"}]
        reply = await runtime.generate(first, cache_salt="one")
        second = [*first, reply.message, {"role": "user", "content": "More"}]
        own = await runtime.generate(second, cache_salt="one")
        assert own.usage.cached_tokens >= reply.usage.prompt_tokens + len(letters)
        other = await runtime.generate(second, cache_salt="two")
        assert other.usage.cached_tokens == 0
        assert other.usage.prompt_tokens < own.usage.prompt_tokens


async def test_forks_of_one_session_answer_on_loops_of_several_threads_at_once() -> None:
    async with served(scripted(lambda asked: f"to {asked[-1]['content']}")) as runtime:
        session = runtime.session("Be brief. " * 20)
        await session.ask("Begin.")
        texts: dict[str, str] = {}

        def thread(name: str) -> None:
            async def turns() -> None:
                fork = session.fork()
                for turn in range(5):
                    texts[f"{name}{turn}"] = (await fork.ask(f"{name}{turn}")).text

            asyncio.run(turns())

        threads = [threading.Thread(target=thread, args=(name,)) for name in "abc"]
        for one in threads:
            one.start()
        for one in threads:
            await asyncio.to_thread(one.join)
        assert texts == {f"{name}{turn}": f"to {name}{turn}" for name in "abc" for turn in range(5)}


def test_successive_loops_go_on_with_one_session() -> None:
    runtime = Runtime(scripted(["One.", "Two."]), num_pages=64)
    session = runtime.session()
    try:
        assert asyncio.run(session.ask("1")).text == "One."
        reply = asyncio.run(session.ask("2"))
        assert reply.text == "Two."
        assert reply.usage.cached_tokens > 0
        idle_and_sound(runtime)
    finally:
        asyncio.run(runtime.close())


async def test_setting_system_or_tools_says_what_to_do_instead_and_what_it_costs() -> None:
    async with served(scripted([])) as runtime:
        session = runtime.session("Be brief.", tools=[look])
        with pytest.raises(AttributeError, match=r"computes? the whole conversation again.*append"):
            session.system = "Be long."
        with pytest.raises(AttributeError, match=r"compute the whole conversation again.*deny"):
            session.tools = ()
        assert session.system == "Be brief."
