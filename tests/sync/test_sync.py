"""The names without await: the same answers, the same books, from any thread, inside a running loop too."""

from __future__ import annotations

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import agentkv
import agentkv.sync
from agentkv.errors import RuntimeClosed, SessionClosed
from agentkv.testing import scripted

OPTIONS = {"num_pages": 129, "strict": True}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def test_a_conversation_forks_goes_back_and_calls_tools_without_await() -> None:
    replies = ["One.", "Left.", "Right.", CALL, "It is 5."]
    with agentkv.sync.Runtime(scripted(replies), **OPTIONS) as runtime:
        session = runtime.session("Be brief.", name="root", tools=[add])
        mark = session.mark()
        assert session.ask("Begin.").text == "One."
        left, right = session.fork(2)
        assert (left.ask("Go.").text, right.ask("Go.").text) == ("Left.", "Right.")
        assert (left.name, left.parent.name) == ("root/1", "root")
        run = left.run("2 + 3?")
        assert (run.reply.text, run.stopped, run.turns) == ("It is 5.", "answer", 2)
        assert [result.content for result in run.tool_results] == ["5"]
        session.rollback(mark)
        assert [message["role"] for message in session.messages] == ["system"]
        session.close()
        with pytest.raises(SessionClosed):
            session.ask("More?")
        runtime.check()


def test_a_stream_is_read_in_a_for_loop_and_left_early() -> None:
    with agentkv.sync.Runtime(scripted(lambda messages: "A longer answer, in many tokens."), **OPTIONS) as runtime:
        session = runtime.session()
        with session.stream("Go.") as stream:
            assert "".join(stream.text()) == "A longer answer, in many tokens."
            assert stream.reply().finish_reason == "stop"
        before = session.messages
        with session.stream("Again.") as stream:
            next(stream)
        assert session.messages == before
        assert runtime.report().to_dict()["running"] == 0


def test_it_works_inside_a_running_loop_as_in_a_notebook() -> None:
    async def cell() -> str:
        with agentkv.sync.Runtime(scripted(["Here."]), **OPTIONS) as runtime:
            return runtime.session().ask("Where?").text

    assert asyncio.run(cell()) == "Here."


def test_calls_of_several_threads_are_answered_side_by_side() -> None:
    def reply(messages: list[dict[str, str]]) -> str:
        return f"For {messages[-1]['content']}."

    with agentkv.sync.Runtime(scripted(reply), **OPTIONS) as runtime, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: runtime.session().ask(name).text, "abcdefgh"))
    assert answers == [f"For {name}." for name in "abcdefgh"]


def test_what_a_call_raises_is_raised_here_and_a_closed_runtime_says_so() -> None:
    runtime = agentkv.sync.Runtime(scripted(["never"]), **OPTIONS)
    with runtime, pytest.raises(ValueError, match="the prompt is empty"):
        runtime.generate("")
    runtime.close()
    with pytest.raises(RuntimeClosed):
        runtime.generate("x")
    assert not any(thread.name == "agentkv-loop" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["Runtime", "Session", "Stream"])
def test_every_public_name_is_there_too(name: str) -> None:
    asynchronous, without_await = getattr(agentkv, name), getattr(agentkv.sync, name)
    names = [part for part, _ in inspect.getmembers(asynchronous) if not part.startswith("_")]
    inner = {"serve", "served_now", "submit", "seed_of", "supersede", "ready_seconds", "seconds_per_prompt_token"}
    source = inspect.getsource(without_await)
    assert [part for part in names if part not in inner and f"{part}" not in source] == []
