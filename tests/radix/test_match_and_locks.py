from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_radix import HoldError, RadixTree, StaleMatch


def stored(length: int, page_size: int = 4, namespace: bytes = b"") -> RadixTree:
    """A tree that holds the tokens 0, 1, 2, ... on the pages 1, 2, 3, ..."""
    tree = RadixTree(page_size=page_size)
    tree.insert(list(range(length)), list(range(1, 1 + -(-length // page_size))), namespace=namespace)
    return tree


@given(st.sampled_from([1, 2, 4]), st.data())
def test_page_arithmetic_holds_for_every_length_up_to_four_pages(page_size, data):
    length = data.draw(st.integers(0, 4 * page_size))
    asked = data.draw(st.integers(0, 4 * page_size))
    max_tokens = data.draw(st.none() | st.integers(0, 4 * page_size))
    tree = stored(length, page_size)
    match = tree.match(list(range(asked)), max_tokens=max_tokens)
    common = min(length, asked, asked if max_tokens is None else max_tokens)
    assert match.num_tokens == common - common % page_size
    assert list(match.page_ids) == list(range(1, 1 + common // page_size))
    assert (match.partial.num_tokens if match.partial else 0) == common % page_size
    assert tree.num_pages == -(-length // page_size)


def test_a_match_changes_nothing_not_even_the_namespaces():
    tree = stored(10)
    node = tree.match(list(range(8))).node
    before = (tree.num_nodes, node.last_access, node.hits)
    tree.match([0, 1, 2, 3, 9, 9, 9, 9])
    tree.match([1], namespace=b"other")
    assert (tree.num_nodes, node.last_access, node.hits) == before
    assert tree.namespaces == (b"",)


def test_namespaces_share_nothing_and_go_with_their_last_page():
    tree = stored(8, namespace=b"a")
    tree.insert(list(range(8)), [11, 12], namespace=b"b")
    assert tree.match(list(range(8))).num_tokens == 0
    assert list(tree.match(list(range(8)), namespace=b"b").page_ids) == [11, 12]
    assert tree.namespaces == (b"a", b"b")
    tree.evict(2)
    assert tree.namespaces == (b"b",)
    tree.check()


def test_partial_is_the_page_with_the_longest_common_part_among_many_siblings():
    tree = RadixTree(page_size=4)
    for page_id, page in enumerate(([5, 5, 5, 5], [5, 6, 7, 8], [5, 6, 1], [9, 9, 9, 9], [5, 6, 7]), start=1):
        tree.insert(page, [page_id])
    match = tree.match([5, 6, 7, 9, 1])
    assert (match.partial.page_id, match.partial.num_tokens, match.partial.start) == (2, 3, 0)
    assert tree.match([8]).partial is None


def test_partial_inside_an_edge_is_the_next_page_of_that_edge():
    match = stored(16).match([0, 1, 2, 3, 4, 5, 9, 9])
    assert (match.num_tokens, match.partial.page_id, match.partial.num_tokens) == (4, 2, 2)


def test_reach_tells_how_far_the_paths_through_a_node_ever_went():
    tree = stored(40)
    assert tree.match([0, 1, 2, 3, 9]).node.reach == 40
    node = tree.lock(tree.match(list(range(8))))
    assert tree.match([*list(range(8)), 9]).node.reach == 40
    tree.evict(100)
    assert (tree.num_pages, node.reach) == (2, 40)
    tree.extend(node, [7] * 40, range(20, 30))
    assert node.reach == 48


def test_lock_splits_where_the_match_ends_and_the_lower_half_keeps_its_identity():
    tree = stored(16)
    whole = tree.match(list(range(16))).node
    upper = tree.lock(tree.match([0, 1, 2, 3, 4, 5, 6, 7, 9]))
    tree.record_hit(upper, owner="a")
    assert (upper.end, list(upper.page_ids), upper.lock_ref) == (8, [1, 2], 1)
    assert whole.parent is upper
    assert (whole.start, whole.depth, list(whole.page_ids), whole.lock_ref) == (8, 2, [3, 4], 0)
    assert (upper.hits, whole.hits, upper.owners) == (1, 0, ("a",))
    tree.check()


def test_lock_of_nothing_holds_the_root_and_keeps_the_namespace():
    tree = RadixTree()
    root = tree.lock(tree.match([1, 2, 3], namespace=b"new"))
    assert (root.parent, root.end, tree.namespaces) == (None, 0, (b"new",))
    tree.check()
    assert tree.unlock(root) == []
    assert tree.namespaces == ()


def test_owners_are_at_most_eight_names_and_then_many():
    tree = stored(4)
    for index in range(12):
        lease = tree.lock(tree.match([0, 1, 2, 3]))
        tree.record_hit(lease, owner=f"agent {index % 11}")
        tree.unlock(lease)
    node = tree.match([0, 1, 2, 3]).node
    assert node.owners == (*(f"agent {index}" for index in range(8)), "many")
    assert node.hits == 12


def test_match_then_lock_survives_evicting_everything_and_the_last_page_too():
    tree = stored(19)
    node = tree.lock(tree.match(list(range(16))))
    assert tree.evict(100) == [5]
    assert list(tree.match(list(range(16))).page_ids) == [1, 2, 3, 4]
    tree.unlock(node)
    assert sorted(tree.evict(100)) == [1, 2, 3, 4]
    tree.check()


def test_a_match_whose_pages_were_evicted_is_refused_by_lock_pin_and_page_ids():
    tree = stored(16)
    match = tree.match(list(range(16)))
    tree.evict(1)
    for use in (tree.lock, tree.pin, tree.page_hash, lambda stale: stale.page_ids):
        with pytest.raises(StaleMatch, match="match again"):
            use(match)
    assert (tree.num_locked_pages, tree.num_pinned_pages) == (0, 0)
    tree.check()


def test_a_match_is_refused_after_its_pages_left_and_others_took_their_place():
    tree = stored(8)
    match = tree.match(list(range(8)))
    tree.evict(2)
    tree.insert(list(range(8)), [7, 8])
    with pytest.raises(StaleMatch):
        tree.lock(match)


def test_a_match_outlives_splits_insertions_and_evictions_that_left_its_pages():
    tree = stored(24)
    match = tree.match(list(range(12)))
    tree.lock(tree.match(list(range(20))))
    tree.lock(tree.match(list(range(4))))
    tree.insert([0, 1, 2, 3, 9, 9, 9, 9], [1, 50])
    tree.evict(2)
    node = tree.lock(match)
    assert node.end == 12
    assert list(match.page_ids) == [1, 2, 3]
    tree.check()


def test_a_match_is_refused_where_a_running_call_grew_over_the_place_of_its_pages():
    tree = RadixTree(page_size=4)
    growing = tree.extend(tree.lock(tree.match([])), [1] * 4, [1]).node
    tree.insert([1] * 4 + [2] * 4, [1, 2])
    match = tree.match([1] * 4 + [2] * 4)
    assert tree.evict(1) == [2]
    grown = tree.extend(growing, [3] * 4, [3]).node
    assert grown is growing
    with pytest.raises(StaleMatch):
        tree.lock(match)
    tree.check()


def test_releasing_more_often_than_holding_is_refused():
    tree = stored(4)
    node = tree.lock(tree.match([0, 1, 2, 3]))
    with pytest.raises(HoldError, match="pin"):
        tree.unpin(node)
    tree.unlock(node)
    with pytest.raises(HoldError, match="lock"):
        tree.unlock(node)
    tree.check()


@pytest.mark.parametrize("split_at", [4, 8, 12])
def test_a_pinned_node_that_is_split_keeps_its_pages_until_it_is_unpinned(split_at):
    tree = stored(16)
    pinned = tree.pin(tree.match(list(range(16))))
    tree.insert([*range(split_at), 9, 9, 9, 9], [*range(1, 1 + split_at // 4), 50])
    assert tree.evict(100) == [50]
    assert list(tree.match(list(range(16))).page_ids) == [1, 2, 3, 4]
    assert (tree.num_pinned_pages, tree.num_locked_pages, tree.num_evictable_pages) == (4, 0, 0)
    tree.unpin(pinned)
    assert sorted(tree.evict(100)) == [1, 2, 3, 4]


def test_the_source_page_of_a_partial_hit_stays_until_it_was_copied_even_across_a_split():
    tree = stored(16)
    match = tree.match([0, 1, 2, 3, 4, 5, 9])
    lease = tree.lock(match)
    source = tree.lock_page(match.partial)
    tree.lock(tree.match(list(range(12))))
    tree.unlock(lease)
    tree.evict(100)
    assert 2 in tree.match(list(range(12))).page_ids
    assert tree.unlock_page(source) == []
    tree.check()


def test_a_partial_hit_whose_page_left_is_refused():
    tree = stored(6)
    match = tree.match(list(range(6)))
    tree.evict(1)
    with pytest.raises(StaleMatch):
        tree.lock_page(match.partial)
    assert tree.num_locked_pages == 0


@pytest.mark.parametrize("max_tokens", [-1])
def test_a_negative_limit_is_refused(max_tokens):
    with pytest.raises(ValueError, match="max_tokens"):
        stored(4).match([1], max_tokens=max_tokens)
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(page_size=0)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8), st.data())
def test_the_pages_that_a_release_would_free_are_those_that_it_frees(prompts, data):
    tree = RadixTree(page_size=2)
    held = []
    for number, prompt in enumerate(prompts):
        tree.insert(prompt, range(10 * number + 1, 10 * number + 1 + -(-len(prompt) // 2)))
        held.append(tree.lock(tree.match(prompt)))
    node = data.draw(st.sampled_from(held))
    told, before = tree.num_pages_freed_by(node), tree.num_evictable_pages
    tree.unlock(node)
    assert tree.num_evictable_pages - before == told
