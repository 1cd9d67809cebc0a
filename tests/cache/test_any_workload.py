"""Random leases on tiny pools, compared with plain dicts and checked slots after each step."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.cache_oracle import CacheUnderTest
from support.examples import examples

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)
namespaces = st.sampled_from([b"", b"", b"tenant"])


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(3, 16),
        policy=st.sampled_from(["lru", "lfu", "superseded-first"]),
    )
    def start(self, page_size, num_pages, policy):
        self.made = CacheUnderTest(num_pages, page_size=page_size, policy=policy, ghost_pages=10_000)

    def some_lease(self, data):
        return data.draw(st.sampled_from(list(self.made.leases)))

    @rule(tokens=tokens, namespace=namespaces, reuse=st.sampled_from([True, True, True, False]))
    def lookup(self, tokens, namespace, reuse):
        self.made.lookup(tokens, namespace, reuse=reuse)

    @precondition(lambda self: self.made.leases)
    @rule(data=st.data(), more=tokens)
    def fork(self, data, more):
        """Go on from a part of what another lease holds."""
        parent = self.some_lease(data)
        cut = data.draw(st.integers(0, len(self.made.leases[parent])))
        self.made.lookup(self.made.leases[parent][:cut] + more, parent.namespace)

    @precondition(lambda self: self.made.past)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def next_turn(self, data, more):
        namespace, held = data.draw(st.sampled_from(self.made.past))
        self.made.lookup([*held, *more], namespace)

    @precondition(lambda self: self.made.leases)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=3))
    def grow(self, data, more):
        lease = self.some_lease(data)
        if lease.num_tokens == len(self.made.leases[lease]):
            self.made.leases[lease] += more
        self.made.allocate(lease, len(self.made.leases[lease]))

    @precondition(lambda self: self.made.leases)
    @rule(data=st.data())
    def compute(self, data):
        lease = self.some_lease(data)
        length = min(len(self.made.leases[lease]), len(lease.page_ids) * self.made.cache.page_size)
        if lease.admitted and lease.num_tokens < length:
            self.made.compute(lease, data.draw(st.integers(lease.num_tokens + 1, length)))

    @precondition(lambda self: self.made.leases)
    @rule(data=st.data(), keep_partial=st.booleans())
    def release(self, data, keep_partial):
        self.made.release(self.some_lease(data), keep_partial=keep_partial)

    @rule(tokens=tokens, namespace=namespaces, start=st.integers(0, 14))
    def supersede(self, tokens, namespace, start):
        before = dict(self.made.witness.resident)
        self.made.cache.supersede(tokens, start, namespace)
        assert self.made.witness.resident == before

    @invariant()
    def same_as_the_dicts(self):
        if hasattr(self, "made"):
            self.made.compare()

    def teardown(self):
        if hasattr(self, "made"):
            for lease in list(self.made.leases):
                self.made.release(lease, keep_partial=False)
            self.made.cache.check_idle()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=examples(60),
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 14), (2, 12), (4, 10), (4, 24)])
def test_two_thousand_random_steps_keep_the_cache_equal_to_the_dicts(page_size, num_pages):
    draw = random.Random(page_size * num_pages)
    made = CacheUnderTest(num_pages, page_size=page_size, ghost_pages=10_000)
    for _ in range(2000):
        random_step(made, draw)
        made.compare()
    for lease in list(made.leases):
        made.release(lease, keep_partial=True)
    made.cache.check_idle()
    assert made.witness.evicted


def random_step(made: CacheUnderTest, draw: random.Random) -> None:
    what = draw.random()
    if len(made.leases) < 4 and what < 0.2 and made.past:
        namespace, held = draw.choice(made.past)
        made.lookup([*held, *draw.choices((0, 1), k=draw.randint(1, 3))], namespace)
    elif len(made.leases) < 4 and what < 0.4:
        known = [prefix for _, prefix in made.witness.ever] or [()]
        head = draw.choice(known)
        made.lookup([*head[: draw.randint(0, len(head))], *draw.choices((0, 1), k=draw.randint(1, 9))])
    elif not made.leases:
        return
    else:
        lease = draw.choice(list(made.leases))
        tokens = made.leases[lease]
        if what < 0.65 and len(tokens) < 20:
            if lease.num_tokens == len(tokens):
                tokens.append(draw.randint(0, 1))
            if made.allocate(lease, len(tokens)):
                made.compute(lease, draw.randint(lease.num_tokens + 1, len(tokens)))
            else:
                made.release(lease, keep_partial=False)
        elif what < 0.9:
            made.release(lease, keep_partial=draw.random() < 0.7)
        else:
            made.cache.supersede(tokens, draw.randint(0, len(tokens)))
