"""How long an event loop serves nobody."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

__all__ = ["Longest", "watching"]


@dataclass
class Longest:
    """Seconds between two moments in which the loop was free: of its own thread's work, and of all."""

    work: float = 0.0
    pause: float = 0.0


@asynccontextmanager
async def watching() -> AsyncIterator[Longest]:
    longest = Longest()

    async def watch() -> None:
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(0)
            longest.pause = max(longest.pause, time.monotonic() - wall)
            longest.work = max(longest.work, time.thread_time() - cpu)

    # What the tests before this one left behind is not for the collector to walk while pauses are measured.
    gc.collect()
    gc.freeze()
    task = asyncio.create_task(watch())
    try:
        await asyncio.sleep(0)
        yield longest
    finally:
        task.cancel()
        gc.unfreeze()
