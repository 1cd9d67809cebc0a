"""The stream of one call that a server answers."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, Self

from agentkv.errors import StreamClosed
from agentkv.events import StreamEvent, TurnEnd
from agentkv.reply import Reply
from agentkv.streams import Stream, check_timeout, post
from agentkv.tools import Tool

from .answer import Answer
from .connection import Connection, Events

__all__ = ["Asked", "RemoteStream"]


_closing: set[asyncio.Task[None]] = set()
"""Of abandoned streams; a loop holds its tasks weakly."""


class Asked(Protocol):
    """One call, as its stream sees it."""

    n: int
    tools: Mapping[str, Tool]
    denied: Mapping[str, str]

    async def begin(self) -> tuple[str, dict[str, Any]]:
        """The path and the body; what it raises is the stream's error."""

    def told(self, reply: Reply) -> None:
        """A choice is complete, or was cancelled and is to be kept."""

    def left(self) -> None:
        """Nothing of the call runs any more, however it ended; called once, if `begin` was."""


class RemoteStream(Stream):
    """As the stream of a Runtime's call, with the same events, but for token ids.

    What nobody reads waits on the way, and once that is full at the server, which goes on computing. Leaving or
    cancelling closes the connection, which ends the call there.
    """

    def __init__(self, connection: Connection, asked: Asked, timeout: float | None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """Once it has begun."""
        check_timeout(timeout)
        self._connection, self._asked, self._timeout = connection, asked, timeout
        self._deadline: float | None = None
        self._events: deque[StreamEvent] = deque()
        self._answer = Answer(asked.n, asked.tools, asked.denied)
        self._replies: list[Reply] = []
        self._source: Events | None = None
        """Once the server has begun to answer."""
        self._begun: float | None = None
        self._ttft: float | None = None
        self._waits: asyncio.Timeout | None = None
        """Around what is awaited of the server: what ends that wait from another task."""
        self._waits_no_more = asyncio.Event()
        self._unwanted = False
        """Cancelled."""
        self._keeps = False
        self._ended = False
        self._error: BaseException | None = None

    @property
    def n(self) -> int:
        """How many choices it has."""
        return self._asked.n

    async def __aenter__(self) -> Self:
        if self._source is None and not self._ended:
            await self._wait(self._begin)
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self._ended:
            await self._fail(StreamClosed("this stream was left before its end; it has no reply"))

    async def __anext__(self) -> StreamEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._wait(self._begin if self._source is None else self._read)
        return self._events.popleft()

    async def replies(self) -> list[Reply]:
        """All n replies, once complete. Events not yet read stay readable."""
        while not self._ended:
            await self._wait(self._begin if self._source is None else self._read)
        if self._error is not None:
            raise self._error
        return list(self._replies)

    async def reply(self) -> Reply:
        return (await self.replies())[0]

    async def cancel(self, *, keep: bool = False) -> None:
        if self._ended:
            return
        self._unwanted, self._keeps = True, keep
        if self._waits is not None:
            if not self._waits.expired():
                self._waits.reschedule(asyncio.get_running_loop().time())
            await self._waits_no_more.wait()
        # What was waited for may have come at the same moment.
        if not self._ended:
            await self._end_cancelled()

    def __del__(self) -> None:
        # An abandoned stream is not read by anybody: nothing of it need be computed.
        if self._loop is not None and not self._ended:
            self._asked.left()
            if self._source is not None:
                post(self._loop, functools.partial(_close_soon, self._source))

    async def _begin(self) -> None:
        path, body = await self._asked.begin()
        self._source = await self._connection.post(path, body)

    async def _read(self) -> None:
        assert self._source is not None, "what is read has begun"
        chunk = await self._source.next()
        if chunk is None:
            await self._hang_up()
            self._end(keep=True)
            return
        events = self._answer.read(chunk)
        if events and self._ttft is None and self._begun is not None:
            self._ttft = time.monotonic() - self._begun
        self._events += events

    async def _wait(self, step: Callable[[], Awaitable[None]]) -> None:
        """One step, within the time there is. Whatever interrupts it ends the call first."""
        if self._unwanted:
            await self._end_cancelled()
            return
        if self._begun is None:
            self._begun, self._loop = time.monotonic(), asyncio.get_running_loop()
            if self._timeout is not None:
                self._deadline = asyncio.get_running_loop().time() + self._timeout
        deadline = asyncio.timeout_at(self._deadline)
        self._waits_no_more.clear()
        try:
            async with deadline:
                self._waits = deadline
                await step()
        except TimeoutError as error:
            if not deadline.expired():
                await self._fail(error)
                raise
            if self._unwanted:
                # The wait is over for whoever cancels only when this is done.
                await self._end_cancelled()
                return
            timed_out = TimeoutError(f"no complete answer within {self._timeout} s")
            await self._fail(timed_out)
            raise timed_out from None
        except asyncio.CancelledError:
            await self._fail(StreamClosed("the task that read this stream was cancelled; it has no reply"))
            raise
        except BaseException as error:
            await self._fail(error)
            raise
        finally:
            self._waits = None
            self._waits_no_more.set()

    async def _end_cancelled(self) -> None:
        if self._source is None:
            await self._fail(StreamClosed("this stream was cancelled before it began; it has no reply"))
            return
        await self._hang_up()
        self._end(keep=self._keeps)

    def _end(self, *, keep: bool) -> None:
        assert self._begun is not None, "what ends has begun"
        self._ended = True
        try:
            self._replies = self._answer.replies(ttft=self._ttft, duration=time.monotonic() - self._begun)
            for index, reply in enumerate(self._replies):
                self._events.append(TurnEnd(reply, index))
                if keep:
                    self._asked.told(reply)
        finally:
            self._asked.left()

    async def _fail(self, error: BaseException) -> None:
        ended_before, self._ended = self._ended, True
        self._error = error
        try:
            await self._hang_up()
        finally:
            if self._begun is not None and not ended_before:
                self._asked.left()

    async def _hang_up(self) -> None:
        if self._source is not None:
            await asyncio.shield(asyncio.ensure_future(self._source.close()))


def _close_soon(source: Events) -> None:
    """On the loop of a stream that nobody holds any more."""
    task = asyncio.get_running_loop().create_task(source.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
