"""What sessions and streams ask of a runtime: who is served, in which order, and what is counted."""

from __future__ import annotations

import itertools
import threading
from array import array

from xxhash import xxh3_64_intdigest

from agentkv.report import Moment, Report
from agentkv.session import ChatTurn, Question, SessionTurn
from agentkv.streams import CallStream, Mailbox, Stream, Submitted
from agentkv.tool_calls import ToolCallCounts

from .admission import Gate, RateLimits
from .config import RuntimeConfig
from .handle import RuntimeHandle
from .life import Life
from .opened import Opened

__all__ = ["RuntimeHost"]


class RuntimeHost(RuntimeHandle):
    """The engine of this process as a `Host`: calls of any loop and thread wait here for a place in its queue."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._gate = Gate(config.max_queue)
        self._rates = RateLimits(config.rate_limit)
        self._call_ids = itertools.count()
        self._num_sessions = 0
        self._lock = threading.Lock()
        self._life = Life(config)

    async def serve(self) -> Opened:
        """The model, loaded first if need be."""
        await self._life.start()
        return self._life.opened

    def served_now(self) -> Opened:
        """The model; raises NotStarted before it is loaded."""
        return self._life.opened

    def seconds_per_prompt_token(self) -> float | None:
        """What computing one more prompt token was measured to take, None before there was one."""
        report = Report(self._life.opened.served_by, self._moment(), None)
        seconds: float | None = report.to_dict()["seconds_per_prompt_token"]
        return seconds

    def open_turn(self, turn: SessionTurn) -> Stream:
        """The stream of one more reply to a session's conversation, by this model."""
        chat = ChatTurn(
            self, turn.enter, turn.options, exact=turn.exact, seed=lambda token_ids: turn.seed(), told=turn.told,
            denied=turn.denied, left=turn.left,
        )  # fmt: skip
        return CallStream(chat, turn.timeout)

    def count_tool_calls(self, counts: ToolCallCounts) -> None:
        """Of calls that a session answered."""
        self._life.opened.tool_calls.add(counts)

    async def submit(self, question: Question) -> Submitted:
        """Wait for a place in the queue, and hand the question to the engine."""
        opened = self._life.opened
        call = opened.call(question, next(self._call_ids))
        still_open, salt = self._life.worker.require_open, question.cache_salt
        await self._rates.wait(name=call.name, cache_salt=salt, still_open=still_open, clock=opened.clock)
        if self._config.on_full == "raise":
            self._gate.enter_or_raise()
        else:
            await self._gate.enter()
        mailbox = Mailbox(on_admitted=self._gate.leave)
        worker = self._life.worker
        try:
            worker.submit(call, mailbox)
        except BaseException:
            self._gate.leave()
            raise
        return Submitted(worker, call.call_id, mailbox, opened.written(call))

    def session_opened(self) -> None:
        """Count one more session, a fork or not."""
        with self._lock:
            self._num_sessions += 1

    def seed_of(self, *parts: object) -> int:
        """From the runtime's seed and these, so that the order of arrival changes nothing."""
        return xxh3_64_intdigest(repr((self._config.seed, *parts)).encode())

    def supersede(self, token_ids: array[int], start: int, cache_salt: str | None) -> None:
        """Tell the cache, soon, that what lies behind `start` was taken back; the array is not changed afterwards."""
        namespace = self._life.opened.namespace(cache_salt)
        self._life.worker.tell(lambda engine: engine.cache.supersede(token_ids, start, namespace=namespace))

    def _moment(self) -> Moment:
        """All figures, as of the last step or abort."""
        opened, snapshot = self._life.opened, self._life.worker.snapshot
        assert snapshot is not None, "a started engine has a snapshot"
        calls = opened.tool_calls.counts
        return Moment(snapshot, sessions=self._num_sessions, at=opened.clock(), tool_calls=calls)
