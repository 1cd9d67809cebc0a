"""A task worked on over several turns: the model asks, the tools answer, until it has an answer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from agentkv.chat import Message
from agentkv.errors import StreamClosed
from agentkv.events import StreamEvent, ToolResult
from agentkv.reply import Reply
from agentkv.streams import CallStream, Stream, check_timeout
from agentkv.tool_calls import ToolCall, ToolCallCounts
from agentkv.usage import Usage

from .turns import Answered, Conversation

__all__ = ["CANCELLED", "Run", "RunHost", "RunStream", "results_as_messages"]

CANCELLED = "cancelled"
"""What the model reads of a tool that was still running, or had not begun, when its task was cancelled and kept."""

Stopped = Literal["answer", "max_turns", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a task."""

    reply: Reply
    """The last."""
    turns: int
    """How many replies there were."""
    tool_results: tuple[ToolResult, ...]
    """In the order of the calls, those first that waited before the task."""
    usage: Usage
    """The sum over all turns."""
    tool_calls: ToolCallCounts
    """Of all turns, and those that waited before them: how many, and how many of them had an error for their result,
    by why."""
    stopped: Stopped
    """"answer": the last reply called no tool; "tool_calls": it called one that has no function to run; "length": it
    was cut at max_tokens; "max_turns": it would have gone on."""


class RunHost(Protocol):
    """A session, as its run sees it."""

    def turn(self, conversation: Conversation, tool_choice: str | None, told: Callable[[Answered], None]) -> CallStream:
        """The stream of one more reply."""

    def can_run(self, call: ToolCall) -> bool:
        """There is something to run, or something to say instead."""

    async def answer(
        self, calls: tuple[ToolCall, ...], on_result: Callable[[ToolResult], None]
    ) -> list[ToolResult]: ...

    def waiting(self, conversation: Conversation) -> tuple[ToolCall, ...]:
        """Calls that were made before, all of which can be answered here, and are to be first."""

    def keep(self, conversation: Conversation) -> None:
        """A turn is finished: this is the conversation from here on."""

    def keep_results(self, conversation: Conversation) -> None:
        """The calls that waited are answered: this is the conversation from here on."""

    def enter(self) -> Conversation:
        """Begin; nothing else runs in the session meanwhile. What there is, the task among it."""

    def leave(self) -> None: ...


class RunStream(Stream):
    """The events of all turns, with the results of the tools between them.

    A cancel ends the turn that is under way: with `keep` its reply stays, and calls of it that have no result get
    CANCELLED for one; without, the session stands as after the turn before. A turn that was finished when the cancel
    came, and a task that was done, are left as they are.
    """

    def __init__(self, host: RunHost, *, max_turns: int, tool_choice: str | None, timeout: float | None) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int):
            raise TypeError(f"max_turns must be an int of at least 1, got {max_turns!r}")
        if max_turns < 1:
            raise ValueError(f"max_turns must be an int of at least 1, got {max_turns!r}")
        check_timeout(timeout)
        self._host = host
        self._max_turns = max_turns
        self._tool_choice = tool_choice
        self._timeout = timeout
        self._deadline: float | None = None
        self._begins_with: Conversation | None = None
        """Once the session is held."""
        self._events: AsyncGenerator[StreamEvent, None] | None = None
        """Once the first event was asked for."""
        self._now: CallStream | None = None
        self._tools: asyncio.Task[list[ToolResult]] | None = None
        self._run: Run | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._keeps = False
        """Whether the cancel keeps the turn that it ended."""
        self._replies: list[Reply] = []
        self._results: list[ToolResult] = []
        self._waited: tuple[ToolCall, ...] = ()
        """Calls that were made before and are answered first."""

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._events is not None:
            await self._events.aclose()
        elif self._error is None:
            # A generator that was never begun runs none of its own code when it is closed.
            self._fail(StreamClosed("this stream was left before its end; the task is not done"))

    async def __anext__(self) -> StreamEvent:
        if self._error is not None:
            raise self._error
        if self._events is None:
            self._events = self._work(self._enter())
        deadline = asyncio.timeout_at(self._deadline)
        try:
            async with deadline:
                return await anext(self._events)
        except StopAsyncIteration:
            raise
        except TimeoutError as error:
            if not deadline.expired():
                self._error = error
                raise
            self._error = TimeoutError(f"the task was not done within {self._timeout} s")
            raise self._error from None
        except BaseException as error:
            self._error = StreamClosed("the task ended by an error") if not isinstance(error, Exception) else error
            raise

    async def run(self) -> Run:
        """What became of the task, once it is done. StreamClosed where it was left or cancelled before."""
        async for _ in self:
            pass
        if self._run is None:
            raise self._error or StreamClosed("this stream was left before its end; the task is not done")
        return self._run

    async def reply(self) -> Reply:
        async for _ in self:
            pass
        if self._run is None and self._cancelled and self._replies:
            return self._replies[-1]
        return (await self.run()).reply

    async def cancel(self, *, keep: bool = False) -> None:
        if self._cancelled or self._error is not None:
            return
        self._cancelled, self._keeps = True, keep
        if self._events is None:
            self._fail(StreamClosed("this stream was cancelled before it began; it has no reply"))
            return
        if self._tools is not None and not self._tools.done():
            self._tools.cancel()
            await asyncio.wait([self._tools])
        if self._now is not None:
            await self._now.cancel(keep=keep)

    def __repr__(self) -> str:
        if "_results" not in vars(self):
            return "<RunStream: not made>"
        if self._run is not None:
            state = f"done ({self._run.stopped})"
        elif self._error is not None:
            state = f"ended by {type(self._error).__name__}"
        elif self._cancelled:
            state = "cancelled"
        else:
            state = "not begun" if self._begins_with is None else "running"
        return f"<RunStream: {state}, {len(self._replies)} of at most {self._max_turns} turns>"

    def _enter(self) -> Conversation:
        """Hold the session, and start the time, if it was not done yet."""
        if self._error is not None:
            raise self._error
        if self._begins_with is None:
            self._begins_with = self._host.enter()
            if self._timeout is not None:
                self._deadline = asyncio.get_running_loop().time() + self._timeout
        return self._begins_with

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._host.leave()

    async def _work(self, conversation: Conversation) -> AsyncGenerator[StreamEvent, None]:
        choice = self._tool_choice
        try:
            if waiting := self._host.waiting(conversation):
                self._waited = waiting
                come: dict[str, ToolResult] = {}
                async for result in self._answer(waiting):
                    come[result.call.id] = result
                    yield result
                finished = len(come) == len(waiting)
                if not finished and not self._keeps:
                    return
                conversation = self._with_results(conversation, waiting, come)
                self._host.keep_results(conversation)
                if not finished:
                    return
                if choice == "required" or any(call.name == choice for call in waiting):
                    choice = "auto"
            # Asked before each turn: a cancel that comes between two turns must not begin another one.
            while not self._cancelled:
                answers: list[Answered] = []
                # Known before it begins, so that a cancel from another task reaches it while it waits for its place.
                stream = self._now = self._host.turn(conversation, choice, answers.append)
                try:
                    async with stream:
                        async for event in stream:
                            yield event
                        reply = await stream.reply()
                except StreamClosed:
                    if self._cancelled:
                        return
                    raise
                self._replies.append(reply)
                if not answers:
                    # Cancelled, and not to be kept.
                    return
                conversation = answers[0].conversation
                stopped = self._stops(reply)
                # Also a reply that was cut gets results for the calls in it, or nothing could be asked after it.
                if stopped is not None and not (stopped == "length" and self._can_answer(reply)):
                    self._host.keep(conversation)
                    self._end(stopped)
                    return
                come = {}
                if not self._cancelled:
                    async for result in self._answer(reply.tool_calls):
                        come[result.call.id] = result
                        yield result
                finished = len(come) == len(reply.tool_calls) and reply.finish_reason != "cancelled"
                if not finished and not self._keeps:
                    return
                conversation = self._with_results(conversation, reply.tool_calls, come)
                self._host.keep(conversation)
                if not finished:
                    return
                # It has been called once: from here on the model is free to answer.
                choice = None if choice is None else "auto"
                if stopped is None and len(self._replies) == self._max_turns:
                    stopped = "max_turns"
                if stopped is not None:
                    self._end(stopped)
                    return
        finally:
            self._host.leave()

    def _with_results(
        self, conversation: Conversation, calls: tuple[ToolCall, ...], come: Mapping[str, ToolResult]
    ) -> Conversation:
        """With a result for each call: what has come, by the call's id, and CANCELLED for the others."""
        results = [come.get(call.id) or _cancelled(call) for call in calls]
        self._results += results
        return conversation.then(*results_as_messages(results))

    def _stops(self, reply: Reply) -> Stopped | None:
        if reply.finish_reason == "length":
            return "length"
        if reply.finish_reason == "cancelled":
            return None
        if not reply.tool_calls:
            return "answer"
        return None if self._can_answer(reply) else "tool_calls"

    def _can_answer(self, reply: Reply) -> bool:
        return bool(reply.tool_calls) and all(self._host.can_run(call) for call in reply.tool_calls)

    def _end(self, stopped: Stopped) -> None:
        usage = sum((reply.usage for reply in self._replies), Usage())
        made = [*self._waited, *(call for reply in self._replies for call in reply.tool_calls)]
        calls = ToolCallCounts.of_calls(made)
        calls = sum((result.counts for result in self._results), calls)
        self._run = Run(self._replies[-1], len(self._replies), tuple(self._results), usage, calls, stopped)

    async def _answer(self, calls: tuple[ToolCall, ...]) -> AsyncIterator[ToolResult]:
        """Each result as it comes; of those that a cancel stops there is none."""
        come: asyncio.Queue[ToolResult | None] = asyncio.Queue()
        tools = self._tools = asyncio.ensure_future(self._host.answer(calls, come.put_nowait))
        tools.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while (result := await come.get()) is not None:
                yield result
            if not (tools.cancelled() and self._cancelled):
                tools.result()
        finally:
            if not tools.done():
                tools.cancel()
                await asyncio.wait([tools])


def _cancelled(call: ToolCall) -> ToolResult:
    return ToolResult(call, CANCELLED, CANCELLED, 0.0)


def results_as_messages(results: list[ToolResult]) -> tuple[Message, ...]:
    """What the model reads of its tools."""
    return tuple(
        Message("tool", result.content, tool_call_id=result.call.id, name=result.call.name or None)
        for result in results
    )
