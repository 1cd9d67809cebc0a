"""An event loop on a thread of its own, for callers that wait without await."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Generic, TypeVar

from agentkv.errors import EngineFailed, RuntimeClosed

__all__ = ["LoopThread"]

_T = TypeVar("_T")

_PATIENCE = 10.0
"""Seconds that what was cancelled has to end, before it is waited for no longer."""


class _Call(Generic[_T]):
    """A coroutine on the loop, and its answer in the thread that waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> None:
        self.answer: Future[_T] = Future()
        self._loop = loop
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    def begin(self) -> None:
        """On the loop's thread."""
        if not self.answer.set_running_or_notify_cancel():
            self._work.close()
            return
        self._task = self._loop.create_task(self._work)
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """On the loop's thread."""
        if self._task is not None:
            self._task.cancel()

    def give_up(self) -> None:
        """On the loop's thread, once it runs no more: whoever still waits learns that there will be no answer."""
        if not self.answer.done():
            self.answer.set_exception(CancelledError())

    def _ended(self, task: asyncio.Task[_T]) -> None:
        if self.answer.done():
            return
        if task.cancelled():
            self.answer.set_exception(CancelledError())
        elif (error := task.exception()) is not None:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(task.result())


class LoopThread:
    """An event loop on a daemon thread, which ends with its owner, or when nobody holds this any more."""

    def __init__(self, owner: str = "Runtime") -> None:
        """owner: what those who wait hold, as errors call it."""
        self._owner = owner
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call[Any]] = set()
        self._lock = threading.Lock()
        """Around handing work over and closing: what is handed over is either answered or cancelled by the close."""
        self._closed = False
        # The thread must not hold this object, or it would never be let go.
        self._thread = threading.Thread(target=_serve, args=(self._loop, self._calls), name="agentkv-loop", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop, self._loop).atexit = False

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for it; whatever interrupts the wait cancels it, and waits until it has ended."""
        call = _Call(self._loop, work)
        try:
            self._hand_over(call)
        except BaseException:
            work.close()
            raise
        try:
            return call.answer.result()
        except CancelledError:
            if self._closed:
                raise RuntimeClosed(f"this {self._owner} was closed while the call was running") from None
            raise
        except BaseException:
            if not call.answer.done():
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(call.cancel)
                wait([call.answer], _PATIENCE)
            raise
        finally:
            self._calls.discard(call)

    def close(self) -> None:
        """Cancel what still runs; whoever waits for it raises RuntimeClosed. Twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                _stop(self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._closed

    def _hand_over(self, call: _Call[Any]) -> None:
        if self._process != os.getpid():
            raise EngineFailed(f"this {self._owner} was opened in another process; open one after the fork")
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"this runs on the {self._owner}'s own loop, as coroutine tools do, and would wait for itself for "
                f"ever; make it a plain function, which runs on a thread of its own"
            )
        with self._lock:
            if self._closed or self._loop.is_closed():
                raise RuntimeClosed(f"this {self._owner} is closed; open a new one")
            self._calls.add(call)
            self._loop.call_soon_threadsafe(call.begin)


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    # It is closed already where something ended its thread.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop, calls: set[_Call[Any]]) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        try:
            loop.run_until_complete(_end_all())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()
            for call in list(calls):
                call.give_up()


async def _end_all() -> None:
    """Cancel every other task, and wait for them, but not for ever: a tool may refuse to be cancelled."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_PATIENCE)
