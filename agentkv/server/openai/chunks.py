"""The calls of a request as OpenAI's chunks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from agentkv.events import ReasoningDelta, StreamEvent, TurnEnd
from agentkv.logprobs import TokenLogprobs
from agentkv.reply import Reply

from ..answering import Now
from ..calls import Answered, Asked, Read, copies_of, events_of
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
    asked: Asked,
    answer: Head,
    chunks_of: Callable[[int], Chunks],
    *,
    with_usage: bool,
    now: Now | None = None,
) -> AsyncGenerator[Mapping[str, Any]]:
    """Chunks of all choices as they come, then one of usage where it was asked for.

    The first chunk comes with the first token, so that what refuses or fails a call before comes before it.

    now: sends chunks without being awaited, once the first ones were sent; those are not yielded
    """
    said = _Said(asked, answer, chunks_of, {"usage": None} if with_usage else {}, now)
    async with aclosing(events_of(asked, said if now is not None else None)) as events:
        async for index, read in events:
            for chunk in said.chunks(index, read):
                yield chunk
    if with_usage:
        yield answer.with_choices([], usage=usage_of(said.replies, reasoning_tokens=said.reasoning_tokens))


class _Said:
    """What was said so far, event by event, and the chunks of each."""

    def __init__(
        self,
        asked: Asked,
        answer: Head,
        chunks_of: Callable[[int], Chunks],
        more: Mapping[str, Any],
        now: Now | None,
    ) -> None:
        self._asked, self._answer, self._chunks_of, self._more, self._now = asked, answer, chunks_of, more, now
        self._makers: list[Chunks] = []
        self.replies: list[Reply] = []
        self.reasoning_tokens = 0

    def ready(self) -> bool:
        return bool(self._makers) and self._now is not None and self._now.ready()

    def take(self, index: int, read: Read) -> None:
        assert self._now is not None, "nobody takes chunks at once"
        for chunk in self.chunks(index, read):
            self._now.send(chunk)

    def chunks(self, index: int, read: Read) -> Iterator[Mapping[str, Any]]:
        """Of the next event."""
        asked, answer, more = self._asked, self._answer, self._more
        if not self._makers:
            self._makers = [self._chunks_of(each) for each in range(asked.choices)]
            for first in filter(None, [maker.first() for maker in self._makers]):
                yield answer.with_choices([first], **more)
        if isinstance(read.event, ReasoningDelta):
            self.reasoning_tokens += len(read.event.token_ids) * asked.copies
        elif isinstance(read.event, TurnEnd):
            self.replies += (copy.reply for copy in copies_of(Answered(read.event.reply, 0), asked.copies))
        for maker in self._makers[index * asked.copies : (index + 1) * asked.copies]:
            choice = maker.of(read.event, read.logprobs)
            if choice is not None:
                yield answer.with_choices([choice], **more)
