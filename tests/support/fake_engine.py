"""A model that a child could check: its keys and values are plain numbers, one a slot, and every read is verified.

The value of a token is a hash of its whole prefix, so a slot holds the right value for exactly one prefix: a page that
is shared wrongly, overwritten, copied from the wrong source or reused too early is found by the first chunk that reads
it. The next token is a function of the prefix, so a run that was disturbed must give the text of one that was not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from agentkv.cache import Lease, PageCopy, PrefixCache
from agentkv.scheduler import Chunk, Plan, Request, Scheduler

__all__ = ["FakeEngine", "Memory", "next_token", "positions_of", "undisturbed", "values_of"]

VOCABULARY = 4
"""Few tokens, so that texts meet again."""


def value_of(namespace: bytes, prefix: Sequence[int]) -> int:
    """The keys and values of the last token of a prefix, as one number."""
    return values_of(namespace, prefix)[-1]


def values_of(namespace: bytes, tokens: Sequence[int]) -> list[int]:
    """The keys and values of each of the tokens."""
    value, values = hash(namespace), []
    for token in tokens:
        value = hash((value, token, 0x9E3779B97F4A7C15))
        values.append(value)
    return values


def next_token(namespace: bytes, prefix: Sequence[int], choice: int = 0) -> int:
    """What the model says after a prefix; `choice` tells apart the first tokens of several samples."""
    return (value_of(namespace, prefix) // 7 + choice) % VOCABULARY


def undisturbed(namespace: bytes, prompt: Sequence[int], max_tokens: int, choice: int = 0) -> list[int]:
    """The output of a run that nothing disturbs."""
    tokens = list(prompt)
    for index in range(max_tokens):
        tokens.append(next_token(namespace, tokens, choice if index == 0 else 0))
    return tokens[len(prompt) :]


def positions_of(plan: Plan) -> int:
    """Token positions that a step runs through the model."""
    return sum(len(chunk.token_ids) for chunk in plan.chunks)


class Memory:
    """The slots of all pages. What is read must have been written, for this very prefix."""

    def __init__(self, cache: PrefixCache) -> None:
        self.page_size = cache.page_size
        self.slots: list[int | None] = [None] * (cache.pool.num_pages * cache.page_size)

    def copy(self, copy: PageCopy) -> None:
        assert copy.destination > 0, "a copy was planned without a page to copy to"
        assert copy.source != copy.destination
        source, destination = copy.source * self.page_size, copy.destination * self.page_size
        self.slots[destination : destination + copy.num_tokens] = self.slots[source : source + copy.num_tokens]

    def slot(self, page_ids: Sequence[int], position: int) -> int:
        return page_ids[position // self.page_size] * self.page_size + position % self.page_size

    def write(self, page_ids: Sequence[int], values: Sequence[int], start: int) -> None:
        for position in range(start, len(values)):
            self.slots[self.slot(page_ids, position)] = values[position]

    def read(self, page_ids: Sequence[int], values: Sequence[int]) -> None:
        found = [self.slots[self.slot(page_ids, position)] for position in range(len(values))]
        wrong = [position for position, value in enumerate(values) if found[position] != value]
        assert not wrong, f"positions {wrong} of {len(values)} hold what another prefix wrote, or nothing"

    def compute(self, lease: Lease, tokens: Sequence[int], seq_len: int) -> None:
        """Run a lease's tokens up to seq_len, its copy first, as one forward would."""
        if lease.copy is not None and lease.held_source is not None:
            self.copy(lease.copy)
        values = values_of(lease.namespace, tokens[:seq_len])
        self.write(lease.page_ids, values, lease.num_tokens)
        self.read(lease.page_ids, values)


class FakeEngine:
    """Drives a scheduler and its cache as an engine does, and proves each plan and all books on the way."""

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int = 4,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 8,
        recount: bool = True,
        **cache_options,
    ) -> None:
        """`num_pages` are usable ones. `recount`: prove the books in full after every step."""
        self.cache = PrefixCache(num_pages + 1, page_size=page_size, **cache_options)
        self.scheduler = Scheduler(self.cache, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs)
        self.memory = Memory(self.cache)
        self.recount = recount
        self.requests: dict[int, Request] = {}
        """Every request ever added."""
        self.max_tokens: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        """Of requests that came to their natural end."""
        self.refused: dict[int, Exception] = {}
        self.positions: Counter[int] = Counter()
        """How often each distinct position ran through the model, by the value that it computes."""
        self.plans: list[Plan] = []
        self.preemptions: list[int] = []
        self._progress: dict[int, int] = {}
        self._ids = itertools.count()
        self._groups = itertools.count()

    # -- requests come and go

    def submit(self, prompt: Sequence[int], max_tokens: int = 1, **options) -> int:
        request = Request(next(self._ids), list(prompt), **options)
        self._add([request], max_tokens)
        return request.request_id

    def submit_group(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1, **options) -> list[int]:
        group = next(self._groups)
        requests = [Request(next(self._ids), list(prompt), group=group, **options) for prompt in prompts]
        self._add(requests, max_tokens)
        return [request.request_id for request in requests]

    def _add(self, requests: list[Request], max_tokens: int) -> None:
        self.scheduler.add(*requests)
        for request in requests:
            self.requests[request.request_id] = request
            self.max_tokens[request.request_id] = max_tokens

    def abort(self, request_id: int, *, keep_partial: bool = False) -> None:
        self.scheduler.finish(request_id, keep_partial=keep_partial)
        self._progress.pop(request_id, None)

    @property
    def live(self) -> list[int]:
        return [request_id for request_id in self.requests if self.scheduler.get(request_id) is not None]

    # -- a step

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.plans.append(plan)
        for refusal in plan.refused:
            self.refused[refusal.request_id] = refusal.error
            self._progress.pop(refusal.request_id, None)
        for request_id in plan.preempted:
            self.preemptions.append(request_id)
            self._progress.pop(request_id, None)
        self._prove(plan)
        self._forward(plan)
        for chunk in plan.chunks:
            self._commit(chunk)
        for chunk in plan.chunks:
            if chunk.samples and self.scheduler.get(chunk.request_id) is not None:
                self._sample(chunk.request_id)
        if self.recount:
            self.check()
        return plan

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left. A plan that does nothing while requests are live is a standstill."""
        for _ in range(limit):
            if self.scheduler.is_idle:
                break
            plan = self.step()
            assert plan.chunks or plan.preempted or plan.refused, f"standstill with {self.live} live"
        else:
            raise AssertionError(f"{self.live} did not end within {limit} steps")
        self.cache.check_idle()

    def _prove(self, plan: Plan) -> None:
        """What every plan keeps to."""
        assert positions_of(plan) <= self.scheduler.max_num_batched_tokens
        assert len({chunk.request_id for chunk in plan.chunks}) == len(plan.chunks)
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs
        written: Counter[int] = Counter()
        for chunk in plan.chunks:
            request = self.requests[chunk.request_id]
            lease = request.lease
            assert chunk.token_ids, "an empty chunk"
            assert chunk.page_ids is not lease.page_ids, "a plan that changes after it was made"
            assert list(chunk.token_ids) == request.token_ids[chunk.context_len : chunk.seq_len]
            assert chunk.context_len == self._progress.get(chunk.request_id, lease.num_cached_tokens), "a gap"
            assert chunk.samples == (chunk.seq_len == len(request.token_ids))
            assert len(chunk.page_ids) * self.cache.page_size >= chunk.seq_len
            assert len(set(chunk.page_ids)) == len(chunk.page_ids), "one page stands for two places"
            assert 0 not in chunk.page_ids
            first, last = chunk.context_len // self.cache.page_size, (chunk.seq_len - 1) // self.cache.page_size
            assert first >= lease.num_tree_pages, "a page of the tree would be written"
            written.update(chunk.page_ids[first : last + 1])
        assert max(written.values(), default=0) <= 1, "two requests would write one page"

    def _forward(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            if chunk.copy is not None:
                self.memory.copy(chunk.copy)
        values = {chunk.request_id: self._values(chunk) for chunk in plan.chunks}
        for chunk in plan.chunks:
            self.memory.write(chunk.page_ids, values[chunk.request_id], chunk.context_len)
            self.positions.update(values[chunk.request_id][chunk.context_len :])
        for chunk in plan.chunks:
            self.memory.read(chunk.page_ids, values[chunk.request_id])

    def _values(self, chunk: Chunk) -> list[int]:
        request = self.requests[chunk.request_id]
        return values_of(request.namespace, request.token_ids[: chunk.seq_len])

    def _commit(self, chunk: Chunk) -> None:
        try:
            self.scheduler.commit(chunk)
        except Exception as error:
            self.abort(chunk.request_id)
            self.refused[chunk.request_id] = error
        else:
            self._progress[chunk.request_id] = chunk.seq_len

    def _sample(self, request_id: int) -> None:
        request = self.requests[request_id]
        self.scheduler.append(request_id, next_token(request.namespace, request.token_ids))
        if request.num_output_tokens == self.max_tokens[request_id]:
            self.outputs[request_id] = request.token_ids[request.prompt_tokens :]
            self.scheduler.finish(request_id, keep_partial=True)
            self._progress.pop(request_id, None)

    # -- proofs

    def check(self) -> None:
        self.scheduler.check()
        counters = self.cache.counters()
        assert counters.free + counters.cached + counters.in_use + counters.pinned == self.cache.usable_pages
        assert min(counters.free, counters.cached, counters.in_use, counters.pinned) >= 0
        for request in self.requests.values():
            if request.admitted:
                assert sum(request.misses.values()) == request.computed_tokens, request.misses
                assert min(request.misses.values()) >= 0, request.misses
                assert 0 <= request.cached_tokens < request.prompt_tokens

    def undisturbed(self, request_id: int) -> list[int]:
        request = self.requests[request_id]
        return undisturbed(request.namespace, request.prompt_token_ids, self.max_tokens[request_id])

    def check_outputs(self) -> None:
        """Whatever came to its end says what it would have said alone."""
        for request_id, output in self.outputs.items():
            assert output == self.undisturbed(request_id), f"request {request_id} was told another text"

    def times_run(self, namespace: bytes, tokens: Sequence[int]) -> list[int]:
        """How often each position of a prefix ran through the model."""
        return [self.positions[value] for value in values_of(namespace, tokens)]

    def fits_alone(self, prompt_tokens: int, max_tokens: int) -> bool:
        """Whether the pool holds such a request with nothing beside it; the last token sampled never runs."""
        return self.cache.pages_for(prompt_tokens + max_tokens - 1) <= self.cache.usable_pages
