"""The calls of a request as OpenAI's chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from agentkv.events import ReasoningDelta, StreamEvent, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply

from ..calls import Answered, Asked, copies_of, events_of
from .head import Head
from .usage import usage_of

__all__ = ["Chunks", "streamed"]


class Chunks(Protocol):
    """What makes chunks of one choice's events."""

    def first(self) -> dict[str, Any] | None:
        """Before anything else; None for nothing."""

    def of(self, event: StreamEvent, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The event's; None where a client sees nothing of it."""


async def streamed(
    asked: Asked, answer: Head, chunks_of: Callable[[int], Chunks], *, with_usage: bool
) -> AsyncGenerator[Mapping[str, Any]]:
    """Chunks of all choices as they come, then one of usage where it was asked for.

    The first chunk comes with the first token, so that what refuses or fails a call before comes before it.
    """
    more = {"usage": None} if with_usage else {}
    replies: list[Reply] = []
    reasoning_tokens = 0
    makers: list[Chunks] = []
    async with aclosing(events_of(asked)) as events:
        async for index, read in events:
            if not makers:
                makers = [chunks_of(each) for each in range(asked.choices)]
                for first in filter(None, (maker.first() for maker in makers)):
                    yield answer.with_choices([first], **more)
            if isinstance(read.event, ReasoningDelta):
                reasoning_tokens += len(read.event.token_ids) * asked.copies
            elif isinstance(read.event, TurnEnd):
                replies += (copy.reply for copy in copies_of(Answered(read.event.reply, 0), asked.copies))
            for maker in makers[index * asked.copies : (index + 1) * asked.copies]:
                choice = maker.of(read.event, read.logprobs)
                if choice is not None:
                    yield answer.with_choices([choice], **more)
    if with_usage:
        yield answer.with_choices([], usage=usage_of(replies, reasoning_tokens=reasoning_tokens))
