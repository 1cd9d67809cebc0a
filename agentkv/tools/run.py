"""Running the calls that a model made: all at once, each with a result that the model can read, whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import inspect
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from agentkv.events import ToolResult
from agentkv.tool_calls import ToolCall, ToolFailure
from agentkv.tools.results import MAX_RESULT_CHARS, cut_in_the_middle, result_text
from agentkv.tools.threads import ToolThreads, TooManyLeftBehind
from agentkv.tools.tool import Tool
from agentkv.tools.validation import Validated, exception_text, validate

__all__ = ["check_call", "run_tool_calls"]

_log = logging.getLogger("agentkv.tools")

_GRACE = 1.0
"""Seconds that a coroutine has for its own cleaning up once its time is over."""

_MOST_NAMES = 20

_threads = ToolThreads()


class _Failed(Exception):
    """A call without a result; the text is what the model reads."""

    def __init__(self, text: str, failure: ToolFailure = "raised") -> None:
        super().__init__(text)
        self.failure: ToolFailure = failure


def check_call(call: ToolCall, tools: Mapping[str, Tool], denied: Mapping[str, str]) -> ToolCall:
    """The call with `error` and `failure` set where it cannot be run: malformed, unknown, denied, wrong arguments.

    tools    by name
    denied   reasons, by the tool's name
    """
    checked = _checked(call, tools, denied)
    if (checked.error, checked.failure) == (call.error, call.failure):
        return call
    return dataclasses.replace(call, error=checked.error, failure=checked.failure)


async def run_tool_calls(
    calls: Sequence[ToolCall],
    tools: Mapping[str, Tool],
    denied: Mapping[str, str] | None = None,
    *,
    max_result_chars: int = MAX_RESULT_CHARS,
    on_result: Callable[[ToolResult], None] | None = None,
) -> list[ToolResult]:
    """Run the calls side by side; the results stand in the order of the calls.

    Coroutine functions run on this loop, everything else in threads that see the caller's context variables.
    A call that cannot be run, raises or takes too long has a result too, with `error` set: whatever it raises, a
    SystemExit for one, but for KeyboardInterrupt. A thread cannot be stopped: one that hangs is left behind.
    `on_result` is called on this loop with each result as it comes.

    Cancelling this call cancels the coroutines, waits for their cleaning up, and leaves threads behind.
    ValueError, before anything runs, where a tool has no `call`: only whoever reads the reply can answer it.
    """
    if max_result_chars < 1:
        raise ValueError(f"max_result_chars is {max_result_chars}; a result has at least 1 character")
    checked = [_checked(call, tools, denied or {}) for call in calls]
    for call, validated in zip(calls, checked, strict=True):
        if validated.error is None and tools[call.name].call is None:
            raise ValueError(f"tool {call.name!r} has no function to call; answer it yourself, or give it call=")

    async def answer(call: ToolCall, validated: Validated) -> ToolResult:
        result = await _result(call, validated, tools, max_result_chars)
        if on_result is not None:
            on_result(result)
        return result

    running = [asyncio.ensure_future(answer(*each)) for each in zip(calls, checked, strict=True)]
    try:
        return list(await asyncio.gather(*running))
    except BaseException:
        # One was cancelled, or on_result raised: the others end before the caller goes on.
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


def _checked(call: ToolCall, tools: Mapping[str, Tool], denied: Mapping[str, str]) -> Validated:
    if call.error is not None:
        return Validated(error=call.error, failure=call.failure or "malformed")
    tool = tools.get(call.name)
    if tool is None:
        return Validated(error=_unknown(call.name, tools), failure="unknown_tool")
    if call.name in denied:
        return Validated(error=f"{call.name} may not be used: {denied[call.name]}", failure="denied")
    validated = validate(tool, call.arguments)
    if validated.error is None:
        return validated
    return Validated(error=f"wrong arguments for {call.name}: {validated.error}", failure="wrong_arguments")


def _unknown(name: str, tools: Mapping[str, Tool]) -> str:
    if not tools:
        return f"there is no tool {name!r}, nor any other"
    names = sorted(tools)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"there is no tool {name!r}{hint}. There are: {', '.join(names[:_MOST_NAMES])}{more}"


async def _result(call: ToolCall, validated: Validated, tools: Mapping[str, Tool], max_result_chars: int) -> ToolResult:
    """The call's result; raises only what is no fault of the tool: this task's cancelling, an interrupt."""
    started = time.perf_counter()
    error, reason = validated.error, validated.failure
    content = ""
    if validated.arguments is not None:
        try:
            content = await _within_time(tools[call.name], validated.arguments, max_result_chars)
        except _Failed as failure:
            error, reason = str(failure), failure.failure
    if error is not None:
        error = cut_in_the_middle(result_text(error), max_result_chars)
        content = cut_in_the_middle(f"Error: {error}", max_result_chars)
    return ToolResult(call, content, error, time.perf_counter() - started, failure=reason)


async def _within_time(tool: Tool, arguments: dict[str, Any], max_chars: int) -> str:
    """What the tool returned, as text. _Failed where it raised, or was not done in its time."""
    call = tool.call
    assert call is not None, f"{tool.name} was let through without a function"
    until = None if tool.timeout is None else time.monotonic() + tool.timeout

    async def awaited(make: Callable[[], Any]) -> Any:
        # Here, because a task lets SystemExit through to whoever runs the loop, besides keeping it.
        try:
            return await make()
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            raise _raised(tool, error) from error

    if _is_async(call):
        value = await _as_coroutine(tool, awaited(lambda: call(**arguments)), until)
    else:
        value = await _in_thread(tool, lambda: _text_unless_awaitable(call(**arguments), max_chars), until)
        if not inspect.isawaitable(value):
            return str(value)
        # A plain function that returns a coroutine, as a lambda may.
        made = value
        value = await _as_coroutine(tool, awaited(lambda: made), until)
    if isinstance(value, str):
        return _text(value, max_chars)
    return str(await _in_thread(tool, lambda: _text(value, max_chars), until))


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _text_unless_awaitable(value: Any, max_chars: int) -> Any:
    """Made in the tool's thread: the text of a large result would hold up the loop."""
    return value if inspect.isawaitable(value) else _text(value, max_chars)


def _text(value: object, max_chars: int) -> str:
    return cut_in_the_middle(result_text(value), max_chars)


async def _in_thread(tool: Tool, work: Callable[[], Any], until: float | None) -> Any:
    def judged() -> Any:
        # Here, because an asyncio future takes neither StopIteration nor a CancelledError that is not its own, and
        # because SystemExit, as argparse raises it for a model's bad argument, would end the program.
        try:
            return work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _raised(tool, error) from error

    try:
        future, leave = _threads.submit(judged)
    except TooManyLeftBehind as error:
        raise _Failed(f"{tool.name} was not started: {error}") from None
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiting}, timeout=_left(until))
        if not waiting.done():
            raise _Failed(_too_late(tool), "timed_out")
        return _outcome(tool, waiting)
    finally:
        leave()
        # Nobody reads any more what a thread that was given up raises later, and asyncio would complain of that.
        waiting.cancel()


async def _as_coroutine(tool: Tool, coroutine: Coroutine[Any, Any, Any], until: float | None) -> Any:
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=_left(until))
    except asyncio.CancelledError:
        # The caller is being cancelled: the tool cleans up first, as with any awaited coroutine.
        task.cancel()
        await asyncio.wait({task})
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_GRACE)
        raise _Failed(_too_late(tool), "timed_out")
    return _outcome(tool, task)


def _outcome(tool: Tool, done: asyncio.Future[Any]) -> Any:
    """Its result; _Failed for what the tool raised, or where it cancelled itself."""
    if done.cancelled():
        raise _Failed(f"{tool.name} was cancelled before it had a result")
    return done.result()  # Or raises what was judged already; or KeyboardInterrupt, which ends the program.


def _raised(tool: Tool, error: BaseException) -> _Failed:
    _log.debug("tool %s raised", tool.name, exc_info=error)
    return _Failed(f"{tool.name} raised {exception_text(error)}")


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())


def _too_late(tool: Tool) -> str:
    return f"{tool.name} took longer than its {tool.timeout:g} s and was given up"
