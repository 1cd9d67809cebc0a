"""Random operations on the tree and on plain dicts, compared after each step."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentkv_radix import RadixTree, xxh3_128
from support.radix_oracle import Hold, Pair

HASHES = {"xxh3": xxh3_128, "constant": lambda data: b"same", "8 bits": lambda data: xxh3_128(data)[:1]}

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=13).map(tuple)
namespaces = st.sampled_from([b"", b"tenant"])


class TreeMachine(RuleBasedStateMachine):
    """Two tokens and few lengths, so that prefixes, tails and pages collide all the time."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), hash_name=st.sampled_from(sorted(HASHES)))
    def start(self, page_size: int, hash_name: str) -> None:
        self.pair = Pair(RadixTree(page_size=page_size, hash_page=HASHES[hash_name]))

    def hold_of(self, data: st.DataObject, *kinds: str) -> Hold:
        return data.draw(st.sampled_from([hold for hold in self.pair.holds if hold.kind in kinds]))

    def has(self, *kinds: str) -> bool:
        return any(hold.kind in kinds for hold in self.pair.holds)

    @rule(namespace=namespaces, tokens=tokens)
    def insert(self, namespace, tokens):
        self.pair.insert(namespace, tokens)

    @rule(namespace=namespaces, tokens=tokens, max_tokens=st.none() | st.integers(0, 13))
    def match(self, namespace, tokens, max_tokens):
        self.pair.match(namespace, tokens, max_tokens)

    @rule(namespace=namespaces, tokens=tokens, kind=st.sampled_from(["lock", "pin"]))
    def hold(self, namespace, tokens, kind):
        self.pair.lock(namespace, tokens, kind)

    @rule(namespace=namespaces, tokens=tokens)
    def remember(self, namespace, tokens):
        self.pair.remember(namespace, tokens)

    @precondition(lambda self: self.pair.remembered)
    @rule(data=st.data())
    def lock_remembered(self, data):
        self.pair.lock_remembered(data.draw(st.integers(0, len(self.pair.remembered) - 1)))

    @rule(namespace=namespaces, tokens=tokens)
    def hold_page(self, namespace, tokens):
        self.pair.lock_page(namespace, tokens)

    @precondition(lambda self: self.has("lock", "page", "pin"))
    @rule(data=st.data())
    def release(self, data):
        self.pair.release(self.hold_of(data, "lock", "page", "pin"))

    @precondition(lambda self: self.has("lock"))
    @rule(data=st.data(), tokens=tokens)
    def extend(self, data, tokens):
        self.pair.extend(self.hold_of(data, "lock"), self.pair.cut(tokens)[0])

    @precondition(lambda self: self.has("lock"))
    @rule(data=st.data(), tokens=tokens)
    def add_tail(self, data, tokens):
        if rest := tokens[: self.pair.page_size - 1]:
            self.pair.add_tail(self.hold_of(data, "lock"), rest)

    @rule(num_pages=st.integers(0, 6))
    def evict(self, num_pages):
        self.pair.evict(num_pages)

    @rule(namespace=namespaces, tokens=tokens, start=st.integers(0, 13))
    def supersede(self, namespace, tokens, start):
        self.pair.supersede(namespace, tokens, start)

    @invariant()
    def same_as_the_dicts(self):
        if hasattr(self, "pair"):
            self.pair.compare()


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize(("page_size", "steps"), [(4, 10_000), (2, 2_000), (1, 2_000)])
def test_ten_thousand_random_steps_keep_tree_and_counters_equal_to_a_recount(page_size: int, steps: int) -> None:
    draw = random.Random(page_size)
    pair = Pair(RadixTree(page_size=page_size), num_pages=60)
    for _ in range(steps):
        random_step(pair, draw)
        pair.compare()
    while pair.holds:
        pair.release(pair.holds[-1])
    pair.evict(1000)
    pair.compare()
    assert (pair.tree.num_pages, pair.tree.namespaces) == (0, ())


def random_step(pair: Pair, draw: random.Random) -> None:
    namespace = draw.choice([b"", b"tenant"])
    tokens = tuple(draw.choices((0, 1), weights=(3, 1), k=draw.randint(1, 5 * pair.page_size + 2)))
    locks = [hold for hold in pair.holds if hold.kind == "lock"]
    what = draw.random()
    if what < 0.25:
        pair.insert(namespace, tokens)
    elif what < 0.35:
        pair.match(namespace, tokens, draw.choice([None, len(tokens) - 1]))
    elif what < 0.50 and len(pair.holds) < 6:
        pair.lock(namespace, tokens, draw.choice(["lock", "lock", "pin"]))
    elif what < 0.52:
        pair.remember(namespace, tokens)
    elif what < 0.54 and pair.remembered and len(pair.holds) < 6:
        pair.lock_remembered(draw.randrange(len(pair.remembered)))
    elif what < 0.57 and len(pair.holds) < 6:
        pair.lock_page(namespace, tokens)
    elif what < 0.70 and pair.holds:
        pair.release(draw.choice(pair.holds))
    elif what < 0.82 and locks:
        pair.extend(draw.choice(locks), pair.cut(tokens)[0])
    elif what < 0.90 and locks and (rest := tokens[: pair.page_size - 1]):
        pair.add_tail(draw.choice(locks), rest)
    elif what < 0.98:
        pair.evict(draw.randint(0, 5))
    else:
        pair.supersede(namespace, tokens, draw.randint(0, len(tokens)))
