"""One request as one or more calls of the runtime, answered whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, ToolCallDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.streams import CallStream
from agentkv.usage import Usage

from .errors import ApiError

__all__ = ["Answered", "Asked", "Read", "answers_of", "copies_of", "events_of"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The calls of one request.

    copies    how often each answer is given, one choice after the other
    one_call  each choice ends with its first call of a tool, as `parallel_tool_calls=false` wants it
    blame     makes the answer of a ValueError or TypeError that a call begins with: the client's, with its field
    """

    streams: Sequence[CallStream]
    blame: Callable[[Exception], ApiError]
    copies: int = 1
    one_call: bool = False

    @property
    def choices(self) -> int:
        """How many the client gets."""
        return self.copies * sum(stream.n for stream in self.streams)


@dataclass(frozen=True, slots=True)
class Answered:
    """One choice, complete."""

    reply: Reply
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Read:
    """An event, and the log-probabilities of the tokens that it brings."""

    event: StreamEvent
    logprobs: Sequence[TokenLogprobs] = ()


async def answers_of(asked: Asked) -> list[Answered]:
    """All choices of all calls, which run side by side; one that fails ends them all."""
    async with AsyncExitStack() as open_streams:
        await _begin(asked, open_streams)
        reading = [asyncio.ensure_future(_answers(stream, asked.one_call)) for stream in asked.streams]
        try:
            answered = await asyncio.gather(*reading)
        finally:
            await _ended(reading)
        return [copy for answers in answered for answer in answers for copy in copies_of(answer, asked.copies)]


async def events_of(asked: Asked) -> AsyncGenerator[tuple[int, Read]]:
    """What all calls say, as it comes, with the number of the choice among those of all calls.

    A call that cannot begin raises its blame before anything is said. Closing it ends the calls.
    """
    async with AsyncExitStack() as open_streams:
        await _begin(asked, open_streams)
        async with aclosing(_merged(asked)) as merged:
            async for index, read in merged:
                yield index, read


def copies_of(answer: Answered, copies: int) -> list[Answered]:
    """The answer as often as it is given. The prompt, which was read once, is counted in the first."""
    usage = Usage(output_tokens=answer.reply.usage.output_tokens)
    return [answer] + [replace(answer, reply=replace(answer.reply, usage=usage))] * (copies - 1)


@dataclass(slots=True)
class _Seen:
    """What came of one choice so far, up to its second call of a tool where it may make only one."""

    num_tokens: int = 0
    texts: list[str] = field(default_factory=list)
    call_id: str | None = None
    cut: bool = False
    ended: bool = False


async def _begin(asked: Asked, open_streams: AsyncExitStack) -> None:
    for stream in asked.streams:
        try:
            await open_streams.enter_async_context(stream)
        except (ValueError, TypeError, RecursionError) as error:
            raise asked.blame(error) from error


async def _answers(stream: CallStream, one_call: bool) -> list[Answered]:
    reasoning_tokens = [0] * stream.n
    replies: dict[int, Reply] = {}
    async with aclosing(_events(stream, one_call)) as events:
        async for read in events:
            if isinstance(read.event, ReasoningDelta):
                reasoning_tokens[read.event.index] += len(read.event.token_ids)
            elif isinstance(read.event, TurnEnd):
                replies[read.event.index] = read.event.reply
    return [Answered(replies[index], reasoning_tokens[index]) for index in range(stream.n)]


async def _events(stream: CallStream, one_call: bool) -> AsyncGenerator[Read]:
    """A call's events. With one_call each choice ends where its second call begins: there the model is stopped.

    It runs on while another choice still writes its first call, for one call of the runtime has all n choices.
    """
    choices = [_Seen() for _ in range(stream.n)]
    async for event in stream:
        seen = choices[event.index]
        if isinstance(event, TurnEnd):
            seen.ended = True
            reply = event.reply
            if seen.cut:
                reply = _up_to(reply, seen)
            elif one_call:  # A further one that nobody can read was not told as it came.
                reply = replace(reply, tool_calls=reply.tool_calls[:1])
            yield Read(replace(event, reply=reply))
        elif isinstance(event, ToolCallDelta):
            if seen.call_id is None:
                seen.call_id = event.id
            if one_call and event.id != seen.call_id:
                seen.cut = True
            if not seen.cut:
                yield Read(event)
        elif isinstance(event, TextDelta | ReasoningDelta) and not seen.cut:
            begin, seen.num_tokens = seen.num_tokens, seen.num_tokens + len(event.token_ids)
            if isinstance(event, TextDelta):
                seen.texts.append(event.text)
            yield Read(event, stream.logprobs(event.index)[begin : seen.num_tokens])
        if seen.cut and all(choice.cut or choice.ended for choice in choices):
            await stream.cancel(keep=True)


def _up_to(reply: Reply, seen: _Seen) -> Reply:
    """The reply with what was seen of it; its usage stays that of all that was computed."""
    return replace(
        reply,
        text="".join(seen.texts),
        token_ids=reply.token_ids[: seen.num_tokens],
        logprobs=None if reply.logprobs is None else reply.logprobs[: seen.num_tokens],
        tool_calls=reply.tool_calls[:1],
        finish_reason="tool_calls",
    )


async def _merged(asked: Asked) -> AsyncGenerator[tuple[int, Read]]:
    """What all calls say, as it comes, with the number of the choice among those of all calls."""
    events = [_events(stream, asked.one_call) for stream in asked.streams]
    if len(events) == 1:  # As nearly always, and no task for each event.
        async with aclosing(events[0]) as only:
            async for read in only:
                yield read.event.index, read
        return
    reading: dict[asyncio.Future[Read], tuple[int, AsyncGenerator[Read]]] = {}
    base = 0
    for stream, each in zip(asked.streams, events, strict=True):
        reading[asyncio.ensure_future(anext(each))] = base, each
        base += stream.n
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                base, each = reading.pop(task)
                try:
                    read = task.result()
                except StopAsyncIteration:
                    continue
                reading[asyncio.ensure_future(anext(each))] = base, each
                yield base + read.event.index, read
    finally:
        await _ended(reading)
        for each in events:
            await each.aclose()


async def _ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Nothing of them runs any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
