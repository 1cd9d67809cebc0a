"""Why each prompt token was computed: every cause by an example that shows where it begins and ends."""

from __future__ import annotations

import pytest

from agentkv.cache import PrefixCache
from agentkv.errors import PoolFull
from support.cache_oracle import CacheUnderTest

P = 4
CAUSES = ("never_seen", "diverged", "evicted", "last_token", "cache_disabled")


def run(cache: PrefixCache, tokens: list[int], *, namespace: bytes = b"", reuse: bool = True) -> dict[str, int]:
    """Compute a prompt and keep all of it; tokens by cause, those from the cache beside them, zeros left out."""
    lease = cache.lookup(tokens, namespace, reuse=reuse)
    cache.allocate(lease, len(tokens))
    cache.commit(lease, tokens[lease.num_tokens :])
    cache.release(lease, keep_partial=True)
    assert sum(lease.misses.values()) == len(tokens) - lease.num_cached_tokens
    told = {"cached": lease.num_cached_tokens, **lease.misses}
    return {cause: count for cause, count in told.items() if count}


def ask(cache: PrefixCache, tokens: list[int], **options) -> dict[str, int]:
    """What a look-up would say now, without computing anything."""
    lease = cache.lookup(tokens, **options)
    cache.release(lease, keep_partial=False)
    told = {"cached": lease.num_cached_tokens, **lease.misses}
    return {cause: count for cause, count in told.items() if count}


def evict(cache: PrefixCache, num_pages: int) -> None:
    """Make room for one lease that wants everything that is free and so many pages more."""
    lease = cache.private_lease(1)
    cache.allocate(lease, (cache.pool.num_free + num_pages) * cache.page_size)
    cache.release(lease, keep_partial=False)


def count(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_what_nobody_has_sent_is_never_seen():
    assert run(PrefixCache(50, page_size=P), count(10)) == {"never_seen": 10}


@pytest.mark.parametrize("length", range(1, 4 * P + 1))
def test_a_prompt_sent_again_computes_its_last_token_only_whatever_its_length(length):
    """Lengths 0..4P around the page boundaries: a full last page is not an empty one."""
    cache = PrefixCache(50, page_size=P)
    assert run(cache, count(length)) == {"never_seen": length}
    pages = cache.tree.num_pages
    assert pages == -(-length // P)
    for _ in range(2):
        again = run(cache, count(length))
        assert again == {"cached": length - 1, "last_token": 1} if length > 1 else {"last_token": 1}
        assert cache.tree.num_pages == pages, "a page is stored twice"
    cache.check_idle()


@pytest.mark.parametrize("shared", range(3 * P))
@pytest.mark.parametrize("cached_length", range(1, 3 * P))
def test_the_hit_is_all_that_is_shared_down_to_the_token(cached_length, shared):
    cache = PrefixCache(50, page_size=P)
    run(cache, count(cached_length))
    shared = min(shared, cached_length)
    told = run(cache, count(shared) + count(5, first=100))
    assert told.get("cached", 0) == shared
    diverged = min(shared + 5, cached_length) - shared if shared >= P else 0
    assert told.get("diverged", 0) == diverged
    assert told.get("never_seen", 0) == 5 - diverged


def test_a_prompt_that_leaves_a_longer_path_diverged_as_far_as_that_path_goes():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(20))
    assert ask(cache, count(10) + count(30, first=100)) == {"cached": 10, "diverged": 10, "never_seen": 20}
    assert ask(cache, count(10) + count(3, first=100)) == {"cached": 10, "diverged": 3}
    # Without a page in common there is no path to leave.
    assert ask(cache, count(3) + count(5, first=100)) == {"cached": 3, "never_seen": 5}
    # What follows the end of a path leaves nothing.
    assert ask(cache, count(20) + count(5, first=100)) == {"cached": 20, "never_seen": 5}


def test_of_several_paths_the_longest_that_is_left_counts():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(8) + count(20, first=100))
    run(cache, count(8) + count(4, first=200))
    assert ask(cache, count(8) + count(40, first=300)) == {"cached": 8, "diverged": 20, "never_seen": 20}
    # This one went along the short path to its end, and left the long one before the end of the match.
    assert ask(cache, count(8) + count(4, first=200) + [300]) == {"cached": 12, "never_seen": 1}


def test_what_pressure_took_is_evicted_from_the_end_of_the_hit_on():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(20))
    evict(cache, 2)
    assert ask(cache, count(20)) == {"cached": 12, "evicted": 8}
    assert ask(cache, [*count(20), 100]) == {"cached": 12, "evicted": 8, "never_seen": 1}
    evict(cache, 3)
    assert ask(cache, count(20)) == {"evicted": 20}


@pytest.mark.parametrize("length", range(1, 13))
def test_a_prompt_that_ends_inside_an_evicted_page_was_evicted_whole(length):
    cache = PrefixCache(50, page_size=P)
    run(cache, count(12))
    evict(cache, 3)
    assert ask(cache, count(length)) == {"evicted": length}


@pytest.mark.parametrize("tail", range(1, P))
def test_an_evicted_tail_is_remembered_by_its_tokens(tail):
    cache = PrefixCache(50, page_size=P)
    run(cache, count(8 + tail))
    evict(cache, 1)
    assert ask(cache, count(8 + tail)) == {"cached": 8, "evicted": tail}
    assert ask(cache, [*count(8 + tail), 100]) == {"cached": 8, "evicted": tail, "never_seen": 1}
    if tail > 1:
        assert ask(cache, [*count(8 + tail - 1), 100]) == {"cached": 8, "evicted": tail - 1, "diverged": 1}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_each_of_several_evicted_siblings_is_remembered(order):
    cache = PrefixCache(50, page_size=P)
    for sibling in order:
        run(cache, [*count(4), 10 + sibling, 20, 30, 40])
    evict(cache, 4)
    for sibling in range(3):
        assert ask(cache, [*count(4), 10 + sibling, 20, 30]) == {"evicted": 7}
        assert ask(cache, [*count(4), 10 + sibling, 20, 99]) == {"evicted": 6, "diverged": 1}


def test_a_page_that_came_back_still_tells_of_the_longer_paths_that_it_had():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(40))
    evict(cache, 10)
    assert run(cache, count(4)) == {"evicted": 4}
    assert ask(cache, count(4) + count(50, first=100)) == {"cached": 4, "diverged": 36, "never_seen": 14}
    evict(cache, 1)
    assert ask(cache, count(4) + count(50, first=100)) == {"evicted": 4, "diverged": 36, "never_seen": 14}


def test_without_a_whole_page_in_common_an_evicted_path_is_not_left():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(12))
    evict(cache, 3)
    assert ask(cache, count(3) + count(6, first=100)) == {"evicted": 3, "never_seen": 6}


def test_ghosts_are_bounded_and_the_oldest_is_forgotten():
    cache = PrefixCache(50, page_size=P, ghost_pages=2)
    run(cache, count(12))
    evict(cache, 3)
    assert len(cache.ghosts) == 2
    run(cache, count(8, first=50))
    evict(cache, 2)
    assert len(cache.ghosts) == 2
    assert ask(cache, count(12)) == {"never_seen": 12}
    assert ask(cache, count(8, first=50)) == {"evicted": 8}
    forgetful = PrefixCache(50, page_size=P, ghost_pages=0)
    run(forgetful, count(8))
    evict(forgetful, 2)
    assert ask(forgetful, count(8)) == {"never_seen": 8}


def test_a_ghost_never_makes_a_hit():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(12))
    evict(cache, 3)
    lease = cache.lookup(count(12))
    assert (lease.num_cached_tokens, len(lease.page_ids), lease.copy) == (0, 0, None)


def test_one_tenants_ghosts_explain_nothing_to_another():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(12), namespace=b"a")
    evict(cache, 3)
    assert ask(cache, count(12), namespace=b"b") == {"never_seen": 12}


def test_a_call_that_does_not_read_the_cache_says_so_and_still_feeds_it():
    cache = PrefixCache(50, page_size=P)
    run(cache, count(10))
    assert run(cache, count(10), reuse=False) == {"cache_disabled": 10}
    assert cache.tree.num_pages == 3
    assert run(cache, count(12, first=60), reuse=False) == {"cache_disabled": 12}
    assert ask(cache, count(12, first=60)) == {"cached": 11, "last_token": 1}
    assert cache.private_lease(10).misses["cache_disabled"] == 10


def test_a_hit_given_up_for_want_of_room_was_evicted():
    """Two pages: the source of the copy and its destination do not both fit beside a page of somebody else."""
    cache = PrefixCache(3, page_size=P)
    run(cache, count(7))
    blocked = cache.lookup([*count(6), 90])
    assert (blocked.copy.num_tokens, blocked.num_cached_tokens, blocked.misses["diverged"]) == (2, 6, 1)
    cache.allocate(blocked, 7)
    assert blocked.copy is None
    assert blocked.num_cached_tokens == 4
    assert blocked.misses == dict.fromkeys(CAUSES, 0) | {"evicted": 2, "diverged": 1}
    cache.commit(blocked, [4, 5, 90])
    cache.release(blocked, keep_partial=True)
    cache.check_idle()
    assert ask(cache, [*count(6), 90]) == {"cached": 6, "last_token": 1}


def test_a_wholly_resident_prompt_whose_copy_is_given_up_keeps_its_last_token_apart():
    cache = PrefixCache(3, page_size=P)
    run(cache, count(7))
    lease = cache.lookup(count(7))
    cache.allocate(lease, 7)
    assert lease.misses == dict.fromkeys(CAUSES, 0) | {"evicted": 2, "last_token": 1}


def test_causes_of_a_refused_request_stand_as_they_were():
    cache = PrefixCache(4, page_size=P)
    run(cache, count(8))
    lease = cache.lookup(count(30))
    with pytest.raises(PoolFull):
        cache.allocate(lease, 30)
    cache.release(lease, keep_partial=False)
    assert ask(cache, count(8)) == {"cached": 7, "last_token": 1}


def test_causes_by_history_alone_for_every_pair_of_short_prompts():
    """The witness classifies from what was ever stored; the cache must agree, with eviction in between."""
    prompts = [[(seed >> bit) & 1 for bit in range(length)] for length in (3, 5, 8) for seed in (0, 5, 21, 200)]
    for first in prompts:
        for second in prompts:
            made = CacheUnderTest(20, page_size=2, ghost_pages=100)
            for tokens in (first, second):
                lease = made.lookup(tokens)
                made.allocate(lease, len(tokens))
                made.compute(lease, len(tokens))
                made.release(lease, keep_partial=True)
            evict(made.cache, 2)
            for tokens in prompts:
                made.release(made.lookup(tokens), keep_partial=False)
