"""From the engine's thread to whichever event loop a call was made on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar
from weakref import WeakValueDictionary

from agentkv.calls import Update

__all__ = ["Mailbox", "await_result", "post"]

_T = TypeVar("_T")


async def await_result(future: Future[_T]) -> _T:
    """Await a thread's future from any loop. Cancelling the await leaves the future itself alone."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    future.add_done_callback(lambda _: post(loop, wake))
    await waiter
    return future.result()


def post(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> bool:
    """Run `callback` soon on a loop that may belong to another thread; False: the loop is gone."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The loop was closed while its call was running, as asyncio.run does on an error: nobody is left to tell.
        if not loop.is_closed():
            raise
        return False
    return True


class _WakeUps:
    """What is to be run soon on one loop, by one wake-up for all: each costs the engine's thread a system call."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: deque[Callable[[], None]] = deque()
        self._waking = False

    def add(self, callback: Callable[[], None]) -> None:
        """To be run with the next wake-up; the callback must not raise."""
        self._due.append(callback)

    def send(self) -> None:
        """Wake the loop, once however many are due."""
        if not self._waking:
            self._waking = True
            post(self._loop, self._run)

    def _run(self) -> None:
        # First, so that whoever adds to what is taken here already posts again: once too often, and never too seldom.
        self._waking = False
        while self._due:
            self._due.popleft()()


_wake_ups: WeakValueDictionary[asyncio.AbstractEventLoop, _WakeUps] = WeakValueDictionary()
"""Of each loop on which a mailbox lives: the mailboxes hold them."""


class Mailbox:
    """Updates of one call, put in by the engine's thread and taken out on one event loop.

    The engine waits for no reader: what is not read yet stands here, and one wake-up a time is on its way however
    many updates came, and to however many mailboxes of a loop.
    """

    def __init__(self, on_admitted: Callable[[], None] = lambda: None) -> None:
        loop = asyncio.get_running_loop()
        self._wake_ups = _wake_ups.get(loop) or _wake_ups.setdefault(loop, _WakeUps(loop))
        self._updates: deque[Update] = deque()
        self._arrived = asyncio.Event()
        self._waking = False
        self._at_once: Callable[[Sequence[Update]], bool] | None = None
        self._on_admitted = on_admitted

    def deliver(self, updates: Sequence[Update]) -> Callable[[], None]:
        """Called on the engine's thread; what it returns wakes the readers of this loop, all of them at once."""
        self._updates.extend(updates)
        if not self._waking:
            self._waking = True
            self._wake_ups.add(self._wake)
        return self._wake_ups.send

    def admitted(self) -> None:
        """Called on the engine's thread."""
        self._on_admitted()

    def _wake(self) -> None:
        self._waking = False
        if self._at_once is None:
            self._arrived.set()
            return
        arrived = self._all()
        if not self._at_once(arrived):
            # Those that come before the reader runs stand behind these.
            self._at_once = None
            self._updates.extendleft(reversed(arrived))
            self._arrived.set()

    async def take(self, at_once: Callable[[Sequence[Update]], bool] | None = None) -> list[Update]:
        """All updates that are there, at least one, in order.

        at_once: is given all that come while this waits, by the wake-up itself, which spares the switch to the task
        that waits. It must not raise; True: they are read, and the wait goes on.
        """
        while not self._updates:
            self._arrived.clear()
            if not self._updates:
                self._at_once = at_once
                try:
                    await self._arrived.wait()
                finally:
                    self._at_once = None
        return self._all()

    def _all(self) -> list[Update]:
        taken = []
        while self._updates:
            taken.append(self._updates.popleft())
        return taken
