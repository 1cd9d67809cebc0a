"""The names without await: the same answers, the same books, from any thread, inside a running loop too."""

from __future__ import annotations

import asyncio
import gc
import inspect
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import agentkv
import agentkv.sync
from agentkv.errors import RuntimeClosed, SessionClosed
from agentkv.testing import scripted
from support.ctrl_c import heeding_ctrl_c

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


INNER = {
    "count_tool_calls",
    "open_turn",
    "seconds_per_prompt_token",
    "seed_of",
    "serve",
    "served_now",
    "session_opened",
    "submit",
    "supersede",
}
"""What a Runtime is to its sessions."""


def public_names(asynchronous: type) -> list[str]:
    return [name for name in dir(asynchronous) if not name.startswith("_") and name not in INNER]


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_a_runtime_takes_the_same_options_with_the_same_types_and_defaults_and_hands_each_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert inspect.signature(agentkv.sync.Runtime) == inspect.signature(agentkv.Runtime)
    given: dict[str, Any] = {}
    monkeypatch.setattr(agentkv.sync, "AsyncRuntime", lambda model, **options: given.update(options, model=model))
    told = {name: object() for name in inspect.signature(agentkv.Runtime).parameters}
    make: Any = agentkv.sync.Runtime
    make(**told)
    assert given == told


@pytest.mark.parametrize("kind", ["Runtime", "Session", "Stream", "RunStream"])
def test_every_public_name_is_there_on_a_live_object_and_takes_the_same_arguments(kind: str) -> None:
    asynchronous: type = agentkv.session.RunStream if kind == "RunStream" else getattr(agentkv, kind)
    with agentkv.sync.Runtime(scripted([]), **OPTIONS) as runtime:
        session = runtime.session("Be brief.", tools=[add])
        live = {
            "Runtime": runtime,
            "Session": session,
            "Stream": session.stream("Hi"),
            "RunStream": session.run_stream("Hi"),
        }[kind]
        for name in public_names(asynchronous):
            here, there = getattr(live, name), inspect.getattr_static(asynchronous, name)
            if isinstance(there, property):
                assert isinstance(inspect.getattr_static(type(live), name), property)
            elif name not in ("generate", "stream") or kind == "Session":
                assert ["self", *parameters(here)] == parameters(there), name


@pytest.mark.parametrize("name", ["system", "tools"])
def test_what_cannot_be_set_raises_the_same_advice(name: str) -> None:
    with agentkv.sync.Runtime(scripted([]), **OPTIONS) as runtime:
        session = runtime.session("Be brief.", tools=[add])
        before = getattr(session, name)
        with pytest.raises(AttributeError) as advice:
            setattr(runtime._runtime.session(), name, None)
        with pytest.raises(AttributeError, match=re.escape(str(advice.value))):
            setattr(session, name, None)
        assert getattr(session, name) == before


def test_a_thread_that_waits_for_a_tool_is_told_when_another_one_closes() -> None:
    waiting, told = threading.Event(), []

    async def wait() -> str:
        """Wait for ever."""
        waiting.set()
        await asyncio.Event().wait()
        return "never"

    runtime = agentkv.sync.Runtime(
        scripted(['<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>']), **OPTIONS
    )
    runtime.start()
    session = runtime.session(tools=[wait])

    def ask() -> None:
        with pytest.raises(RuntimeClosed) as raised:
            session.run("Wait.")
        told.append(raised)

    thread = threading.Thread(target=ask)
    thread.start()
    assert waiting.wait(60)
    runtime.close()
    thread.join(60)
    assert len(told) == 1
    assert not session.busy


def test_a_call_made_while_another_thread_closes_is_answered_or_told() -> None:
    for _ in range(5):
        runtime = agentkv.sync.Runtime(scripted(lambda asked: "Here."), **OPTIONS)
        runtime.start()
        ended = []

        def ask(runtime: agentkv.sync.Runtime = runtime, ended: list[bool] = ended) -> None:
            session = runtime.session()
            while True:
                try:
                    session.ask("Where?")
                except RuntimeClosed:
                    ended.append(True)
                    return

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        runtime.close()
        for thread in threads:
            thread.join(60)
        assert ended == [True] * 3


def test_after_ctrl_c_nothing_of_the_call_runs_and_the_session_is_free() -> None:
    ended = []

    async def interrupt() -> str:
        """Press Ctrl-C, and take a while to end."""
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            for _ in range(100):  # turns of the loop
                await asyncio.sleep(0)
            ended.append(True)
        return "never"

    call = '<tool_call>\n{"name": "interrupt", "arguments": {}}\n</tool_call>'
    with agentkv.sync.Runtime(scripted([call, "Well."]), **OPTIONS) as runtime:
        session = runtime.session(tools=[interrupt])
        with heeding_ctrl_c(), pytest.raises(KeyboardInterrupt):
            session.run("Interrupt.")
        assert ended == [True]
        assert not session.busy
        assert session.ask("And now?").text == "Well."


def test_a_runtime_that_nobody_holds_any_more_ends_its_loop_and_its_thread() -> None:
    runtime = agentkv.sync.Runtime(scripted(["Here."]))
    runtime.start()
    assert runtime.session().ask("Where?").text == "Here."
    threads = [runtime._loop._thread]
    loop = runtime._loop._loop
    del runtime
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert loop.is_closed()


def test_a_coroutine_tool_that_would_wait_for_its_own_loop_is_told_so() -> None:
    async def nested() -> str:
        """Ask from inside."""
        return runtime.session().ask("Inside?").text

    call = '<tool_call>\n{"name": "nested", "arguments": {}}\n</tool_call>'
    with agentkv.sync.Runtime(scripted([call, "Well."]), **OPTIONS) as runtime:
        (result,) = runtime.session(tools=[nested]).run("Go.").tool_results
        assert "runs on the Runtime's own loop" in result.content
