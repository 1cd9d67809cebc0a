"""Calls run side by side, and whatever happens to one is a result that the model reads."""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import dataclasses
import enum
import functools
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from agentkv.events import ToolResult
from agentkv.tool_calls import ToolCall
from agentkv.tools import Tool, as_tools, check_call, run_tool_calls
from agentkv.tools.threads import ToolThreads, TooManyLeftBehind

ANYTHING: dict[str, Any] = {"type": "object"}


class Colour(enum.Enum):
    RED = "red"


def add(a: int, b: int = 1) -> int:
    return a + b


def call(name: str, error: str | None = None, /, **arguments: Any) -> ToolCall:
    return ToolCall(id="call00001", name=name, arguments=arguments, error=error)


def named(*tools: object) -> dict[str, Tool]:
    return {tool.name: tool for tool in as_tools(tools)}


def tool(call: Callable[..., Any], *, name: str = "f", timeout: float | None = 60.0) -> Tool:
    return Tool(name, "", ANYTHING, call=call, timeout=timeout)


async def run_one(function: Callable[..., Any], **arguments: Any) -> ToolResult:
    [result] = await run_tool_calls([call("f", **arguments)], named(tool(function)))
    return result


async def test_results_stand_in_the_order_of_the_calls_and_come_in_the_order_they_are_ready() -> None:
    first_may_end = threading.Event()
    came: list[str] = []

    def slow() -> str:
        assert first_may_end.wait(30)
        return "slow"

    async def quick() -> str:
        return "quick"

    def note(result: ToolResult) -> None:
        came.append(result.content)
        first_may_end.set()

    results = await run_tool_calls([call("slow"), call("quick")], named(slow, quick), on_result=note)
    assert [result.content for result in results] == ["slow", "quick"]
    assert [result.call.name for result in results] == ["slow", "quick"]
    assert came == ["quick", "slow"]
    assert all(result.error is None and result.duration >= 0 for result in results)


async def test_a_thousand_calls_have_their_results_in_order() -> None:
    results = await run_tool_calls([call("add", a=number, b=0) for number in range(1000)], named(add))
    assert [result.content for result in results] == [str(number) for number in range(1000)]


async def test_calls_of_blocking_tools_run_at_once() -> None:
    # Neither passes the barrier before the other has come to it.
    barrier = threading.Barrier(4, timeout=30)
    results = await run_tool_calls([call("f")] * 4, named(tool(lambda: barrier.wait() * 0)))
    assert [result.content for result in results] == ["0"] * 4


async def test_the_loop_goes_on_while_a_tool_blocks() -> None:
    released = threading.Event()
    running = asyncio.ensure_future(run_one(lambda: released.wait(30)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    released.set()
    assert (await running).content == "true"


async def test_a_tool_and_the_text_of_its_result_are_made_off_the_loop() -> None:
    threads: set[int] = set()

    class Result:
        def __str__(self) -> str:
            threads.add(threading.get_ident())
            return "x" * 1_000_000

    def sync() -> Result:
        threads.add(threading.get_ident())
        return Result()

    async def coroutine() -> Result:
        return Result()

    assert "980," in (await run_one(sync)).content
    assert "980," in (await run_one(coroutine)).content
    assert threading.get_ident() not in threads


async def test_a_coroutine_runs_on_the_caller_s_loop() -> None:
    async def where() -> bool:
        return asyncio.get_running_loop() is loop

    loop = asyncio.get_running_loop()
    assert (await run_one(where)).content == "true"
    assert (await run_one(functools.partial(where))).content == "true"
    assert (await run_one(lambda: where())).content == "true"


async def test_both_kinds_of_tools_see_the_caller_s_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def coroutine() -> str:
        return variable.get()

    variable.set("mine")
    assert (await run_one(variable.get)).content == "mine"
    assert (await run_one(coroutine)).content == "mine"


async def test_a_function_gets_converted_values() -> None:
    def kind(colour: Colour, times: int) -> str:
        return f"{colour!r} {times!r}"

    [result] = await run_tool_calls([call("kind", colour="red", times="5")], named(kind))
    assert result.content == "<Colour.RED: 'red'> 5"


@dataclasses.dataclass(frozen=True)
class Case:
    call: ToolCall
    error: str


CASES = [
    Case(call("add", "malformed: no closing brace"), "malformed: no closing brace"),
    Case(call("ad", a=1), "there is no tool 'ad' (did you mean add?). There are: add, nothing"),
    Case(call("add"), "wrong arguments for add: a is missing"),
    Case(call("add", a=1, c=2), "wrong arguments for add: c is no argument (there are: a, b)"),
    Case(call("nothing"), "nothing may not be used: ask first"),
]


@pytest.mark.parametrize("case", CASES)
async def test_a_call_that_cannot_be_run_has_a_result_that_says_why(case: Case) -> None:
    def nothing() -> None:
        pytest.fail("a denied tool ran")

    tools, denied = named(add, nothing), {"nothing": "ask first"}
    bad, good = await run_tool_calls([case.call, call("add", a=1)], tools, denied)
    assert (bad.error, bad.content) == (case.error, f"Error: {case.error}")
    assert good.content == "2"
    checked = check_call(case.call, tools, denied)
    assert checked.error == case.error
    assert check_call(checked, tools, denied) is checked
    assert check_call(call("add", a=1), tools, denied).error is None


class Outcome(BaseException):
    """As test runners and other event loops make theirs, so that no program catches them by accident."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no such page"), "f raised ValueError: no such page"),
        (KeyError("a"), "f raised KeyError: 'a'"),
        (TimeoutError(), "f raised TimeoutError"),
        (asyncio.CancelledError(), "cancelled|CancelledError"),
        (StopIteration(), "StopIteration"),
        (Unprintable(), "f raised Unprintable"),
        (ExceptionGroup("two", [ValueError(), ValueError()]), "f raised ExceptionGroup"),
        (SystemExit(2), "f raised SystemExit: 2"),
        (Outcome("stop"), "f raised Outcome: stop"),
    ],
)
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_a_raising_tool_has_a_result(error: BaseException, text: str, asynchronous: bool) -> None:
    def sync() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    result = await run_one(coroutine if asynchronous else sync)
    assert result.error is not None
    assert any(part in result.error for part in text.split("|"))
    assert result.content == f"Error: {result.error}"


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_where_a_tool_raised_is_logged_for_whoever_looks(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def deep_inside() -> None:
        raise ValueError("no such page")

    async def coroutine() -> None:
        deep_inside()

    with caplog.at_level(logging.DEBUG, logger="agentkv.tools"):
        await run_one(coroutine if asynchronous else deep_inside)
    (record,) = (record for record in caplog.records if record.name == "agentkv.tools")
    assert record.exc_info is not None
    assert "deep_inside" in caplog.text


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tool_that_ends_the_program_ends_its_call_and_no_loop(asynchronous: bool) -> None:
    async def coroutine(words: str) -> None:
        parse(words)

    def parse(words: str) -> None:
        argparse.ArgumentParser(exit_on_error=True).parse_args(words.split())

    # A loop of its own: a task hands SystemExit to whoever runs the loop, besides keeping it.
    result = asyncio.run(run_one(coroutine if asynchronous else parse, words="--nonesuch"))
    assert (result.error, result.failure) == ("f raised SystemExit: 2", "raised")


async def test_a_plain_function_whose_coroutine_ends_the_program_has_a_result() -> None:
    async def coroutine() -> None:
        raise SystemExit("done")

    assert (await run_one(lambda: coroutine())).error == "f raised SystemExit: done"


async def test_arguments_that_the_function_does_not_take_are_a_result() -> None:
    async def coroutine() -> None: ...

    for function in (lambda: None, coroutine):
        result = await run_one(function, surprise=1)
        assert result.error is not None
        assert "TypeError" in result.error


async def test_a_result_whose_text_cannot_be_made_is_an_error() -> None:
    result = await run_one(Unprintable)
    assert result.error == "f raised RuntimeError"


async def test_a_tool_that_takes_too_long_is_given_up_and_the_others_go_on() -> None:
    released = threading.Event()
    cancelled = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    tools = named(tool(released.wait, name="thread", timeout=0.01), tool(forever, name="coroutine", timeout=0.01), add)
    thread, coroutine, good = await run_tool_calls([call("thread"), call("coroutine"), call("add", a=1)], tools)
    released.set()
    assert thread.error == "thread took longer than its 0.01 s and was given up"
    assert coroutine.error == "coroutine took longer than its 0.01 s and was given up"
    assert good.content == "2"
    assert cancelled.is_set()


async def test_cancelling_the_caller_cancels_the_coroutines_and_waits_for_them() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()
    released = threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    tools = named(tool(forever, name="coroutine"), tool(released.wait, name="thread"))
    running = asyncio.ensure_future(run_tool_calls([call("coroutine"), call("thread")], tools))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cleaned.is_set()
    released.set()


def test_an_interrupt_of_the_program_is_no_result() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_one(interrupted))


async def test_an_error_of_on_result_reaches_the_caller() -> None:
    def fail(result: ToolResult) -> None:
        raise LookupError(result.content)

    with pytest.raises(LookupError, match="2"):
        await run_tool_calls([call("add", a=1)], named(add), on_result=fail)


async def test_a_tool_without_a_function_is_the_caller_s_to_answer() -> None:
    ran: list[int] = []
    tools = named(Tool("ask_user", "", ANYTHING), tool(lambda: ran.append(1)))
    with pytest.raises(ValueError, match="'ask_user' has no function"):
        await run_tool_calls([call("f"), call("ask_user")], tools)
    assert not ran
    [result] = await run_tool_calls([call("ask_user")], tools, {"ask_user": "nobody is there"})
    assert result.error == "ask_user may not be used: nobody is there"


async def test_a_long_result_is_cut() -> None:
    [result] = await run_tool_calls([call("f")], named(tool(lambda: "x" * 1000)), max_result_chars=100)
    assert 90 < len(result.content) <= 100
    assert "characters left out" in result.content


async def test_no_calls_give_no_results() -> None:
    assert await run_tool_calls([], {}) == []


def test_a_tool_that_hangs_keeps_no_process_alive() -> None:
    program = """if True:
        import asyncio, threading
        from agentkv.tool_calls import ToolCall
        from agentkv.tools import Tool, run_tool_calls
        tool = Tool("hang", "", {}, call=lambda: threading.Event().wait(), timeout=0.01)
        [result] = asyncio.run(run_tool_calls([ToolCall("call00001", "hang")], {"hang": tool}))
        print(result.error)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "hang took longer than its 0.01 s and was given up\n"


async def test_what_a_thread_raises_once_it_was_given_up_disturbs_nobody() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def late() -> None:
        threads.append(threading.current_thread())
        release.wait(30)
        raise LookupError("too late")

    tool = Tool("late", "", {}, call=late, timeout=0.2)
    [result] = await run_tool_calls([ToolCall("call00001", "late")], {"late": tool})
    assert result.error == "late took longer than its 0.2 s and was given up"
    release.set()
    await asyncio.to_thread(threads[0].join, 30)
    await asyncio.sleep(0)  # What the thread has told the loop is heard.
    gc.collect()
    assert complaints == []


def test_only_so_many_threads_run_and_hang() -> None:
    threads = ToolThreads(at_once=2, left_behind=2)
    release = threading.Event()
    started = threading.Semaphore(0)

    def hang() -> bool:
        started.release()
        return release.wait(30)

    jobs = [threads.submit(hang) for _ in range(3)]
    for _ in range(2):
        assert started.acquire(timeout=30)
    assert not jobs[2][0].running()
    jobs[0][1]()
    assert started.acquire(timeout=30)  # Its place went to the third.
    jobs[1][1]()
    with pytest.raises(TooManyLeftBehind, match="2 threads"):
        threads.submit(hang)
    release.set()
    assert all(future.result(30) for future, _ in jobs)


def test_a_call_left_before_it_began_never_begins() -> None:
    threads = ToolThreads(at_once=1)
    release = threading.Event()
    ran: list[int] = []
    first, _ = threads.submit(lambda: release.wait(30))
    second, leave = threads.submit(lambda: ran.append(1))
    third, _ = threads.submit(lambda: "third")
    leave()
    release.set()
    assert third.result(30) == "third"
    assert first.result(30)
    assert second.cancelled()
    assert not ran
