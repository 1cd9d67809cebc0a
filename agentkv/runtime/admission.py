"""Who may enter the queue: a bound on waiting calls, and rates per name or tenant."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from asyncio_throttle.throttler import Throttler

from agentkv.errors import ConfigError, QueueFull
from agentkv.streams import post

__all__ = ["Gate", "Rate", "RateLimits"]

_THROTTLERS = 4096
_MAX_SECONDS = 366 * 24 * 3600
_LOOK_AGAIN = 0.25
"""Seconds after which a call that waits for its rate looks whether the runtime is still open."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `requests` calls in any `seconds`, for each name (of an agent) or each cache_salt (of a tenant)."""

    requests: int
    seconds: float = 1.0
    by: Literal["name", "cache_salt"] = "name"

    def __post_init__(self) -> None:
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or self.requests < 1:
            raise ConfigError(f"Rate.requests must be an int of at least 1, got {self.requests!r}")
        if not isinstance(self.seconds, (int, float)) or not 0 < self.seconds <= _MAX_SECONDS:
            raise ConfigError(f"Rate.seconds must be a number above 0, of at most a year, got {self.seconds!r}")
        if self.by not in ("name", "cache_salt"):
            raise ConfigError(f'Rate.by must be "name" or "cache_salt", got {self.by!r}')


class _SharedThrottler(Throttler):
    """A Throttler that calls on several threads share: each books its time at once, first come, first served.

    The log holds when calls start, the booked ones among them, so that a waiting call sleeps until its own time
    instead of looking again and again.
    """

    def __init__(self, rate_limit: int, period: float, clock: Callable[[], float]) -> None:
        super().__init__(rate_limit, period)
        self._lock = threading.Lock()
        self._clock = clock

    def flush(self) -> None:
        """Forget the calls that are too old to count; the base class knows one clock only."""
        now = self._clock()
        while self._task_logs and now - self._task_logs[0] > self.period:
            self._task_logs.popleft()

    def book(self) -> float:
        """When the next call may start, by the clock."""
        with self._lock:
            self.flush()
            start = self._clock()
            if len(self._task_logs) >= self.rate_limit:
                start = max(start, self._task_logs[-self.rate_limit] + self.period)
            self._task_logs.append(start)
            return start

    def give_back(self, start: float) -> None:
        """A booked call does not come."""
        with self._lock, contextlib.suppress(ValueError):
            self._task_logs.remove(start)


class RateLimits:
    """One throttler for each name or salt, the least recently used forgotten beyond 4,096."""

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._throttlers: OrderedDict[str | None, _SharedThrottler] = OrderedDict()

    async def wait(
        self,
        *,
        name: str | None,
        cache_salt: str | None,
        still_open: Callable[[], object],
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Return when a call of this name and salt may start. `still_open` raises when nothing will start any more.

        clock: the same in each call; time.monotonic by default
        """
        if self._rate is None:
            return
        clock = time.monotonic if clock is None else clock
        throttler = self._throttler(name if self._rate.by == "name" else cache_salt, clock)
        start = throttler.book()
        try:
            while (left := start - clock()) > 0:
                still_open()
                await asyncio.sleep(min(left, _LOOK_AGAIN))
        except BaseException:
            throttler.give_back(start)
            raise

    def _throttler(self, key: str | None, clock: Callable[[], float]) -> _SharedThrottler:
        assert self._rate is not None, "there is no rate to keep"
        with self._lock:
            throttler = self._throttlers.get(key)
            if throttler is None:
                throttler = self._throttlers[key] = _SharedThrottler(self._rate.requests, self._rate.seconds, clock)
                if len(self._throttlers) > _THROTTLERS:
                    self._throttlers.popitem(last=False)
            self._throttlers.move_to_end(key)
        return throttler


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call in front of the gate."""

    loop: asyncio.AbstractEventLoop
    let_in: asyncio.Future[None]
    will_look: bool = False
    """It will look for room when its loop goes on."""


class Gate:
    """At most `limit` calls between `enter` and `leave`, for tasks on any loop of any thread; first come, first in."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._inside = 0
        self._waiters: deque[_Waiter] = deque()

    def enter_or_raise(self) -> None:
        """Enter now, or raise QueueFull."""
        with self._lock:
            if self._inside >= self._limit:
                raise QueueFull(self._inside, self._limit)
            self._inside += 1

    async def enter(self) -> None:
        """Enter, waiting for room. A cancelled wait takes no place."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._inside < self._limit and not any(waiter.loop.is_running() for waiter in self._waiters):
                self._inside += 1
                return
            waiter = _Waiter(loop, loop.create_future())
            self._waiters.append(waiter)
        try:
            await waiter.let_in
        except BaseException:
            with self._lock:
                still_waiting = waiter in self._waiters
                if still_waiting:
                    self._waiters.remove(waiter)
            if not still_waiting:
                # The place was given in the moment of the cancellation: pass it on.
                self.leave()
            raise

    def leave(self) -> None:
        """Give a place back, to the longest waiting if there is one. Callable from any thread.

        Who waits on a loop that stands still could not take it: he keeps his place in line, and looks for room
        himself when his loop goes on.
        """
        with self._lock:
            for waiter in tuple(self._waiters):
                if waiter.loop.is_running():
                    self._waiters.remove(waiter)
                    if post(waiter.loop, functools.partial(_let_in, waiter)):
                        return
                elif not waiter.will_look:
                    waiter.will_look = post(waiter.loop, functools.partial(self._look, waiter))
                    if not waiter.will_look:
                        self._waiters.remove(waiter)
            self._inside -= 1

    def _look(self, waiter: _Waiter) -> None:
        """On the waiter's loop, which stood still when a place was given back."""
        with self._lock:
            waiter.will_look = False
            if waiter not in self._waiters or self._inside >= self._limit:
                return
            self._waiters.remove(waiter)
            self._inside += 1
        _let_in(waiter)


def _let_in(waiter: _Waiter) -> None:
    if not waiter.let_in.done():
        waiter.let_in.set_result(None)
