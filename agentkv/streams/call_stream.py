"""The stream of one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Self

from agentkv.calls import CallFailed, ChoiceEnded, TokensAdded, Update
from agentkv.errors import EngineFailed, RuntimeClosed, StreamClosed
from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply

from .bridge import await_result
from .stream import Stream, check_timeout
from .turn import AtOnce, Delta, Submitted, Turn

__all__ = ["CallStream"]


class _Unread:
    """Deltas of one kind of one choice, in a row, that nobody has read yet; they are read as one."""

    __slots__ = ("first", "texts", "token_ids")

    def __init__(self, first: Delta) -> None:
        self.first = first
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.add(first)

    def takes(self, delta: Delta) -> bool:
        """Whether this one can be read together with those that are there."""
        first = self.first
        if isinstance(first, ToolCallDelta) or isinstance(delta, ToolCallDelta):
            return isinstance(first, ToolCallDelta) and isinstance(delta, ToolCallDelta) and first.id == delta.id
        return type(first) is type(delta)

    def add(self, delta: Delta) -> None:
        if isinstance(delta, ToolCallDelta):
            self.texts.append(delta.arguments_text)
        else:
            self.texts.append(delta.text)
            self.token_ids.extend(delta.token_ids)

    def delta(self) -> Delta:
        """All of them."""
        first, text = self.first, "".join(self.texts)
        if isinstance(first, ToolCallDelta):
            return ToolCallDelta(first.index, first.id, first.name, text)
        kind = ReasoningDelta if isinstance(first, ReasoningDelta) else TextDelta
        return kind(text, tuple(self.token_ids), first.index)


class CallStream(Stream):
    """Events of one call, as its Turn reads them."""

    _submitted: Submitted | None = None
    _begun = _ended = False
    _error: BaseException | None = None

    def __init__(self, turn: Turn, timeout: float | None) -> None:
        self._turn = turn
        self._timeout = timeout
        self._deadline: float | None = None
        self._events: deque[TurnEnd | _Unread] = deque()
        self._open: dict[int, _Unread] = {}
        """By choice: the unread deltas that its next one may be added to."""
        self._replies: dict[int, Reply] = {}
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(turn.n)]
        self._beginning: asyncio.Timeout | None = None
        """Around `begin`, while it is awaited: what ends that wait from another task."""
        self._not_beginning = asyncio.Event()
        self._unwanted = False
        """Cancelled while it was beginning."""
        self._counts = True
        """Whether choices that end from now on become part of the conversation."""
        self._at_once: AtOnce | None = None
        self._fault: Exception | None = None
        """What reading at once raised, until the task that waits has ended the call."""
        check_timeout(timeout)

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._abort()

    async def __anext__(self) -> StreamEvent:
        while not self._events:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            await self._read()
        event = self._events.popleft()
        return self._read_out(event) if isinstance(event, _Unread) else event

    def read_at_once(self, reader: AtOnce | None) -> None:
        """Give deltas that come while this stream is waited for to `reader`, if it is ready, without a switch of tasks.

        They are not read again. Ends, and all that comes while it is not ready, are read as ever, so somebody has to
        wait. What the reader raises ends the call, and is raised to whoever waits. None: no more.
        """
        self._at_once = reader

    async def replies(self) -> list[Reply]:
        """All n replies, once complete. Events not yet read stay readable."""
        while not self._ended:
            await self._read()
        if self._error is not None:
            raise self._error
        return [self._replies[index] for index in range(self._turn.n)]

    @property
    def n(self) -> int:
        """How many choices it has."""
        return self._turn.n

    def logprobs(self, index: int = 0) -> Sequence[TokenLogprobs]:
        """Of the tokens that came so far of one choice, in order; they grow as the stream is read.

        Empty where `logprobs=` was not asked for. The token_ids of the choice's text and reasoning deltas, joined, are
        these tokens.
        """
        return self._logprobs[index]

    async def reply(self) -> Reply:
        return (await self.replies())[0]

    async def cancel(self, *, keep: bool = False) -> None:
        if self._beginning is not None:
            self._unwanted = True
            if not self._beginning.expired():
                self._beginning.reschedule(asyncio.get_running_loop().time())
            await self._not_beginning.wait()
        if self._ended:
            return
        if self._submitted is None:
            self._fail(_cancelled())
            return
        self._counts = keep
        await await_result(self._submitted.worker.cancel(self._submitted.call_id, keep=keep))
        while not self._ended:
            await self._take_or_abort(await self._submitted.mailbox.take())

    def __repr__(self) -> str:
        if self._error is not None:
            state = f"ended by {type(self._error).__name__}"
        elif self._ended:
            state = "ended"
        else:
            state = "running" if self._submitted is not None else "beginning" if self._begun else "not begun"
        return f"<CallStream: {state}>"

    def __del__(self) -> None:
        # An abandoned stream is not read by anybody: nothing of it need be computed.
        if self._submitted is not None and not self._ended:
            self._submitted.worker.abandon(self._submitted.call_id)
            self._turn.left()

    async def _start(self) -> Submitted:
        if self._submitted is not None:
            return self._submitted
        if self._error is not None:
            raise self._error
        if self._timeout is not None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        deadline = asyncio.timeout_at(self._deadline)
        try:
            async with deadline:
                self._begun, self._beginning = True, deadline
                self._submitted = await self._turn.begin()
        except TimeoutError as error:
            if not deadline.expired():
                self._fail(error)
                raise
            self._fail(_cancelled() if self._unwanted else self._timed_out())
            assert self._error is not None, "a stream that failed has an error"
            raise self._error from None
        except asyncio.CancelledError:
            self._fail(StreamClosed("the task that began this stream was cancelled; it has no reply"))
            raise
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._beginning = None
            self._not_beginning.set()
        return self._submitted

    async def _read(self) -> None:
        """Wait for updates and take them in. Whatever interrupts the wait aborts the call first."""
        submitted = await self._start()
        try:
            async with asyncio.timeout_at(self._deadline):
                updates = await submitted.mailbox.take(self._take_at_once if self._at_once is not None else None)
        except TimeoutError:
            await self._abort()
            self._fail(self._timed_out())
            raise self._timed_out() from None
        except BaseException:
            await self._abort()
            raise
        if self._fault is not None:
            await self._abort()
            self._error, self._fault = self._fault, None
        else:
            await self._take_or_abort(updates)

    def _take_at_once(self, updates: Sequence[Update]) -> bool:
        """Read these, between the tasks of the loop; False: they are for the task that waits."""
        reader = self._at_once
        if self._fault is not None or reader is None:
            return False
        try:
            if not reader.ready():
                return False
            added = [update for update in updates if isinstance(update, TokensAdded)]
            if len(added) < len(updates):
                return False
            # Mostly there is one, with which none is read as one.
            for delta in self._read_tokens(added[0]) if len(added) == 1 else self._read_together(added):
                reader.take(delta)
        except Exception as error:
            self._fault = error
        return self._fault is None

    async def _take_or_abort(self, updates: Sequence[Update]) -> None:
        """Take updates in; a call whose tokens cannot be read has nobody to go on for."""
        try:
            self._take(updates)
        except Exception as error:
            if (submitted := self._submitted) is not None:
                await self._withdraw(submitted.worker.fail, submitted.call_id)
            self._ended, self._error = True, error

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(f"no complete answer within {self._timeout} s")

    async def _abort(self) -> None:
        """Nothing of the call is left in the engine afterwards."""
        if self._submitted is not None:
            await self._withdraw(self._submitted.worker.abort, self._submitted.call_id)

    async def _withdraw(self, end: Callable[[int], Future[None]], call_id: int) -> None:
        """End the call by the worker, unless it has ended."""
        if self._ended:
            return
        self._ended = True
        self._error = StreamClosed("this stream was left before its end; it has no reply")
        done = end(call_id)
        try:
            await asyncio.shield(asyncio.ensure_future(_settled(done)))
        finally:
            self._turn.left()

    def _fail(self, error: BaseException) -> None:
        ended_before, self._ended = self._ended, True
        self._error = error
        if self._begun and not ended_before:
            self._turn.left()

    def _take(self, updates: Sequence[Update]) -> None:
        written = self._submitted.written if self._submitted is not None else None
        for update in updates:
            if isinstance(update, TokensAdded):
                self._add(self._read_tokens(update))
            elif isinstance(update, ChoiceEnded):
                if written is not None:
                    if (held_back := written.rest(update)).text:
                        self._add(self._turn.read(held_back))
                    update = replace(update, reply=replace(update.reply, text=written.text(update.index)))
                rest, reply = self._turn.end(update, counts=self._counts)
                self._add(rest)
                self._replies[update.index] = reply
                self._open.pop(update.index, None)
                self._events.append(TurnEnd(reply, update.index))
                if update.last:
                    self._ended = True
                    self._turn.left()
            elif isinstance(update, CallFailed):
                self._fail(update.error)

    def _read_tokens(self, update: TokensAdded) -> Sequence[Delta]:
        written = self._submitted.written if self._submitted is not None else None
        read = self._turn.read(update if written is None else written.added(update))
        if update.logprobs:
            self._logprobs[update.index].extend(update.logprobs)
        return read

    def _read_together(self, updates: Sequence[TokensAdded]) -> Sequence[Delta]:
        """Where nothing else is unread."""
        self._take(updates)
        unread = [event for event in self._events if isinstance(event, _Unread)]
        assert len(unread) == len(self._events), "tokens alone end no choice"
        self._events.clear()
        return [self._read_out(each) for each in unread]

    def _read_out(self, unread: _Unread) -> Delta:
        if self._open.get(unread.first.index) is unread:
            del self._open[unread.first.index]
        return unread.delta()

    def _add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            unread = self._open.get(delta.index)
            if unread is not None and unread.takes(delta):
                unread.add(delta)
            else:
                unread = self._open[delta.index] = _Unread(delta)
                self._events.append(unread)


def _cancelled() -> StreamClosed:
    return StreamClosed("this stream was cancelled before it began; it has no reply")


async def _settled(done: Future[None]) -> None:
    """Wait for an abort; that the engine is gone already is as good."""
    try:
        await await_result(done)
    except (RuntimeClosed, EngineFailed):
        return
