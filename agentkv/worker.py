"""The engine's thread: takes calls from any thread, steps while there is work, hands the updates out."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from agentkv.calls import Call, CallFailed, ChoiceEnded, Update
from agentkv.counters import Snapshot
from agentkv.errors import EngineFailed, RuntimeClosed

if TYPE_CHECKING:
    from agentkv.engine import Engine

__all__ = ["JOIN_SECONDS", "OpenEngine", "Sink", "Worker"]

_log = logging.getLogger("agentkv")
_T = TypeVar("_T")

JOIN_SECONDS = 60.0
"""How long closing waits for the step that is running."""

_running: set[Worker] = set()
"""Those whose thread has not ended. Read and written by single operations, so that no lock can be held at a fork."""


class Sink(Protocol):
    """Where a call's updates go. Called on the engine's thread: it must return at once."""

    def deliver(self, updates: Sequence[Update]) -> Callable[[], object] | None:
        """Take updates in. What is returned is called once for all that return the same, when all have theirs.

        A wake-up lets its receiver run at once, in between, and then each would need one of its own.
        """

    def admitted(self) -> None:
        """The call has left the queue."""


class OpenEngine(Protocol):
    """Makes the engine on its own thread; `cancelled` turns true when nobody wants it any more."""

    def __call__(self, cancelled: Callable[[], bool]) -> tuple[Engine, Callable[[], None]]:
        """The engine, and what to call when its thread ends."""


@dataclass(frozen=True, slots=True)
class _Command:
    """Something to do between two steps, and what to do instead when the engine is gone."""

    run: Callable[[Engine], None]
    fail: Callable[[Exception], None]


class Worker:
    """One engine on one daemon thread.

    Every method may be called from any thread. Between two steps, and only there, the thread takes what was asked:
    calls, aborts, questions. An error that no single call can own ends the thread: each waiting and later call then
    raises EngineFailed from it. `close` never waits for work, only for the step that is running.
    """

    def __init__(self, open_engine: OpenEngine) -> None:
        self._open_engine = open_engine
        self._process = os.getpid()
        self._commands: deque[_Command] = deque()
        self._wake = threading.Condition()
        self._sinks: dict[int, Sink] = {}
        self._queued: set[int] = set()
        self._closing = False
        self._silent = False
        """Nobody is told any more what becomes of his call."""
        self._failure: BaseException | None = None
        self.ready: Future[None] = Future()
        """Done when the engine can take calls, or when opening it failed. The engine itself is its thread's alone: a
        Worker may be held long after it has ended, by streams that are kept, and must not hold the pages with it."""
        self.snapshot: Snapshot | None = None
        """As of the end of the last step, abort or question; None before the engine is ready."""
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="agentkv-engine", daemon=True)

    def start(self) -> None:
        """Begin to open the engine. Returns at once."""
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:
            # No thread could be begun: there is none to wait for.
            _running.discard(self)
            self._ended.set_result(None)
            raise

    @property
    def is_closed(self) -> bool:
        """Closed, or about to be."""
        return self._closing

    @property
    def is_this_thread(self) -> bool:
        """Whether the caller runs on the engine's thread, where waiting for an answer of it would last for ever."""
        return self._thread is threading.current_thread()

    # -- asked from any thread ----------------------------------------------------------------------------------

    def submit(self, call: Call, sink: Sink) -> None:
        """Queue a call; its updates go to `sink`. Raises RuntimeClosed or EngineFailed when it is too late."""

        def add(engine: Engine) -> None:
            self._sinks[call.call_id] = sink
            self._queued.add(call.call_id)
            try:
                engine.add(call)
            except Exception as error:
                self._deliver([CallFailed(call.call_id, error)])

        def fail(error: Exception) -> None:
            self._sinks[call.call_id] = sink
            self._queued.add(call.call_id)
            self._deliver([CallFailed(call.call_id, error)])

        self._post(_Command(add, fail))

    def abort(self, call_id: int) -> Future[None]:
        """End a call before the next step; nothing more is delivered. Done when nothing of it is left in the engine."""
        return self.ask(functools.partial(self._abort, call_id=call_id))

    def fail(self, call_id: int) -> Future[None]:
        """As abort, and the call is counted as a failure; see `Engine.fail`."""

        def failed(engine: Engine) -> None:
            self._forget(call_id)
            engine.fail(call_id)

        return self.ask(failed)

    def abandon(self, call_id: int) -> None:
        """As abort, where nobody waits for it."""
        self.tell(functools.partial(self._abort, call_id=call_id))

    def cancel(self, call_id: int, *, keep: bool) -> Future[None]:
        """As abort, with a "cancelled" reply delivered for each choice that has not ended; see `Engine.cancel`."""
        return self.ask(lambda engine: self._deliver(engine.cancel(call_id, keep=keep)))

    def ask(self, question: Callable[[Engine], _T]) -> Future[_T]:
        """Run a function on the engine's thread between two steps. Once the thread has ended the answer is an error."""
        answer: Future[_T] = Future()

        def run(engine: Engine) -> None:
            try:
                found = question(engine)
            except BaseException as error:
                answer.set_exception(error)
            else:
                # Whoever learns that his call is gone must not read figures in which it still runs.
                self.snapshot = engine.snapshot()
                answer.set_result(found)

        try:
            self._post(_Command(run, answer.set_exception))
        except (RuntimeClosed, EngineFailed) as error:
            answer.set_exception(error)
        return answer

    def tell(self, order: Callable[[Engine], object]) -> None:
        """As ask, where nobody waits for the answer: a fault is logged. After the thread has ended, nothing happens."""

        def run(engine: Engine) -> None:
            try:
                order(engine)
            except Exception:
                _log.exception("the engine could not do what it was told between two steps")
            else:
                self.snapshot = engine.snapshot()

        with contextlib.suppress(RuntimeClosed, EngineFailed):
            self._post(_Command(run, lambda error: None))

    def close(self, *, silently: bool = False) -> Future[None]:
        """Ask the thread to end. Returns at once; done when the engine is gone and the model given back.

        Calls that are not finished fail with RuntimeClosed, unless `silently`: then nobody hears of them again.
        """
        if self._is_elsewhere:
            gone: Future[None] = Future()
            gone.set_result(None)
            return gone
        with self._wake:
            self._silent = self._silent or silently
            self._closing = True
            self._wake.notify_all()
        return self._ended

    def join(self) -> None:
        """Wait until the thread has ended, at most a minute."""
        if self._thread.ident is not None and not self.is_this_thread:
            self._thread.join(JOIN_SECONDS)
            if self._thread.is_alive():
                self.leave_to_itself()

    def leave_to_itself(self) -> None:
        """Say that it was waited for long enough."""
        _log.warning("the engine did not end within %d s of being closed; left to itself", JOIN_SECONDS)

    def require_open(self) -> None:
        """Raise what a call would meet now: RuntimeClosed, EngineFailed, or nothing."""
        self.require_own_process()
        if self._failure is not None:
            raise EngineFailed(f"the engine ended: {self._failure!r}") from self._failure
        if self._closing:
            raise RuntimeClosed("this Runtime is closed; open a new one")

    def require_own_process(self) -> None:
        """Raise EngineFailed in a process that was forked from the one in which this worker was made."""
        if self._is_elsewhere:
            raise EngineFailed("this Runtime was opened in another process; open a Runtime after the fork")

    @property
    def _is_elsewhere(self) -> bool:
        """In a forked child there is no engine's thread, and a lock may be held for ever by one that is not there."""
        return os.getpid() != self._process

    def _post(self, command: _Command) -> None:
        self.require_own_process()
        with self._wake:
            self.require_open()
            self._commands.append(command)
            self._wake.notify_all()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open_and_serve()
        finally:
            _running.discard(self)
            self._ended.set_result(None)

    def _open_and_serve(self) -> None:
        try:
            engine, dispose = self._open_engine(lambda: self._closing)
        except BaseException as error:
            self._end(error)
            if not self._silent:
                self.ready.set_exception(error)
            return
        self.snapshot = engine.snapshot()
        failure: BaseException | None = None
        try:
            self.ready.set_result(None)
            self._serve(engine)
        except BaseException as error:
            _log.exception("the engine's thread died")
            # Its frames hold the engine, and with it the pages, and the error is kept for every later call.
            traceback.clear_frames(error.__traceback__)
            failure = error
        finally:
            del engine
            self._end(failure)
            dispose()

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                while engine.is_idle and not self._commands and not self._closing:
                    self._wake.wait()
                if self._closing:
                    return
            # One at a time: those that are still queued when one of them raises are answered at the end.
            while self._commands:
                self._commands.popleft().run(engine)
            if not engine.is_idle:
                updates = engine.step()
                self.snapshot = engine.snapshot()
                self._tell_admitted(engine)
                self._deliver(updates)

    def _tell_admitted(self, engine: Engine) -> None:
        for call_id in [call_id for call_id in self._queued if engine.is_admitted(call_id)]:
            self._queued.discard(call_id)
            self._admitted(self._sinks.get(call_id))

    def _admitted(self, sink: Sink | None) -> None:
        """Tell a call that it has left the queue; what that raises is logged, and nobody's else."""
        if sink is not None:
            try:
                sink.admitted()
            except Exception:
                _log.exception("the receiver of a call raised when it was admitted")

    def _deliver(self, updates: Sequence[Update]) -> None:
        """Hand each call its updates, in order; a sink that raises loses its call, and nobody else anything."""
        if self._silent:
            return
        wake_ups: dict[Callable[[], object], None] = {}
        by_call: dict[int, list[Update]] = {}
        for update in updates:
            by_call.setdefault(update.call_id, []).append(update)
        for call_id, own in by_call.items():
            sink = self._sinks.get(call_id)
            if sink is None:
                continue
            ended = isinstance(own[-1], CallFailed) or (isinstance(own[-1], ChoiceEnded) and own[-1].last)
            if ended:
                self._forget(call_id)
            try:
                if (wake_up := sink.deliver(own)) is not None:
                    wake_ups[wake_up] = None
            except Exception:
                _log.exception("the receiver of call %d raised; the call is ended", call_id)
                if not ended:
                    self.abandon(call_id)
        for wake_up in wake_ups:
            try:
                wake_up()
            except Exception:
                _log.exception("the receivers of some calls could not be woken")

    def _abort(self, engine: Engine, call_id: int) -> None:
        self._forget(call_id)
        engine.abort(call_id)

    def _forget(self, call_id: int) -> None:
        sink = self._sinks.pop(call_id, None)
        if call_id in self._queued:
            self._queued.discard(call_id)
            self._admitted(sink)

    def _end(self, failure: BaseException | None) -> None:
        """Nothing more will be served: answer everybody who waits."""
        with self._wake:
            self._closing = True
            self._failure = failure
            commands, self._commands = self._commands, deque()
        reason: Exception = RuntimeClosed("this Runtime was closed while the call was running")
        if failure is not None:
            reason = EngineFailed(f"the engine ended: {failure!r}")
            reason.__cause__ = failure
        for command in commands if not self._silent else ():
            command.fail(reason)
        self._deliver([CallFailed(call_id, reason) for call_id in list(self._sinks)])


@atexit.register
def _end_all() -> None:
    """End every engine's thread before the interpreter is torn down, within the step that is running.

    A daemon thread that comes back from torch after that is ended where it stands, in the middle of C++ code, which
    aborts the process. Whoever still waits for an answer here is a daemon thread itself and ends with the process: an
    error that it would raise now is nobody's concern.
    """
    workers = tuple(_running)
    endings = [worker.close(silently=True) for worker in workers]
    for worker, ended in zip(workers, endings, strict=True):
        # A thread that is only about to begin cannot be joined yet.
        try:
            ended.result(JOIN_SECONDS)
        except TimeoutError:
            worker.leave_to_itself()
        else:
            worker.join()
