"""Continuous batching with chunked prefill over a prefix cache. Knows tokens and pages, no tensors and no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from sortedcontainers import SortedKeyList

from agentkv.cache import Lease, PrefixCache, pack
from agentkv.errors import PoolFull, RequestError

from .groups import Groups, SharingRule
from .plan import Chunk, Plan, Refusal
from .request import Request, RequestState

__all__ = ["MATCHED_EACH_STEP", "PASSED_OVER_LIMIT", "Scheduler"]

MATCHED_EACH_STEP = 64
"""Waiting requests, the oldest, whose resident prefix is looked up anew for every plan."""

PASSED_OVER_LIMIT = 32
"""Plans that may admit a later arrival before a request goes first."""

_FAILED_ADMISSIONS = 4
"""Requests that may fail to get pages before a plan stops trying further ones."""


class Scheduler:
    """Decides what each step computes.

    A plan is one token for each decoding request, then the next chunk of each running prefill, then waiting requests,
    under a budget of tokens. Life of a request: `add` → (`plan` → `commit` → `append`) … → `finish`.

    Requests that would compute the same prefix at the same time are computed once by a rule, without any bookkeeping:
    a request waits this step while a prefill that runs, or was admitted before it in this step, shares with it at
    least a page more than the tree can give now. Whatever becomes of that prefill, the next plan decides anew.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_batched_tokens: int = 1024,
        max_num_seqs: int = 64,
        sharing: SharingRule | None = None,
    ) -> None:
        """`sharing`: when plans name groups that read shared pages together; None: never."""
        if max_num_seqs < 1 or max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs}), "
                f"which must be at least 1: every running request may need one token in a step"
            )
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self._groups = Groups(cache.page_size, sharing) if sharing is not None else None
        self._requests: dict[int, Request] = {}
        self._running: SortedKeyList[Request] = SortedKeyList(key=lambda request: (request.arrival, request.request_id))
        self._waiting: SortedKeyList[Request] = SortedKeyList(key=lambda request: (request.arrival, request.request_id))
        self._arrivals = itertools.count()

    # -- requests come and go -----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._requests

    def get(self, request_id: int) -> Request | None:
        """The live request of that id."""
        return self._requests.get(request_id)

    def add(self, *requests: Request) -> None:
        """Queue requests; several at once are one arrival, and if they share a group, one admission."""
        for request in requests:
            assert request.request_id not in self._requests, f"request {request.request_id} was added twice"
            self._measure(request)
        # Nothing below can fail, so all of them are queued or, by a fault above, none.
        arrival = next(self._arrivals)
        for request in requests:
            request.arrival = arrival
            self._requests[request.request_id] = request
            self._waiting.add(request)

    def finish(self, request_id: int, *, keep_partial: bool) -> None:
        """End a request in whatever state it is: its pages go back, or stay cached. An unknown id is no error."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self._release(request, keep_partial=keep_partial)
        else:
            self._waiting.remove(request)
        request.state = RequestState.FINISHED

    def commit(self, chunk: Chunk) -> None:
        """The chunk ran: its keys and values exist. Nothing happens if the request ended in between."""
        request = self._requests.get(chunk.request_id)
        if request is None or request.lease is None:
            return
        self.cache.commit(request.lease, chunk.token_ids)
        request.num_computed_tokens = chunk.seq_len
        request.rerun_tokens += max(0, min(request.computed_end, chunk.seq_len) - chunk.context_len)
        request.computed_end = max(request.computed_end, chunk.seq_len)

    def append(self, request_id: int, token_id: int) -> None:
        """A token was sampled behind the request's last one."""
        self._requests[request_id].token_ids.append(token_id)

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """What to compute next; admits, and preempts, on the way. An empty plan means nothing can run.

        A fault in one request's look-up or growth ends that request, as a refusal, and no other.
        O(running + MATCHED_EACH_STEP) look-ups of O(nodes on a path) each, and O(waiting) comparisons of numbers.
        """
        draft = _Draft(self.max_num_batched_tokens)
        for request in list(self._running):
            if request.state is RequestState.RUNNING and not request.is_prefilling and self._grow(request, draft):
                draft.add(request)
        for request in self._running:
            if request.is_prefilling and draft.budget > 0:
                draft.add(request)
        # What was preempted in this plan does not come back in it: it would take the room that it just gave.
        if not draft.preempted and draft.budget > 0 and self._waiting:
            self._admit(draft)
        groups = self._groups.of(draft.chunks) if self._groups is not None else ()
        return Plan(tuple(draft.chunks), tuple(draft.preempted), tuple(draft.refused), groups)

    def _grow(self, request: Request, draft: _Draft) -> bool:
        """Pages for the request's next token, taken from the latest arrivals if need be; False: it runs no more."""
        assert request.lease is not None
        while True:
            try:
                self.cache.allocate(request.lease, len(request.token_ids))
            except PoolFull:
                victim = self._running[-1]
                self._preempt(victim)
                draft.preempted.append(victim.request_id)
                if victim is request:
                    return False
            except Exception as error:
                self._refuse((request,), error, draft)
                return False
            else:
                return True

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._release(request, keep_partial=False)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        request.group = None
        request.packed = pack(request.token_ids)
        self._waiting.add(request)

    def _release(self, request: Request, *, keep_partial: bool) -> None:
        assert request.lease is not None
        self.cache.release(request.lease, keep_partial=keep_partial)
        request.lease = None

    def _refuse(self, requests: Sequence[Request], error: Exception, draft: _Draft) -> None:
        for request in requests:
            self.finish(request.request_id, keep_partial=False)
            draft.refused.append(Refusal(request.request_id, error))

    # -- admission ----------------------------------------------------------------------------------------------

    def _admit(self, draft: _Draft) -> None:
        """Move waiting requests to running while tokens, seats and pages last."""
        if len(self._running) >= self.max_num_seqs:
            return
        latest_admitted = -1
        failed: list[tuple[Sequence[Request], PoolFull]] = []
        for candidates in self._candidates(draft):
            requests: Sequence[Request] = candidates
            if draft.budget <= 0 or len(failed) >= _FAILED_ADMISSIONS:
                break
            goes_first = requests[0].passed_over >= PASSED_OVER_LIMIT
            if len(self._running) + len(requests) > self.max_num_seqs:
                if len(requests) > self.max_num_seqs:
                    self._refuse(requests, _too_many(len(requests), self.max_num_seqs), draft)
                elif goes_first:
                    break
                continue
            try:
                if any(self._must_wait(request) for request in requests):
                    continue
                requests = self._ahead_of_group(requests)
                leases = self._lease_all(requests)
            except PoolFull as error:
                failed.append((requests, error))
                if goes_first:
                    break
            except Exception as error:
                self._refuse(requests, error, draft)
            else:
                for request, lease in zip(requests, leases, strict=True):
                    self._start(request, lease)
                    draft.add(request)
                latest_admitted = max(latest_admitted, requests[0].arrival)
        self._count_passed_over(latest_admitted)
        if not self._running:
            # Nothing runs, so nothing will free a page: for those that found no room waiting would last for ever.
            for unit, out_of_pages in failed:
                self._refuse(self._unit_of(unit[0]), out_of_pages, draft)

    def _unit_of(self, request: Request) -> list[Request]:
        """The waiting requests that can only be admitted together with this one, itself among them."""
        if request.group is None:
            return [request]
        return [other for other in self._waiting if other.group == request.group]

    def _candidates(self, draft: _Draft) -> list[tuple[Request, ...]]:
        """The waiting requests to try, in the order of admission; those of one group stand together.

        The oldest, looked up anew, and as many of the others that looked best when they arrived: a long queue does
        not make a plan longer, but for one glance at each of the others.
        """
        oldest = list(self._waiting[:MATCHED_EACH_STEP])
        for request in oldest:
            try:
                self._measure(request)
            except Exception as error:
                self._refuse(self._unit_of(request), error, draft)
        others = heapq.nsmallest(
            MATCHED_EACH_STEP, self._waiting.islice(len(oldest)), key=lambda request: _admission_order((request,))
        )
        units: dict[tuple[int, int], list[Request]] = {}
        for request in (*oldest, *others):
            if request.state is not RequestState.WAITING:
                continue
            alone = (request.request_id, -1)
            key = alone if request.group is None else (request.group, 0)
            if key not in units:
                units[key] = self._unit_of(request)
        return sorted(map(tuple, units.values()), key=_admission_order)

    def _measure(self, request: Request) -> None:
        if request.use_cache and request.read_cache:
            request.num_resident_tokens = self.cache.num_resident_tokens(request.packed, request.namespace)

    def _must_wait(self, request: Request) -> bool:
        """A request that runs will soon supply at least a page more of this prompt than the tree can now."""
        if not (request.use_cache and request.read_cache):
            return False
        # The oldest were measured for this plan, but what was admitted since may have evicted some of it.
        self._measure(request)
        end = 4 * (request.num_resident_tokens + self.cache.page_size)
        if end > len(request.packed):
            return False
        head = request.packed[:end]
        return any(
            4 * leader.num_computed_tokens < end and _supplies(leader, request, head) for leader in self._running
        )

    def _ahead_of_group(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of a unit that are to be admitted now: all, or the first alone where it will supply pages to another.

        The samples of one prompt find it resident. Where it was evicted before there was room for them, each would
        compute it anew, in pages of its own; so the first goes ahead, and the others follow when it is there again.
        """
        size, first = self.cache.page_size, requests[0]
        for other in requests[1:]:
            end = 4 * size * (other.num_resident_tokens // size + 1)
            reads = other.use_cache and other.read_cache and end < len(other.packed)
            if reads and _supplies(first, other, other.packed[:end]):
                return requests[:1]
        return requests

    def _lease_all(self, requests: Sequence[Request]) -> list[Lease]:
        """A lease with pages for the whole prompt for each, or PoolFull, and nothing was evicted."""
        leases: list[Lease] = []
        try:
            for request in requests:
                leases.append(self._lease(request))  # noqa: PERF401 - those made before a fault are to be released
            lengths = [len(request.token_ids) for request in requests]
            self.cache.allocate_together(list(zip(leases, lengths, strict=True)))
        except BaseException:
            for lease in leases:
                self.cache.release(lease, keep_partial=False)
            raise
        return leases

    def _lease(self, request: Request) -> Lease:
        if not request.use_cache:
            return self.cache.private_lease(request.prompt_tokens, owner=request.name)
        return self.cache.lookup(request.packed, request.namespace, owner=request.name, reuse=request.read_cache)

    def _start(self, request: Request, lease: Lease) -> None:
        self._waiting.remove(request)
        request.lease = lease
        request.group = None
        request.state = RequestState.RUNNING
        request.num_computed_tokens = lease.num_cached_tokens
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = lease.num_cached_tokens
            request.misses = lease.misses
            request.computed_end = max(request.computed_end, lease.num_cached_tokens)
        self._running.add(request)

    def _count_passed_over(self, latest_admitted: int) -> None:
        for request in self._waiting:
            if request.arrival >= latest_admitted:
                break
            request.passed_over += 1

    # -- the books ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the queues and of the cache below; AssertionError names what is off."""
        self.cache.check()
        assert len(self._running) + len(self._waiting) == len(self._requests), "a request is in no queue, or in two"
        for request in self._running:
            assert request.state is RequestState.RUNNING, f"request {request.request_id} runs as {request.state}"
            assert request.lease is not None, f"running request {request.request_id} has no lease"
            assert request.lease.num_tokens == request.num_computed_tokens, "request and lease disagree on progress"
        for request in self._waiting:
            assert request.lease is None, f"waiting request {request.request_id} holds a lease"
        assert self.cache.num_leases == len(self._running), f"{self.cache.num_leases} leases, {len(self._running)} run"


def _admission_order(requests: tuple[Request, ...]) -> tuple[bool, int, int]:
    """Passed over too often first, then the longest resident prefix, then the oldest."""
    first = requests[0]
    starved = first.passed_over >= PASSED_OVER_LIMIT
    return (not starved, 0 if starved else -first.num_resident_tokens, first.arrival)


def _supplies(leader: Request, follower: Request, head: bytes) -> bool:
    """What the leader hands to the tree begins with this head of the follower's prompt, packed."""
    return leader.use_cache and leader.namespace == follower.namespace and leader.packed.startswith(head)


def _too_many(group: int, seats: int) -> RequestError:
    return RequestError(
        f"{group} requests are to start together, and max_num_seqs is {seats}: ask for fewer, or allow more"
    )


class _Draft:
    """A plan in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.preempted: list[int] = []
        self.refused: list[Refusal] = []

    def add(self, request: Request) -> None:
        """As much of the request's known tokens as the budget allows, which may be nothing."""
        if self.budget <= 0:
            return
        assert request.lease is not None
        start = request.num_computed_tokens
        end = min(len(request.token_ids), start + self.budget)
        self.budget -= end - start
        self.chunks.append(
            Chunk(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids[start:end]),
                context_len=start,
                page_ids=request.lease.page_ids[:],
                samples=end == len(request.token_ids),
                all_logits=request.all_logits and start < request.prompt_tokens,
                # The copy is due until the first commit, whichever step that falls into.
                copy=request.lease.copy if request.lease.held_source is not None else None,
            )
        )
