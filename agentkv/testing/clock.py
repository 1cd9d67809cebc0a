"""A clock that stands still until it is told to go on."""

from __future__ import annotations

import threading

__all__ = ["ManualClock"]


class ManualClock:
    """Called, it gives its seconds, as `time.monotonic` does; it never goes back. Safe in several threads.

    A Runtime goes by it with `scripted(…, clock=clock)`.

    clock = ManualClock()
    clock.advance(1.5)
    assert clock() == 1.5
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Seconds since some moment."""
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Go on by `seconds`, 0 or more; returns the new time. ValueError for less: time does not go back."""
        if not seconds >= 0:
            raise ValueError(f"a clock goes on by 0 seconds or more, got {seconds!r}")
        with self._lock:
            self._now += seconds
            return self._now
