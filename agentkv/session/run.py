"""A task worked on over several turns: the model asks, the tools answer, until it has an answer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
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

__all__ = ["Run", "RunHost", "RunStream", "results_as_messages"]

Stopped = Literal["answer", "max_turns", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a task."""

    reply: Reply
    """The last."""
    turns: int
    """How many replies there were."""
    tool_results: tuple[ToolResult, ...]
    """In the order of the calls."""
    usage: Usage
    """The sum over all turns."""
    tool_calls: ToolCallCounts
    """Of all turns: how many, and how many of them had an error for their result, by why."""
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

    def keep(self, conversation: Conversation) -> None:
        """A turn is finished: this is the conversation from here on."""

    def enter(self) -> Conversation:
        """Begin; nothing else runs in the session meanwhile. What there is, the task among it."""

    def leave(self) -> None: ...


class RunStream(Stream):
    """The events of all turns, with the results of the tools between them."""

    def __init__(self, host: RunHost, *, max_turns: int, tool_choice: str | None, timeout: float | None) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ValueError(f"max_turns must be an int of at least 1, got {max_turns!r}")
        check_timeout(timeout)
        self._host = host
        self._max_turns = max_turns
        self._tool_choice = tool_choice
        self._timeout = timeout
        self._deadline: float | None = None
        self._events: AsyncIterator[StreamEvent] | None = None
        self._now: CallStream | None = None
        self._tools: asyncio.Task[list[ToolResult]] | None = None
        self._run: Run | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._replies: list[Reply] = []
        self._results: list[ToolResult] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._events is not None:
            await self._events.aclose()  # type: ignore[attr-defined]

    async def __anext__(self) -> StreamEvent:
        if self._error is not None:
            raise self._error
        if self._events is None:
            self._events = self._work()
            if self._timeout is not None:
                self._deadline = asyncio.get_running_loop().time() + self._timeout
        deadline = asyncio.timeout_at(self._deadline)
        try:
            async with deadline:
                return await self._events.__anext__()
        except TimeoutError:
            if deadline.expired():
                error = TimeoutError(f"the task was not done within {self._timeout} s")
            self._error = error
            raise error from None
        except StopAsyncIteration:
            raise
        except BaseException as error:
            self._error = StreamClosed("the task ended by an error") if not isinstance(error, Exception) else error
            raise

    async def run(self) -> Run:
        """What became of the task, once it is done."""
        async for _ in self:
            pass
        if self._run is None:
            raise self._error or StreamClosed("this stream was left before its end; the task is not done")
        return self._run

    async def reply(self) -> Reply:
        async for _ in self:
            pass
        if self._cancelled and self._replies:
            return self._replies[-1]
        return (await self.run()).reply

    async def cancel(self, *, keep: bool = False) -> None:
        self._cancelled = True
        if self._tools is not None:
            self._tools.cancel()
        if self._now is not None:
            await self._now.cancel(keep=keep)

    async def _work(self) -> AsyncIterator[StreamEvent]:
        conversation, choice = self._host.enter(), self._tool_choice
        try:
            while True:
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
                if self._cancelled:
                    if answers:
                        self._host.keep(answers[0].conversation)
                    return
                conversation = answers[0].conversation
                stopped = self._stops(reply)
                # Also a reply that was cut gets results for the calls in it, or nothing could be asked after it.
                if stopped is not None and not (stopped == "length" and self._can_answer(reply)):
                    self._host.keep(conversation)
                    self._end(stopped)
                    return
                async for result in self._answer(reply.tool_calls):
                    yield result
                if self._cancelled:
                    return
                conversation = conversation.then(*results_as_messages(self._results[-len(reply.tool_calls) :]))
                self._host.keep(conversation)
                # It has been called once: from here on the model is free to answer.
                choice = None if choice is None else "auto"
                if stopped is None and len(self._replies) == self._max_turns:
                    stopped = "max_turns"
                if stopped is not None:
                    self._end(stopped)
                    return
        finally:
            self._host.leave()

    def _stops(self, reply: Reply) -> Stopped | None:
        if reply.finish_reason == "length":
            return "length"
        if not reply.tool_calls:
            return "answer"
        return None if self._can_answer(reply) else "tool_calls"

    def _can_answer(self, reply: Reply) -> bool:
        return bool(reply.tool_calls) and all(self._host.can_run(call) for call in reply.tool_calls)

    def _end(self, stopped: Stopped) -> None:
        usage = sum((reply.usage for reply in self._replies), Usage())
        calls = ToolCallCounts.of_calls(call for reply in self._replies for call in reply.tool_calls)
        calls = sum((result.counts for result in self._results), calls)
        self._run = Run(self._replies[-1], len(self._replies), tuple(self._results), usage, calls, stopped)

    async def _answer(self, calls: tuple[ToolCall, ...]) -> AsyncIterator[ToolResult]:
        """Each result as it comes; those of this turn are kept in the order of the calls."""
        come: asyncio.Queue[ToolResult | None] = asyncio.Queue()
        self._tools = asyncio.ensure_future(self._host.answer(calls, come.put_nowait))
        self._tools.add_done_callback(lambda _: come.put_nowait(None))
        try:
            while (result := await come.get()) is not None:
                yield result
            if not (self._tools.cancelled() and self._cancelled):
                self._results += self._tools.result()
        finally:
            if not self._tools.done():
                self._tools.cancel()
                await asyncio.wait([self._tools])


def results_as_messages(results: list[ToolResult]) -> tuple[Message, ...]:
    """What the model reads of its tools."""
    return tuple(
        Message("tool", result.content, tool_call_id=result.call.id, name=result.call.name or None)
        for result in results
    )
