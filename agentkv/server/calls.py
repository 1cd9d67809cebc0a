"""One request as one or more calls of the runtime, answered whole or as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentkv.events import ReasoningDelta, StreamEvent, TextDelta, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply
from agentkv.streams import CallStream
from agentkv.usage import Usage

from .errors import ApiError

__all__ = ["Answered", "Asked", "AtOnce", "Read", "answers_of", "copies_of", "events_of"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The calls of one request.

    copies       how often each answer is given, one choice after the other
    blame        makes the answer of a ValueError or TypeError that a call begins with: the client's, with its field
    prompt_only  nothing that is written behind the prompts is given
    """

    streams: Sequence[CallStream]
    blame: Callable[[Exception], ApiError]
    copies: int = 1
    prompt_only: bool = False

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


class AtOnce(Protocol):
    """Takes what is said where it comes: called on the loop, between its tasks."""

    def ready(self) -> bool:
        """Whether what comes next can be taken now."""

    def take(self, index: int, read: Read) -> None:
        """What a choice says next; it must return soon."""


async def answers_of(asked: Asked) -> list[Answered]:
    """All choices of all calls, which run side by side; one that fails ends them all."""
    async with AsyncExitStack() as open_streams:
        await _begin(asked, open_streams)
        if len(asked.streams) == 1:  # As nearly always: no task more.
            answered = [await _answers(asked.streams[0], asked.prompt_only)]
        else:
            reading = [asyncio.ensure_future(_answers(stream, asked.prompt_only)) for stream in asked.streams]
            try:
                answered = await asyncio.gather(*reading)
            finally:
                await _ended(reading)
        return [copy for answers in answered for answer in answers for copy in copies_of(answer, asked.copies)]


async def events_of(asked: Asked, at_once: AtOnce | None = None) -> AsyncGenerator[tuple[int, Read]]:
    """What all calls say, as it comes, with the number of the choice among those of all calls.

    A call that cannot begin raises its blame before anything is said. Closing it ends the calls.

    at_once: is given what comes while this is waited for, where there is one call alone and it is ready
    """
    async with AsyncExitStack() as open_streams:
        await _begin(asked, open_streams)
        if len(asked.streams) == 1:  # As nearly always: no task for each event.
            (only,) = asked.streams
            reading = _Reading(only, asked.prompt_only)
            if at_once is not None:
                only.read_at_once(_ReadAtOnce(reading, at_once))
            try:
                async for event in only:
                    if (read := reading.of(event)) is not None:
                        yield event.index, read
            finally:
                only.read_at_once(None)  # Which holds the stream, and so the stream itself.
            return
        async with aclosing(_merged(asked)) as merged:
            async for index, read in merged:
                yield index, read


def copies_of(answer: Answered, copies: int) -> list[Answered]:
    """The answer as often as it is given. The prompt, which was read once, is counted in the first."""
    usage = Usage(output_tokens=answer.reply.usage.output_tokens)
    return [answer] + [replace(answer, reply=replace(answer.reply, usage=usage))] * (copies - 1)


async def _begin(asked: Asked, open_streams: AsyncExitStack) -> None:
    for stream in asked.streams:
        try:
            await open_streams.enter_async_context(stream)
        except (ValueError, TypeError, RecursionError) as error:
            raise asked.blame(error) from error


async def _answers(stream: CallStream, prompt_only: bool) -> list[Answered]:
    reasoning_tokens = [0] * stream.n
    replies: dict[int, Reply] = {}
    reading = _Reading(stream, prompt_only)
    async for event in stream:
        read = reading.of(event)
        if read is None:
            continue
        if isinstance(read.event, ReasoningDelta):
            reasoning_tokens[read.event.index] += len(read.event.token_ids)
        elif isinstance(read.event, TurnEnd):
            replies[read.event.index] = read.event.reply
    return [Answered(replies[index], reasoning_tokens[index]) for index in range(stream.n)]


async def _events(stream: CallStream, prompt_only: bool) -> AsyncGenerator[Read]:
    """A call's events; with prompt_only the ends of its choices alone."""
    reading = _Reading(stream, prompt_only)
    async for event in stream:
        if (read := reading.of(event)) is not None:
            yield read


class _Reading:
    """Puts log-probabilities to a call's events, which it is given in order."""

    def __init__(self, stream: CallStream, prompt_only: bool) -> None:
        self._stream, self._prompt_only = stream, prompt_only
        self._num_tokens = [0] * stream.n

    def of(self, event: StreamEvent) -> Read | None:
        """The event as it is read; None where nothing of it is."""
        if isinstance(event, TurnEnd):
            return Read(replace(event, reply=_without_answer(event.reply)) if self._prompt_only else event)
        if self._prompt_only:
            return None
        if isinstance(event, TextDelta | ReasoningDelta):
            begin = self._num_tokens[event.index]
            end = self._num_tokens[event.index] = begin + len(event.token_ids)
            logprobs = self._stream.logprobs(event.index)
            return Read(event, logprobs[begin:end]) if logprobs else Read(event)
        return Read(event)


@dataclass(frozen=True, slots=True)
class _ReadAtOnce:
    """Between a call and what takes its events at once."""

    reading: _Reading
    to: AtOnce

    def ready(self) -> bool:
        return self.to.ready()

    def take(self, delta: StreamEvent) -> None:
        if (read := self.reading.of(delta)) is not None:
            self.to.take(delta.index, read)


def _without_answer(reply: Reply) -> Reply:
    """The reply with what was computed of the prompt, and nothing that was written behind it."""
    return replace(
        reply,
        text="",
        token_ids=(),
        logprobs=None if reply.logprobs is None else (),
        finish_reason="length",
        usage=replace(reply.usage, output_tokens=0),
    )


async def _merged(asked: Asked) -> AsyncGenerator[tuple[int, Read]]:
    """What all calls say, as it comes, with the number of the choice among those of all calls."""
    events = [_events(stream, asked.prompt_only) for stream in asked.streams]
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
