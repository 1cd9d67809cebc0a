"""A running call as its caller sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Self

from agentkv.calls import CallFailed, ChoiceEnded, TokensAdded, Update
from agentkv.errors import EngineFailed, RuntimeClosed, StreamClosed
from agentkv.events import StreamEvent, TextDelta, TurnEnd
from agentkv.reply import Reply
from agentkv.worker import Worker

from .bridge import Mailbox, await_result

__all__ = ["Stream", "Submitted"]


class Submitted:
    """A call that is in the engine: where to abort it, and where its updates arrive."""

    __slots__ = ("call_id", "mailbox", "worker")

    def __init__(self, worker: Worker, call_id: int, mailbox: Mailbox) -> None:
        self.worker = worker
        self.call_id = call_id
        self.mailbox = mailbox


class _Unread:
    """Deltas of one choice that nobody has read yet, to be read as one."""

    __slots__ = ("index", "texts", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.texts: list[str] = []
        self.token_ids: list[int] = []

    def delta(self) -> TextDelta:
        """All of it."""
        return TextDelta("".join(self.texts), tuple(self.token_ids), self.index)


class Stream:
    """An async iterator of events, and an async context manager.

        async with runtime.stream("Once upon") as stream:
            async for text in stream.text():
                print(text, end="")
        reply = await stream.reply()

    The call starts with the block, or with the first await. Leaving the block early aborts it before the block is
    left. An unread event costs the engine nothing: the deltas of one choice are merged until they are read.
    For one task on one loop.
    """

    def __init__(self, submit: Callable[[], Awaitable[Submitted]], n: int, timeout: float | None) -> None:
        self._submit = submit
        self._n = n
        self._timeout = timeout
        self._deadline: float | None = None
        self._submitted: Submitted | None = None
        self._events: deque[TurnEnd | _Unread] = deque()
        self._open: dict[int, _Unread] = {}
        """By choice: the delta that its next tokens are added to."""
        self._replies: dict[int, Reply] = {}
        self._ended = False
        self._error: BaseException | None = None
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
                raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
            if not timeout > 0:
                raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._abort()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        event = self._events.popleft()
        if isinstance(event, _Unread):
            self._open.pop(event.index, None)
            return event.delta()
        return event

    async def text(self) -> AsyncIterator[str]:
        """The text of the first choice, piece by piece; pieces joined are `reply.text`."""
        async for event in self:
            if isinstance(event, TextDelta) and event.index == 0 and event.text:
                yield event.text

    async def replies(self) -> list[Reply]:
        """All n replies, once complete. Events not yet read stay readable."""
        while not self._ended:
            await self._read()
        if self._error is not None:
            raise self._error
        return [self._replies[index] for index in range(self._n)]

    async def reply(self) -> Reply:
        """The reply of the first choice, once the call is complete."""
        return (await self.replies())[0]

    async def cancel(self, *, keep: bool = False) -> None:
        """Stop here. Choices that have not ended get the finish_reason "cancelled" and the text so far.

        keep: the answer so far stays cached whole, so that a conversation can go on from it. Returns when nothing of
        the call runs any more. A call that has ended, or never started, is left as it is.
        """
        if self._ended:
            return
        if self._submitted is None:
            self._fail(StreamClosed("this stream was cancelled before it began; it has no reply"))
            return
        await await_result(self._submitted.worker.cancel(self._submitted.call_id, keep=keep))
        while not self._ended:
            self._take(await self._submitted.mailbox.take())

    def __del__(self) -> None:
        # An abandoned stream is not read by anybody: nothing of it need be computed.
        if self._submitted is not None and not self._ended:
            self._submitted.worker.abort(self._submitted.call_id)

    async def _start(self) -> Submitted:
        if self._submitted is None:
            if self._timeout is not None:
                self._deadline = asyncio.get_running_loop().time() + self._timeout
            deadline = asyncio.timeout_at(self._deadline)
            try:
                async with deadline:
                    self._submitted = await self._submit()
            except TimeoutError as error:
                if not deadline.expired():
                    self._fail(error)
                    raise
                self._fail(self._timed_out())
                raise self._timed_out() from None
            except asyncio.CancelledError:
                self._fail(StreamClosed("the task that began this stream was cancelled; it has no reply"))
                raise
            except BaseException as error:
                self._fail(error)
                raise
        return self._submitted

    async def _read(self) -> None:
        """Wait for updates and take them in. Whatever interrupts the wait aborts the call first."""
        submitted = await self._start()
        try:
            async with asyncio.timeout_at(self._deadline):
                updates = await submitted.mailbox.take()
        except TimeoutError:
            await self._abort()
            self._fail(self._timed_out())
            raise self._timed_out() from None
        except BaseException:
            await self._abort()
            raise
        self._take(updates)

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(f"no complete answer within {self._timeout} s")

    async def _abort(self) -> None:
        """Nothing of the call is left in the engine afterwards."""
        if self._submitted is None or self._ended:
            return
        self._ended = True
        self._error = StreamClosed("this stream was left before its end; it has no reply")
        done = self._submitted.worker.abort(self._submitted.call_id)
        await asyncio.shield(asyncio.ensure_future(_settled(done)))

    def _fail(self, error: BaseException) -> None:
        self._ended = True
        self._error = error

    def _take(self, updates: Sequence[Update]) -> None:
        for update in updates:
            if isinstance(update, TokensAdded):
                self._add_delta(update)
            elif isinstance(update, ChoiceEnded):
                self._replies[update.index] = update.reply
                self._open.pop(update.index, None)
                self._events.append(TurnEnd(update.reply, update.index))
                self._ended = update.last
            elif isinstance(update, CallFailed):
                self._fail(update.error)

    def _add_delta(self, update: TokensAdded) -> None:
        unread = self._open.get(update.index)
        if unread is None:
            unread = self._open[update.index] = _Unread(update.index)
            self._events.append(unread)
        unread.texts.append(update.text)
        unread.token_ids.extend(update.token_ids)


async def _settled(done: Future[None]) -> None:
    """Wait for an abort; that the engine is gone already is as good."""
    try:
        await await_result(done)
    except (RuntimeClosed, EngineFailed):
        return
