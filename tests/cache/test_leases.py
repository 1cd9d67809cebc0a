"""What a lease holds, and that whatever becomes of it everything else stays as it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.cache import Lease, PrefixCache
from agentkv.errors import PoolFull
from agentkv.namespaces import namespace_of
from support.cache_oracle import CacheUnderTest

P = 4


def count(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def serve(made: CacheUnderTest, tokens: list[int], namespace: bytes = b"", *, keep_partial: bool = True) -> Lease:
    lease = made.lookup(tokens, namespace)
    assert made.allocate(lease, len(tokens))
    made.compute(lease, len(tokens))
    made.release(lease, keep_partial=keep_partial)
    made.compare()
    return lease


def counts(cache: PrefixCache) -> tuple[object, ...]:
    tree = cache.tree
    return (replace(cache.counters(), peak=0), tree.num_pages, tree.num_locked_pages, tree.num_evictable_pages)


@pytest.mark.parametrize("length", range(4 * P + 1))
def test_page_arithmetic_holds_for_every_length(length):
    """Pages needed, tokens in the last page, and what the next token needs: a full last page is not an empty one."""
    made = CacheUnderTest(20, page_size=P)
    assert made.cache.pages_for(length) == len(range(0, length, P))
    lease = made.lookup(count(length + 1))
    made.allocate(lease, length)
    assert len(lease.page_ids) == made.cache.pages_for(length)
    if length:
        made.compute(lease, length)
    assert (lease.num_tree_pages, len(lease.open_tokens) // 4) == divmod(length, P)
    made.allocate(lease, length + 1)
    assert len(lease.page_ids) == length // P + 1
    made.compute(lease, length + 1)
    made.release(lease, keep_partial=True)
    made.compare()


def test_a_strict_prefix_of_a_longer_live_sequence_computes_at_most_a_page():
    made = CacheUnderTest(20, page_size=P)
    longer = made.lookup(count(30))
    made.allocate(longer, 30)
    made.compute(longer, 30)
    for length in range(1, 29):
        again = serve(made, count(length))
        assert length - again.num_cached_tokens <= P
    made.release(longer, keep_partial=True)
    assert serve(made, count(30)).num_cached_tokens == 29


@pytest.mark.parametrize("kept", range(P))
@pytest.mark.parametrize("whole", range(3))
def test_a_shared_page_is_taken_by_copy_and_stays_as_it_was(whole, kept):
    made = CacheUnderTest(20, page_size=P)
    serve(made, count(3 * P))
    before = dict(made.witness.resident)
    slots = list(made.memory.slots)
    shared = whole * P + kept
    lease = made.lookup(count(shared) + count(P, first=50))
    assert (lease.copy.num_tokens if lease.copy else 0) == kept
    made.allocate(lease, shared + P)
    made.compute(lease, shared + P)
    assert lease.page_ids[:whole] == type(lease.page_ids)(
        "i", [before[b"", tuple(count(P * (i + 1)))] for i in range(whole)]
    )
    for page_id in before.values():
        assert made.memory.slots[page_id * P : page_id * P + P] == slots[page_id * P : page_id * P + P]
    made.release(lease, keep_partial=True)
    assert before.items() <= made.witness.resident.items()


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    copies=st.integers(2, 8),
    page_size=st.sampled_from([1, 2, 4]),
    order=st.randoms(use_true_random=False),
)
def test_identical_cold_prompts_at_once_keep_one_copy_in_whatever_order_they_end(prompt, copies, page_size, order):
    made = CacheUnderTest(100, page_size=page_size)
    leases = [made.lookup(prompt) for _ in range(copies)]
    for lease in leases:
        made.allocate(lease, len(prompt))
    for lease in order.sample(leases, copies):
        made.compute(lease, len(prompt))
        made.compare()
    for lease in order.sample(leases, copies):
        made.release(lease, keep_partial=order.random() < 0.5 or lease is leases[0])
        made.compare()
        if made.leases:
            assert made.cache.num_resident_tokens([*prompt, 7]) >= len(prompt) // page_size * page_size
    made.cache.check_idle()
    assert made.cache.tree.num_pages == made.cache.pages_for(len(prompt))


def test_room_is_made_or_refused_as_a_whole():
    """Five pages: a request matches two evictable ones and needs four new ones, then three."""
    made = CacheUnderTest(5, page_size=P)
    serve(made, count(2 * P))
    before = counts(made.cache)
    lease = made.lookup(count(6 * P))
    assert lease.num_cached_tokens == 2 * P
    assert not made.allocate(lease, 6 * P)
    made.release(lease, keep_partial=True)
    assert counts(made.cache) == before
    lease = made.lookup(count(5 * P))
    assert made.allocate(lease, 5 * P)
    made.compute(lease, 5 * P)
    made.compare()
    made.release(lease, keep_partial=True)
    assert made.witness.evicted == []


def test_what_was_matched_survives_any_eviction_and_goes_once_it_is_let_go():
    made = CacheUnderTest(8, page_size=P)
    serve(made, count(16))
    lease = made.lookup([*count(16), 99])
    greedy = made.cache.private_lease(1)
    made.cache.allocate(greedy, 4 * P)
    with pytest.raises(PoolFull, match="0 free, 0 evictable"):
        made.cache.allocate(greedy, 5 * P)
    assert made.cache.num_resident_tokens([*count(16), 99]) == 16
    made.release(lease, keep_partial=False)
    made.cache.allocate(greedy, 8 * P)
    assert made.cache.num_resident_tokens([*count(16), 99]) == 0
    made.cache.release(greedy, keep_partial=False)
    made.cache.check_idle()


def test_of_a_chain_released_at_once_the_last_page_goes_first_and_a_gap_hits_nothing():
    made = CacheUnderTest(4, page_size=P)
    serve(made, count(12))
    greedy = made.cache.private_lease(1)
    for left in (2, 1, 0):
        made.cache.allocate(greedy, (4 - left) * P)
        assert [made.cache.num_resident_tokens([*count(length), 99]) for length in (4, 8, 12)] == [
            min(length, left * P) for length in (4, 8, 12)
        ]
    made.cache.release(greedy, keep_partial=False)


def too_large(cache: PrefixCache, lease: Lease) -> None:
    with pytest.raises(PoolFull):
        cache.allocate(lease, 400)


EXITS = {
    "released at once": lambda cache, lease: None,
    "allocated and dropped": lambda cache, lease: cache.allocate(lease, 22),
    "allocated twice": lambda cache, lease: (cache.allocate(lease, 22), cache.allocate(lease, 26)),
    "too large": too_large,
}


@pytest.mark.parametrize("use", list(EXITS.values()), ids=list(EXITS))
@pytest.mark.parametrize("prompt", [count(17), [*count(14), 99, 98], count(3), count(20, first=500)])
@pytest.mark.parametrize("keep_partial", [False, True])
def test_every_way_out_returns_the_counts_to_what_they_were(use, prompt, keep_partial):
    cache = PrefixCache(30, page_size=P)
    lease = cache.lookup(count(16))
    cache.allocate(lease, 16)
    cache.commit(lease, count(16))
    cache.release(lease, keep_partial=True)
    before = counts(cache)
    lease = cache.lookup(prompt)
    use(cache, lease)
    cache.check()
    cache.release(lease, keep_partial=keep_partial)
    cache.release(lease, keep_partial=True)
    cache.check_idle()
    assert counts(cache) == before


@pytest.mark.parametrize("chosen", list(itertools.product([None, "", "x"], repeat=2)))
def test_salts_and_adapters_are_separate_whatever_they_spell(chosen):
    made = CacheUnderTest(60, page_size=P)
    fingerprint = bytes(range(16))
    spaces = {
        pair: namespace_of(fingerprint, adapter=pair[0], salt=pair[1])
        for pair in [*itertools.product([None, "", "x"], repeat=2), ("org_1", "2345"), ("org_12345", "")]
    }
    assert len(set(spaces.values())) == len(spaces)
    serve(made, count(10), spaces[chosen])
    for pair, namespace in spaces.items():
        assert made.cache.num_resident_tokens(count(10), namespace) == (9 if pair == chosen else 0)
    other_model = namespace_of(bytes(16), adapter=chosen[0], salt=chosen[1])
    assert made.cache.num_resident_tokens(count(10), other_model) == 0


@given(st.text(max_size=4), st.text(max_size=4), st.text(max_size=4), st.text(max_size=4))
def test_no_two_choices_of_adapter_and_salt_spell_the_same_namespace(adapter, salt, other_adapter, other_salt):
    same = (adapter, salt) == (other_adapter, other_salt)
    left = namespace_of(bytes(16), adapter=adapter, salt=salt)
    assert (left == namespace_of(bytes(16), adapter=other_adapter, salt=other_salt)) is same
    assert left != namespace_of(bytes(16), adapter=adapter)
    assert left != namespace_of(bytes(16), salt=salt)


def test_two_tenants_with_one_prompt_share_nothing_and_each_hits_its_own():
    made = CacheUnderTest(30, page_size=P)
    first, second = (namespace_of(bytes(16), salt=salt) for salt in ("one", "two"))
    assert serve(made, count(15), first).num_cached_tokens == 0
    assert serve(made, count(15), second).num_cached_tokens == 0
    assert serve(made, count(15), first).num_cached_tokens == 14
    assert serve(made, count(15), second).num_cached_tokens == 14
    assert made.cache.tree.num_pages == 8


def test_several_leases_grow_together_or_nothing_moves():
    """Eight forks of one tail over ten pages: three shared, one the source of all copies, and a page for each fork."""
    made = CacheUnderTest(10, page_size=P)
    serve(made, count(14))
    serve(made, count(12, first=100))
    leases = [made.lookup([*count(14), 50 + child, 51]) for child in range(8)]
    held = counts(made.cache)
    with pytest.raises(PoolFull, match="8 pages needed"):
        made.cache.allocate_together([(lease, 16) for lease in leases])
    assert counts(made.cache) == held
    assert all(lease.copy is not None and not lease.admitted for lease in leases)
    made.release(leases.pop(), keep_partial=False)
    made.cache.allocate_together([(lease, 16) for lease in leases])
    assert [lease.copy for lease in leases] == [None] * 7, "the source can go only when no copy wants it"
    assert all(lease.num_cached_tokens == 12 for lease in leases)
    made.compare()
    for lease in leases:
        made.release(lease, keep_partial=False)
    made.cache.check_idle()


def test_a_look_up_of_nothing_and_of_no_tokens_raises_and_holds_nothing():
    cache = PrefixCache(10, page_size=P)
    for wrong, error in (([], ValueError), ([-1], ValueError), (["a"], TypeError), (b"odd", ValueError)):
        with pytest.raises(error):
            cache.lookup(wrong)
    cache.check_idle()


def test_supersede_touches_no_page_and_a_hit_makes_current_again():
    made = CacheUnderTest(6, page_size=P, policy="superseded-first")
    serve(made, count(8))
    serve(made, count(4, first=100))
    made.cache.supersede(count(4, first=100), 0)
    made.compare()
    serve(made, count(4, first=100))
    serve(made, count(8, first=200))
    serve(made, count(8, first=300))
    assert made.cache.num_resident_tokens([*count(4, first=100), 1]) == 4, "the older one went, as with LRU"


@pytest.mark.parametrize("damage", ["a private page is lost", "a lock is lost", "tokens are miscounted"])
def test_check_finds_damage(damage):
    """A check that cannot fail would prove nothing."""
    cache = PrefixCache(20, page_size=P)
    lease = cache.lookup(count(10))
    cache.allocate(lease, 10)
    cache.commit(lease, count(10))
    cache.check()
    if damage == "a private page is lost":
        lease.page_ids.pop()
    elif damage == "a lock is lost":
        cache.tree.unlock(lease.node)
        cache.tree.evict(1)
    else:
        lease.num_tokens += 1
    with pytest.raises(Exception, match=r"."):
        cache.check()


def test_check_idle_names_who_still_holds_something():
    cache = PrefixCache(20, page_size=P)
    lease = cache.lookup(count(10))
    with pytest.raises(AssertionError, match="1 leases are still held"):
        cache.check_idle()
    cache.release(lease, keep_partial=False)
    cache.check_idle()
