"""A runtime's engine from its loading to its end, and who may be asked in between."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref

from agentkv.errors import EngineFailed, NotStarted, RuntimeClosed
from agentkv.report import ServedBy
from agentkv.streams import await_result
from agentkv.worker import Worker

from .config import RuntimeConfig
from .opened import Opened
from .opening import end, open_after

__all__ = ["Life"]


class Life:
    """Belongs to no event loop and no thread. When nobody holds it any more, its engine ends as by `close`."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._given_up: list[Worker] = []
        """Workers whose start was cancelled; their threads may still hold the model for a moment."""
        self._starting = 0
        self._opened: Opened | None = None
        self._closed = False

    async def start(self) -> None:
        """See `Runtime.start`."""
        if self._worker is not None:
            self._worker.require_own_process()
        with self._lock:
            self.require_not_closed()
            if self._worker is None:
                # The thread knows this weakly, or nobody could ever let it go.
                opening = functools.partial(
                    open_after, tuple(self._given_up), self._config, tell=weakref.WeakMethod(self._tell)
                )
                self._worker = Worker(opening)
                weakref.finalize(self, self._worker.close).atexit = False
                self._worker.start()
            worker = self._worker
            self._starting += 1
        try:
            await await_result(worker.ready)
        except asyncio.CancelledError:
            with self._lock:
                if self._starting == 1 and not worker.ready.done():
                    worker.close()
                    self._worker = None
                    self._given_up.append(worker)
            raise
        except BaseException:
            with self._lock:
                if self._worker is worker:
                    self._worker = None
            raise
        finally:
            with self._lock:
                self._starting -= 1

    async def close(self) -> None:
        """See `Runtime.close`."""
        with self._lock:
            self._closed = True
            workers = [*self._given_up, *([] if self._worker is None else [self._worker])]
        for worker in workers:
            await end(worker)
        self._given_up.clear()

    def require_not_closed(self) -> None:
        """Raises RuntimeClosed after `close`."""
        if self._closed:
            raise RuntimeClosed("this Runtime is closed; open a new one")

    @property
    def state(self) -> str:
        """One word or two for a person: whether it can be asked."""
        if self._closed:
            return "closed"
        if self._worker is None:
            return "not started" if self._opened is None else "open"
        if self._opened is None:
            return "starting"
        try:
            self._worker.require_open()
        except EngineFailed:
            return "failed"
        except RuntimeClosed:
            return "closed"
        return "open"

    @property
    def served_by(self) -> ServedBy | None:
        """Model, dtype and device; None before they are known."""
        return None if self._opened is None else self._opened.served_by

    @property
    def opened(self) -> Opened:
        """The model as it is served; raises NotStarted before it is loaded."""
        if self._opened is None:
            raise NotStarted("this Runtime has not been started: use `async with`, or await start() first")
        return self._opened

    @property
    def name(self) -> str:
        """The model's name for errors, which has one before it is loaded too."""
        return self._opened.name if self._opened is not None else "this model"

    @property
    def worker(self) -> Worker:
        """The engine's thread; raises NotStarted before there is one."""
        if self._worker is None:
            raise NotStarted("this Runtime has not been started: use `async with`, or await start() first")
        return self._worker

    @property
    def failure(self) -> RuntimeClosed | EngineFailed | None:
        """See `Runtime.failure`."""
        if self._closed:
            return RuntimeClosed("this Runtime is closed; open a new one")
        try:
            if self._worker is not None:
                self._worker.require_open()
        except (RuntimeClosed, EngineFailed) as error:
            return error
        return None

    def _tell(self, opened: Opened) -> None:
        self._opened = opened
