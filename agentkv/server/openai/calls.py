"""One request as one or more calls of the runtime, answered whole or as they come."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.streams import CallStream

from .chat_answer import Head
from .usage import usage_of

__all__ = ["Chunks", "head", "one_call_only", "replies_of", "streamed"]


class Chunks(Protocol):
    """What makes chunks of one choice's events."""

    def first(self) -> dict[str, Any] | None:
        """Before anything else; None for nothing."""

    def of(self, event: StreamEvent, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The event's; None where a client sees nothing of it."""


def head(kind: str, prefix: str, model: str) -> Head:
    """A new answer's id and time."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)


async def replies_of(streams: Sequence[CallStream]) -> list[Reply]:
    """All replies of all calls, which run side by side; one that fails ends them all."""
    async with AsyncExitStack() as open_streams:
        for stream in streams:
            open_streams.push_async_exit(stream)
        answered = await asyncio.gather(*(stream.replies() for stream in streams))
        return [reply for replies in answered for reply in replies]


async def streamed(
    streams: Sequence[CallStream], answer: Head, chunks_of: Callable[[int], Chunks], *, with_usage: bool
) -> AsyncIterator[Mapping[str, Any]]:
    """Chunks of all choices as they come, then one of usage where it was asked for.

    The first chunk comes once all calls have begun, so that what refuses them comes before it.
    """
    more = {"usage": None} if with_usage else {}
    replies: list[Reply] = []
    reasoning_tokens = 0
    n = 0
    async with AsyncExitStack() as open_streams:
        for stream in streams:
            await open_streams.enter_async_context(stream)
        makers: list[Chunks] = []
        bases: list[int] = []
        for stream in streams:
            bases.append(n)
            n += stream.n
        makers = [chunks_of(index) for index in range(n)]
        for maker in makers:
            first = maker.first()
            if first is not None:
                yield answer.with_choices([first], **more)
        taken = [0] * n
        async for base, stream, event in _merged(streams, bases):
            index = base + event.index
            logprobs: Sequence[TokenLogprobs] = ()
            if isinstance(event, TextDelta | ReasoningDelta):
                begin, taken[index] = taken[index], taken[index] + len(event.token_ids)
                logprobs = stream.logprobs(event.index)[begin : taken[index]]
                if isinstance(event, ReasoningDelta):
                    reasoning_tokens += len(event.token_ids)
            if isinstance(event, TurnEnd):
                replies.append(event.reply)
            choice = makers[index].of(event, logprobs)
            if choice is not None:
                yield answer.with_choices([choice], **more)
    if with_usage:
        yield answer.with_choices([], usage=usage_of(replies, reasoning_tokens=reasoning_tokens))


async def one_call_only(events: CallStream) -> AsyncIterator[StreamEvent]:
    """Its events until a second call of a tool begins, for `parallel_tool_calls=false`: there the model is stopped."""
    first: str | None = None
    async for event in events:
        if isinstance(event, ToolCallDelta):
            first = first or event.id
            if event.id != first:
                await events.cancel()
                continue
        yield event


async def _merged(
    streams: Sequence[CallStream], bases: Sequence[int]
) -> AsyncIterator[tuple[int, CallStream, StreamEvent]]:
    if len(streams) == 1:
        async for event in streams[0]:
            yield bases[0], streams[0], event
        return
    reading = {
        asyncio.ensure_future(anext(stream)): (base, stream) for base, stream in zip(bases, streams, strict=True)
    }
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                base, stream = reading.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                reading[asyncio.ensure_future(anext(stream))] = base, stream
                yield base, stream, event
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
