"""A policy decides who goes first and nothing else: any of them is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.cache import PrefixCache
from agentkv.errors import ConfigError
from agentkv.policies import LFU, LRU, SupersededFirst, known_policies, make_policy
from support.fake_engine import FakeEngine


class FirstInFirstOut:
    """Oldest first, however often it was used."""

    def key(self, node):
        return (node.created,)


class DeepestFirst:
    """Long conversations pay for short ones."""

    def key(self, node):
        return (-node.depth, node.last_access)


class SecondChance(FirstInFirstOut):
    """First in, first out, but who was hit since goes round once more; keeps a state of its own."""

    def __init__(self) -> None:
        self.referenced: set[int] = set()
        self.turn = 0
        self.turns: dict[int, int] = {}

    def on_hit(self, node):
        self.referenced.add(node.serial)

    def key(self, node):
        return (self.turns.get(node.serial, 0), node.created)

    def spare(self, node):
        if node.serial not in self.referenced:
            return False
        self.referenced.discard(node.serial)
        self.turn += 1
        self.turns[node.serial] = self.turn
        return True

    def on_evict(self, node):
        self.turns.pop(node.serial, None)


class Whim:
    """A key that follows nothing, and changes."""

    def __init__(self) -> None:
        self.asked = 0

    def key(self, node):
        self.asked += 1
        return (hash((self.asked, node.serial)) % 5,)


POLICIES = [*known_policies(), FirstInFirstOut, DeepestFirst, SecondChance, Whim]


def made(policy):
    return policy if isinstance(policy, str) else policy()


def serve(cache: PrefixCache, tokens: list[int]) -> None:
    lease = cache.lookup(tokens)
    cache.allocate(lease, len(tokens))
    cache.commit(lease, tokens[lease.num_tokens :])
    cache.release(lease, keep_partial=True)


def order_of_leaving(cache: PrefixCache, prompts: dict[str, list[int]]) -> list[str]:
    """Names of the prompts, one page each at their end, in the order in which pressure takes them."""
    order: list[str] = []
    greedy = cache.private_lease(1)
    while len(order) < len(prompts):
        cache.allocate(greedy, (len(greedy.page_ids) + cache.pool.num_free + 1) * cache.page_size)
        gone = [name for name, tokens in prompts.items() if cache.num_resident_tokens([*tokens, 99]) < len(tokens)]
        order += [name for name in gone if name not in order]
    cache.release(greedy, keep_partial=False)
    cache.check_idle()
    return order


PROMPTS = {"a": [1, 1], "b": [2, 2], "c": [3, 3]}


def test_lru_takes_the_least_recently_used():
    cache = PrefixCache(10, page_size=2, policy="lru")
    for name in "abcab":
        serve(cache, PROMPTS[name])
    assert order_of_leaving(cache, PROMPTS) == ["c", "a", "b"]


def test_a_call_that_ran_for_long_leaves_its_path_as_young_as_its_end():
    cache = PrefixCache(20, page_size=2, policy="lru")
    prompts = {"long": [1, 1, 2, 2], "short": [3, 3]}
    running = cache.lookup(prompts["long"])
    cache.allocate(running, 4)
    cache.commit(running, prompts["long"])
    serve(cache, prompts["short"])
    cache.release(running, keep_partial=True)
    assert order_of_leaving(cache, prompts) == ["short", "long"]


def test_lfu_takes_the_least_often_hit_and_the_older_of_equals():
    cache = PrefixCache(10, page_size=2, policy="lfu")
    for name in "abc":
        serve(cache, PROMPTS[name])
    for name in "aaabbc":
        serve(cache, [*PROMPTS[name], 5])
    for name in "c":
        serve(cache, PROMPTS[name])
    assert order_of_leaving(cache, PROMPTS)[-1] == "a"


def test_superseded_first_takes_what_a_later_turn_replaced_and_then_the_least_recently_used():
    cache = PrefixCache(20, page_size=2, policy="superseded-first")
    for name in "abc":
        serve(cache, PROMPTS[name])
    cache.supersede(PROMPTS["b"], 0)
    assert order_of_leaving(cache, PROMPTS) == ["b", "a", "c"]
    for name in "abc":
        serve(cache, PROMPTS[name])
    cache.supersede(PROMPTS["b"], 0)
    serve(cache, [*PROMPTS["b"], 5])
    assert order_of_leaving(cache, PROMPTS) == ["a", "c", "b"], "a hit makes it current again"


def test_a_rolled_back_turn_goes_before_the_branch_that_replaced_it_and_before_older_ones():
    for policy, goes_first in (("superseded-first", "dropped"), ("lru", "older")):
        cache = PrefixCache(20, page_size=2, policy=policy)
        prompts = {"older": [7, 7], "kept": [1, 1, 2, 2], "dropped": [1, 1, 3, 3]}
        for tokens in prompts.values():
            serve(cache, tokens)
        cache.supersede(prompts["dropped"], 2)
        assert order_of_leaving(cache, prompts)[0] == goes_first


def test_first_in_first_out_and_depth_first_follow_from_one_method():
    cache = PrefixCache(10, page_size=2, policy=FirstInFirstOut())
    for name in "abcaab":
        serve(cache, PROMPTS[name])
    assert order_of_leaving(cache, PROMPTS) == ["a", "b", "c"]
    cache = PrefixCache(10, page_size=2, policy=DeepestFirst())
    prompts = {"short": [1, 1], "deep": [2, 2, 3, 3, 4, 4]}
    serve(cache, prompts["deep"][:2])
    serve(cache, prompts["deep"][:4])
    serve(cache, prompts["deep"])
    serve(cache, prompts["short"])
    assert order_of_leaving(cache, prompts) == ["deep", "short"]


def test_a_policy_with_a_state_of_its_own_may_spare_who_was_hit():
    cache = PrefixCache(10, page_size=2, policy=SecondChance())
    for name in "abc":
        serve(cache, PROMPTS[name])
    serve(cache, [*PROMPTS["a"], 5])
    order = order_of_leaving(cache, {name: PROMPTS[name] for name in "bc"})
    assert order == ["b", "c"]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5)), min_size=1, max_size=10
    )
)
def test_any_policy_is_exact(policy, calls):
    engine = FakeEngine(9, page_size=2, max_num_batched_tokens=8, max_num_seqs=3, policy=made(policy))
    for index, (prompt, max_tokens) in enumerate(calls):
        engine.submit(prompt, max_tokens)
        if index % 2:
            engine.step()
            engine.cache.supersede(prompt, len(prompt) // 2)
    engine.run()
    engine.check_outputs()
    for request_id, error in engine.refused.items():
        assert not engine.fits_alone(engine.requests[request_id].prompt_tokens, engine.max_tokens[request_id]), error


def test_the_known_names_make_their_policies_and_an_object_is_taken_as_it_is():
    assert known_policies() == ("lfu", "lru", "superseded-first")
    assert [type(make_policy(name)) for name in known_policies()] == [LFU, LRU, SupersededFirst]
    policy = DeepestFirst()
    assert make_policy(policy) is policy


def test_an_unknown_name_lists_the_known_ones_and_an_object_without_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"'mru'; known: lfu, lru, superseded-first"):
        make_policy("mru")
    with pytest.raises(ConfigError, match="object with key"):
        make_policy(object())
    with pytest.raises(ConfigError):
        PrefixCache(10, policy="mru")
