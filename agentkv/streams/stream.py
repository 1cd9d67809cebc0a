"""The face of every stream."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Self

from agentkv.events import StreamEvent, TextDelta
from agentkv.reply import Reply

__all__ = ["Stream", "check_timeout"]


class Stream(ABC):
    """An async iterator of events, and an async context manager.

        async with runtime.stream("Once upon") as stream:
            async for text in stream.text():
                print(text, end="")
        reply = await stream.reply()

    The call starts with the block, or with the first await. Leaving the block early aborts it before the block is
    left. An unread event costs the engine nothing: deltas of one kind are merged until they are read. For one task on
    one loop.
    """

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(self, *exception: object) -> None: ...

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    @abstractmethod
    async def __anext__(self) -> StreamEvent: ...

    async def text(self) -> AsyncIterator[str]:
        """The text of the first choice, piece by piece; pieces joined are `reply.text`."""
        async for event in self:
            if isinstance(event, TextDelta) and event.index == 0 and event.text:
                yield event.text

    @abstractmethod
    async def reply(self) -> Reply:
        """The reply of the first choice, once it is complete; of several turns, the last."""

    @abstractmethod
    async def cancel(self, *, keep: bool = False) -> None:
        """Stop here. Choices that have not ended get the finish_reason "cancelled" and the text so far.

        keep: the answer so far stays cached whole and, in a session, part of the conversation. Returns when nothing
        of the call runs any more. A call that has ended is left as it is; one that has not begun never will, and
        reading it raises StreamClosed.
        """


def check_timeout(timeout: object) -> None:
    """Raise TypeError or ValueError for what is no number of seconds that can be waited."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be above 0 seconds, got {timeout!r}")
    if isinstance(timeout, int) and timeout > sys.float_info.max:
        raise ValueError(f"timeout must be a number of seconds that a float can hold, got {timeout!r}")
