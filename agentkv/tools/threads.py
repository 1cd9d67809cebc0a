"""Threads for tools that block.

Python's own executors wait for their threads when the interpreter ends, so one tool that hangs would keep the process
alive. These threads are daemons, and a call that takes too long can be left behind: its thread goes on by itself, its
place is free for the next call, and what it returns is dropped.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["TooManyLeftBehind", "ToolThreads"]


class TooManyLeftBehind(Exception):
    """So many threads hang that no further one is started."""


class _Job:
    __slots__ = ("context", "future", "left_behind", "work")

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.context = contextvars.copy_context()
        self.future: Future[Any] = Future()
        self.left_behind = False

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.context.run(self.work)
        # Whatever the tool raised is the caller's to judge, SystemExit and KeyboardInterrupt too.
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class ToolThreads:
    """At most `at_once` calls run at the same time, later ones wait; at most `left_behind` threads may hang."""

    def __init__(self, at_once: int = 32, left_behind: int = 64) -> None:
        self._at_once = at_once
        self._most_left_behind = left_behind
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._left_behind = 0

    def submit(self, work: Callable[[], Any]) -> tuple[Future[Any], Callable[[], None]]:
        """Run `work` in a copy of the caller's context. Returns its future, and what to call to leave it behind.

        Leaving a call behind that has ended is a no-op; one that has not begun never begins. TooManyLeftBehind
        where too many hang already.
        """
        job = _Job(work)
        with self._lock:
            if self._left_behind >= self._most_left_behind:
                raise TooManyLeftBehind(f"{self._left_behind} threads of tools that took too long hang")
            self._waiting.append(job)
            self._start_waiting()
        return job.future, lambda: self._leave(job)

    def _start_waiting(self) -> None:
        """Give free places to those who wait, in their order. The lock is held."""
        while self._waiting and len(self._running) < self._at_once:
            job = self._waiting.popleft()
            self._running.add(job)
            threading.Thread(target=self._run, args=(job,), name="agentkv-tool", daemon=True).start()

    def _run(self, job: _Job) -> None:
        job.run()
        with self._lock:
            if job.left_behind:
                self._left_behind -= 1
            self._running.discard(job)
            self._start_waiting()

    def _leave(self, job: _Job) -> None:
        with self._lock:
            if job in self._running:
                self._running.remove(job)
                job.left_behind = True
                self._left_behind += 1
                self._start_waiting()
            elif job in self._waiting:
                self._waiting.remove(job)
                job.future.cancel()
