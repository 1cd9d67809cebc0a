"""One step at a time: plan, copy, forward, commit, sample, tell."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from agentkv.cache import PrefixCache
from agentkv.calls import Call, CallFailed, ChoiceEnded, TokensAdded, Update
from agentkv.counters import CountersByName, EngineCounters, Snapshot
from agentkv.model_runner import KVRead, PackedSequence, SharedRun
from agentkv.sampling import Sampled, prompt_logprobs, sample
from agentkv.scheduler import Chunk, Group, Scheduler

from .choice import Choice
from .live import Live

__all__ = ["Engine", "Runner"]

_log = logging.getLogger("agentkv")


class Runner(Protocol):
    """What an engine needs of the device side; `ModelRunner` is one."""

    def copy_pages(self, source_page_ids: Sequence[int], destination_page_ids: Sequence[int]) -> None: ...

    def run(self, sequences: Sequence[PackedSequence], shared: Sequence[SharedRun] = ()) -> Tensor: ...

    @property
    def kv_read(self) -> KVRead:
        """What the last run read of keys and values."""
        ...


class Engine:
    """Serves calls over one model and one cache: synchronous, single-threaded, deterministic.

    `add` and `abort` between steps; `step` runs one batch and returns what became of it. The order of the updates of
    one choice is the order of its tokens; a token is told after the step's pages were committed and released, so
    whoever acts on it finds them cached. A fault in one call's look-up, forward, sampling or text ends that call alone.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        strict: bool = False,
    ) -> None:
        """`strict`: prove the books by a full recount after every step."""
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.by_name = CountersByName(scheduler.cache.page_size)
        self.by_tag = CountersByName(scheduler.cache.page_size)
        self._runner = runner
        self._tokenizer = tokenizer
        self._clock = clock
        self._strict = strict
        self._live: dict[int, Live] = {}
        # From request id to its call and the choice that it computes.
        self._owner: dict[int, tuple[Live, int]] = {}

        self._request_ids = itertools.count()

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache that serves this engine."""
        return self.scheduler.cache

    @property
    def is_idle(self) -> bool:
        """No call is left."""
        return not self._live

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return self.scheduler.num_waiting

    def is_admitted(self, call_id: int) -> bool:
        """Whether the call has left the queue, or the engine."""
        live = self._live.get(call_id)
        return live is None or live.admitted_at is not None

    # -- calls come and go --------------------------------------------------------------------------------------

    def add(self, call: Call) -> None:
        """Queue a call. What this raises concerns this call alone, and leaves nothing of it behind."""
        assert call.call_id not in self._live, f"call {call.call_id} was added twice"
        live = Live(call, self._tokenizer, self._request_ids)
        requests = live.first_requests()
        self.scheduler.add(*requests)
        self._live[call.call_id] = live
        for index, request in enumerate(requests):
            self._owner[request.request_id] = (live, index)

    def abort(self, call_id: int) -> None:
        """End a call now, without a reply. An unknown id, or one that has just ended, is harmless."""
        live = self._live.get(call_id)
        if live is not None:
            self._drop(live)

    def fail(self, call_id: int) -> None:
        """As abort, of a call whose tokens its reader could not take: it is a failure, also if it has just ended."""
        self.abort(call_id)
        self.counters.failures += 1

    def cancel(self, call_id: int, *, keep: bool) -> list[Update]:
        """End a call now; each unfinished choice becomes a reply that ends "cancelled".

        With keep its last, partly filled page stays cached, so that a conversation can go on from the answer.
        An unknown id, or one that has just ended, is harmless.
        """
        updates: list[Update] = []
        live = self._live.get(call_id)
        for choice in live.choices if live is not None else ():
            if choice.finish_reason is None:
                assert live is not None
                if rest := choice.cut_short():
                    updates.append(TokensAdded(call_id, choice.index, (), rest))
                self._end_choice(live, choice, updates, keep_partial=keep)
        return updates

    def warm_up(self, num_tokens: int) -> None:
        """Run a prompt of that length and one token behind it over the null page, where nobody reads."""
        null = [0] * (num_tokens + 1)
        if num_tokens > 0:
            self._runner.run([PackedSequence([0] * num_tokens, 0, null, "last")])
            self._runner.run([PackedSequence([0], num_tokens, null, "last")])

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Run one batch. Returns [] when nothing could run."""
        began = self._clock()
        updates: list[Update] = []
        plan = self.scheduler.plan()
        self.counters.preemptions += len(plan.preempted)
        for refusal in plan.refused:
            self._fail_request(refusal.request_id, refusal.error, updates)
        # A refusal ends its whole call, so other requests of it may have lost their place in this plan.
        chunks = [chunk for chunk in plan.chunks if chunk.request_id in self._owner]
        self._note_admissions(chunks)
        if chunks:
            self.counters.steps += 1
            rows = self._forward(chunks, updates, plan.groups)
            ready = self._commit(chunks, rows, updates)
            self._sample(ready, updates)
        if self._strict:
            self.check()
        self.counters.step_seconds += self._clock() - began
        return updates

    def _note_admissions(self, chunks: Sequence[Chunk]) -> None:
        """Count each call's prompt once, when it is first admitted."""
        for chunk in chunks:
            live, _ = self._owner[chunk.request_id]
            if live.admitted_at is None:
                live.admitted_at = self._clock()
                stem, counters = live.stem, self.counters
                counters.calls += 1
                counters.prompt_tokens += stem.prompt_tokens
                counters.cached_tokens += stem.cached_tokens
                counters.computed_tokens += stem.computed_tokens
                counters.last_token_positions += stem.misses["last_token"]
                for cause, tokens in stem.misses.items():
                    counters.misses[cause] += tokens
                self.by_name.count_prompt(live.call.name, stem)
                for tag in live.call.tags:
                    self.by_tag.count_prompt(tag, stem)

    def _forward(
        self, chunks: Sequence[Chunk], updates: list[Update], groups: Sequence[Group] = ()
    ) -> dict[int, Tensor]:
        """Logit rows of each chunk that ran, by request id; what fails alone, fails."""
        began = self._clock()
        rows: dict[int, Tensor] = {}
        try:
            rows = self._run(chunks, groups)
        except Exception as error:
            if len(chunks) == 1:
                self._fail_request(chunks[0].request_id, error, updates)
                return {}
            _log.warning("a batch of %d requests failed (%s); running them one by one", len(chunks), error)
        finally:
            seconds = self._clock() - began
            self.counters.forward_seconds += seconds
        if rows:
            self._note_prompt_positions(chunks, seconds)
            return rows
        for chunk in chunks:
            # A call that has just failed by another of its requests has nobody to run this one for.
            if chunk.request_id in self._owner:
                rows |= self._forward([chunk], updates)
        return rows

    def _note_prompt_positions(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Split the seconds of one forward between positions of prompts and others, by their numbers."""
        prompt = 0
        for chunk in chunks:
            # A call that has failed since the plan was made has no owner any more.
            if (owner := self._owner.get(chunk.request_id)) is not None:
                prompt += max(0, min(chunk.seq_len, len(owner[0].call.prompt_token_ids)) - chunk.context_len)
        self.counters.prompt_positions += prompt
        self.counters.prompt_seconds += seconds * prompt / sum(len(chunk.token_ids) for chunk in chunks)

    def _run(self, chunks: Sequence[Chunk], groups: Sequence[Group]) -> dict[int, Tensor]:
        copies = [chunk.copy for chunk in chunks if chunk.copy is not None]
        if copies:
            self._runner.copy_pages([copy.source for copy in copies], [copy.destination for copy in copies])
        sequences = [
            PackedSequence(chunk.token_ids, chunk.context_len, chunk.page_ids, _logits_wanted(chunk))
            for chunk in chunks
        ]
        logits: Any = self._runner.run(sequences, _shared_runs(groups, chunks))
        self.counters.kv_bytes_read += self._runner.kv_read.num_bytes
        self.counters.kv_bytes_apart += self._runner.kv_read.num_bytes_apart
        counts = [_num_rows(sequence) for sequence in sequences]
        self.counters.positions_run += sum(len(chunk.token_ids) for chunk in chunks)
        return {chunk.request_id: part for chunk, part in zip(chunks, logits.split(counts), strict=True)}

    def _commit(
        self, chunks: Sequence[Chunk], rows: dict[int, Tensor], updates: list[Update]
    ) -> list[tuple[int, Tensor]]:
        """Hand what ran to the cache; (request id, logits [vocab]) wherever a token is to be sampled."""
        ready = []
        for chunk in chunks:
            # It failed in the forward, or its call has failed by another of its requests in this step.
            if chunk.request_id not in rows or chunk.request_id not in self._owner:
                continue
            try:
                request = self.scheduler.get(chunk.request_id)
                assert request is not None, f"request {chunk.request_id} vanished during its step"
                before = request.rerun_tokens
                self.scheduler.commit(chunk)
                again = request.rerun_tokens - before
                self.counters.rerun_positions += again
                self.counters.rerun_after_preemption += again if request.num_preemptions else 0
                if chunk.all_logits:
                    self._note_prompt_logprobs(chunk, rows[chunk.request_id])
            except Exception as error:
                self._fail_request(chunk.request_id, error, updates)
                continue
            if chunk.samples:
                ready.append((chunk.request_id, rows[chunk.request_id][-1]))
        return ready

    def _note_prompt_logprobs(self, chunk: Chunk, rows: Tensor) -> None:
        """Row i of the chunk predicts the token behind position context_len + i."""
        live, _ = self._owner[chunk.request_id]
        prompt, top = live.call.prompt_token_ids, live.call.params.prompt_logprobs
        assert live.prompt_logprobs is not None
        assert top is not None
        first, last = chunk.context_len + 1, min(chunk.seq_len + 1, len(prompt))
        if first < last:
            found = prompt_logprobs(rows[: last - first], prompt[first:last], top)
            live.prompt_logprobs[first:last] = found

    # -- sampling -----------------------------------------------------------------------------------------------

    def _sample(self, ready: Sequence[tuple[int, Tensor]], updates: list[Update]) -> None:
        """Draw the next token of each choice from its logits, and see who has ended."""
        drawing: list[tuple[Live, Choice]] = []
        rows: list[Tensor] = []
        for request_id, row in ready:
            owner = self._owner.get(request_id)
            if owner is None:
                continue  # Its call has failed by another of its requests in this step.
            live, index = owner
            for choice in live.choices_behind(request_id, index):
                drawing.append((live, choice))
                rows.append(row)
        if not drawing:
            return
        sampled = self._draw(rows, [choice.sampling for _, choice in drawing])
        now = self._clock()
        parents: list[Live] = []
        for index, (live, choice) in enumerate(drawing):
            if live.call.call_id not in self._live:
                continue
            if index in sampled.failures:
                self._fail(live, sampled.failures[index], updates)
                continue
            token_id = sampled.token_ids[index]
            assert token_id is not None, "the sampler gave neither a token nor a failure"
            try:
                update = choice.take(token_id, sampled.logprobs[index], now)
            except Exception as error:
                self._fail(live, error, updates)
                continue
            self.counters.output_tokens += 1
            self.by_name.count_output(live.call.name)
            for tag in live.call.tags:
                self.by_tag.count_output(tag)
            updates.append(update)
            if choice.index in live.requests:
                self.scheduler.append(live.requests[choice.index].request_id, token_id)
            elif live not in parents:
                parents.append(live)
            if choice.finish_reason is not None:
                self._end_choice(live, choice, updates)
        for live in parents:
            if live.call.call_id not in self._live:
                continue
            try:
                self._branch(live)
            except Exception as error:
                self._fail(live, error, updates)

    def _draw(self, rows: Sequence[Tensor], states: list[Any]) -> Sampled:
        """Sample one token behind each of the rows [vocab]."""
        try:
            return sample(torch.stack(list(rows)), states)
        except Exception:
            # One row's fault must not end the others: draw them one by one, and keep each one's own error.
            merged = Sampled([], [], {})
            for row, (logits, state) in enumerate(zip(rows, states, strict=True)):
                try:
                    one = sample(logits.unsqueeze(0), [state])
                    merged.token_ids.append(one.token_ids[0])
                    merged.logprobs.append(one.logprobs[0])
                    if 0 in one.failures:
                        merged.failures[row] = one.failures[0]
                except Exception as error:
                    merged.token_ids.append(None)
                    merged.logprobs.append(None)
                    merged.failures[row] = error
            return merged

    def _branch(self, live: Live) -> None:
        """The stem ends as a call with one token does, its last page kept as a tail; its children go on from there."""
        self.scheduler.finish(live.stem.request_id, keep_partial=True)
        del self._owner[live.stem.request_id]
        self.scheduler.add(*live.branch())
        for index, request in live.requests.items():
            self._owner[request.request_id] = (live, index)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _end_choice(self, live: Live, choice: Choice, updates: list[Update], *, keep_partial: bool = True) -> None:
        """A choice has its finish_reason: its pages stay cached, its reply is told."""
        request = live.requests.get(choice.index)
        if request is not None:
            self.scheduler.finish(request.request_id, keep_partial=keep_partial)
            self._owner.pop(request.request_id, None)
        last = all(other.finish_reason is not None for other in live.choices)
        if last:
            self._forget(live, keep_partial=keep_partial)
        logprobs = live.prompt_logprobs
        reply = choice.reply(live.usage(choice, self._clock()), tuple(logprobs) if logprobs is not None else None)
        self.counters.replies += 1
        updates.append(ChoiceEnded(live.call.call_id, choice.index, reply, last, choice.whole_tokens, choice.cut_text))

    def _fail_request(self, request_id: int, error: BaseException, updates: list[Update]) -> None:
        owner = self._owner.get(request_id)
        if owner is not None:
            self._fail(owner[0], error, updates)

    def _fail(self, live: Live, error: BaseException, updates: list[Update]) -> None:
        self._drop(live)
        self.counters.failures += 1
        updates.append(CallFailed(live.call.call_id, error))

    def _drop(self, live: Live) -> None:
        for choice in live.choices:
            choice.finish_reason = choice.finish_reason or "cancelled"
        self._forget(live, keep_partial=False)

    def _forget(self, live: Live, *, keep_partial: bool) -> None:
        """Take the call and all of its requests out of the books; those already finished are no error."""
        for request in live.all_requests():
            self.scheduler.finish(request.request_id, keep_partial=keep_partial)
            self._owner.pop(request.request_id, None)
        self._live.pop(live.call.call_id, None)

    # -- the books ----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The counters and the pages as they are now, as plain data. O(names), see `CountersByName.frozen`."""
        cache = self.cache.counters()
        return Snapshot(
            counters=self.counters.copied(),
            pages={
                "total": self.cache.usable_pages,
                "free": cache.free,
                "cached": cache.cached,
                "in_use": cache.in_use,
                "pinned": cache.pinned,
                "peak": cache.peak,
                "evicted": cache.evicted_pages,
            },
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            by_name=self.by_name.frozen(),
            by_tag=self.by_tag.frozen(),
            evicted_for=cache.evicted_for,
        )

    def check(self) -> None:
        """Prove the books of engine, scheduler and cache; AssertionError names what is off."""
        self.scheduler.check()
        if self.is_idle:
            assert self.scheduler.is_idle, "requests are left without a call"
            assert not self._owner, "owners are left without a call"
            self.cache.check_idle()


def _shared_runs(groups: Sequence[Group], chunks: Sequence[Chunk]) -> list[SharedRun]:
    """The groups by places among these chunks, less requests that have lost theirs since the plan was made."""
    if not groups:
        return []
    places = {chunk.request_id: place for place, chunk in enumerate(chunks)}
    members = [tuple(places[each] for each in group.request_ids if each in places) for group in groups]
    return [
        SharedRun(present, group.first_page, group.num_pages)
        for group, present in zip(groups, members, strict=True)
        if len(present) > 1
    ]


def _logits_wanted(chunk: Chunk) -> Literal["none", "last", "all"]:
    if chunk.all_logits:
        return "all"
    return "last" if chunk.samples else "none"


def _num_rows(sequence: PackedSequence) -> int:
    return {"none": 0, "last": 1, "all": len(sequence.token_ids)}[sequence.logits]
