from __future__ import annotations

import pytest

from agentkv_radix import HoldError, RadixTree


def lease_on(tree: RadixTree, tokens: list[int]):
    return tree.lock(tree.match(tokens))


def test_a_long_answer_is_one_node():
    tree = RadixTree(page_size=4)
    node = lease_on(tree, [])
    for index in range(200):
        extended = tree.extend(node, [index] * 4, [index + 1])
        node = extended.node
        assert list(extended.page_ids) == [index + 1]
    assert (tree.num_nodes, node.end, node.lock_ref, node.num_pages) == (1, 800, 1, 200)
    tree.check()
    tree.unlock(node)
    assert tree.evict(1) == [200]


def test_a_node_that_another_call_superseded_is_in_use_again_when_its_own_call_lengthens_it():
    tree = RadixTree(page_size=4)
    node = tree.extend(lease_on(tree, []), [1] * 4, [1]).node
    assert tree.supersede([1] * 4, 0) == 1
    assert tree.extend(node, [2] * 4, [2]).node is node
    assert not node.superseded
    tree.check()


def test_a_node_that_a_finished_call_made_is_never_lengthened_by_another():
    tree = RadixTree(page_size=4)
    tree.unlock(tree.extend(lease_on(tree, []), [1] * 4, [1]).node)
    node = lease_on(tree, [1] * 4)
    child = tree.extend(node, [2] * 4, [2]).node
    assert child.parent is node
    assert (node.end, child.end, tree.num_nodes) == (4, 8, 2)
    tree.check()


def test_a_node_that_a_second_call_holds_is_not_lengthened():
    tree = RadixTree(page_size=4)
    first = tree.extend(lease_on(tree, []), [1] * 4, [1]).node
    second = lease_on(tree, [1] * 4)
    assert second is first
    grown = tree.extend(first, [2] * 4, [2]).node
    assert (second.end, grown.parent, second.lock_ref, grown.lock_ref) == (4, second, 2, 1)
    tree.unlock(grown)
    assert tree.evict(10) == [2]
    tree.unlock(second)
    tree.check()


def test_who_stays_behind_when_the_maker_leaves_does_not_lengthen_the_node():
    tree = RadixTree(page_size=4)
    made = tree.extend(lease_on(tree, []), [1] * 4, [1]).node
    other = lease_on(tree, [1] * 4)
    tree.unlock(made)
    assert tree.extend(other, [2] * 4, [2]).node.parent is other
    tree.check()


def test_a_pinned_node_or_one_with_a_tail_is_not_lengthened():
    tree = RadixTree(page_size=4)
    node = tree.extend(lease_on(tree, []), [1] * 4, [1]).node
    pinned = tree.pin(tree.match([1] * 4))
    child = tree.extend(node, [2] * 4, [2]).node
    assert (child.parent, pinned.end) == (node, 4)
    tree.add_tail(child, [3], 3)
    grandchild = tree.extend(child, [4] * 4, [4]).node
    assert grandchild.parent is child
    tree.check()


def test_a_commit_takes_resident_pages_and_leaves_the_callers_own_to_it():
    tree = RadixTree(page_size=4)
    tree.insert([1] * 4 + [2] * 4 + [3] * 4, [1, 2, 3])
    node = lease_on(tree, [1] * 4)
    extended = tree.extend(node, [2] * 4 + [5] * 4, [8, 9])
    assert list(extended.page_ids) == [2, 9]
    assert extended.duplicates == [8]
    assert extended.node.end == 12
    assert tree.evict(10) == [3]
    tree.check()


def test_a_commit_that_ends_inside_a_resident_edge_splits_it():
    tree = RadixTree(page_size=4)
    tree.insert([1] * 4 + [2] * 4 + [3] * 4, [1, 2, 3])
    extended = tree.extend(lease_on(tree, []), [1] * 4 + [2] * 4, [8, 9])
    assert (extended.node.end, list(extended.page_ids), extended.duplicates) == (8, [1, 2], [8, 9])
    tree.unlock(extended.node)
    assert tree.num_locked_pages == 0
    tree.check()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_identical_commits_keep_one_copy_in_whatever_order_they_are_released(order):
    tree = RadixTree(page_size=4)
    nodes = [lease_on(tree, []) for _ in range(3)]
    results = [tree.extend(node, [1] * 4 + [2] * 4, [2 * index + 1, 2 * index + 2]) for index, node in enumerate(nodes)]
    assert [result.duplicates for result in results] == [[], [3, 4], [5, 6]]
    for done, index in enumerate(order):
        assert tree.evict(10) == []
        assert list(tree.match([1] * 4 + [2] * 4).page_ids) == [1, 2]
        tree.unlock(results[index].node)
        assert tree.num_locked_pages == (0 if done == 2 else 2)
    assert tree.num_pages == 2
    tree.check()


def test_a_tail_equal_to_or_a_prefix_of_what_is_there_is_refused():
    tree = RadixTree(page_size=4)
    tree.insert([1, 2, 3], [1])
    root = lease_on(tree, [])
    for tail in ([1], [1, 2], [1, 2, 3]):
        refused = tree.add_tail(root, tail, 9)
        assert not refused
        assert refused.released == []
    tree.insert([5, 6, 7, 8], [2])
    assert not tree.add_tail(root, [5, 6], 9)
    assert tree.num_pages == 2
    tree.check()


def test_a_longer_tail_takes_the_place_of_a_shorter_one():
    tree = RadixTree(page_size=4)
    root = lease_on(tree, [])
    assert tree.add_tail(root, [1], 1).released == []
    assert tree.add_tail(root, [1, 2], 2).released == [1]
    assert tree.extend(root, [1, 2, 3, 4], [3]).released == [2]
    assert tree.num_pages == 1
    tree.check()


def test_a_held_tail_that_is_covered_stays_until_its_last_hold_ends():
    tree = RadixTree(page_size=4)
    tree.insert([1, 2], [1])
    partial = tree.match([1, 2]).partial
    holds = [tree.lock_page(partial), tree.lock_page(partial)]
    assert tree.insert([1, 2, 3, 4], [2]).released == []
    assert tree.num_pages == 2
    assert tree.unlock_page(holds[0]) == []
    assert tree.unlock_page(holds[1]) == [1]
    assert tree.num_pages == 1
    tree.check()


def test_a_held_tail_whose_cover_was_evicted_is_an_ordinary_tail_again():
    tree = RadixTree(page_size=4)
    tree.insert([1, 2], [1])
    source = tree.lock_page(tree.match([1, 2]).partial)
    tree.insert([1, 2, 3, 4], [2])
    assert tree.evict(10) == [2]
    assert tree.unlock_page(source) == []
    assert tree.match([1, 2]).partial.page_id == 1
    assert tree.evict(10) == [1]
    tree.check()


def test_insert_reports_the_page_of_a_refused_tail_as_a_duplicate():
    tree = RadixTree(page_size=4)
    tree.insert([1, 2, 3, 4, 5, 6, 7], [1, 2])
    again = tree.insert([1, 2, 3, 4, 5, 6], [8, 9])
    assert list(again.page_ids) == [1, 2]
    assert again.duplicates == [8, 9]
    same = tree.insert([1, 2, 3, 4, 5, 6, 7], [1, 2])
    assert same.duplicates == []


def test_with_pages_of_one_token_there_are_no_tails_and_no_partial_hits():
    tree = RadixTree(page_size=1)
    tree.insert([1, 2, 3], [1, 2, 3])
    match = tree.match([1, 2, 9])
    assert (match.num_tokens, match.partial) == (2, None)
    with pytest.raises(ValueError, match="whole pages"):
        tree.add_tail(lease_on(tree, [1]), [2], 9)


def test_misuse_of_commits_is_refused_and_changes_nothing():
    tree = RadixTree(page_size=4)
    node = lease_on(tree, [])
    with pytest.raises(ValueError, match="whole pages of 4 tokens, not 3"):
        tree.extend(node, [1, 2, 3], [1])
    with pytest.raises(ValueError, match="take 2 pages of 4, and 1"):
        tree.extend(node, [1] * 8, [1])
    with pytest.raises(ValueError, match="page 0"):
        tree.extend(node, [1] * 4, [0])
    with pytest.raises(ValueError, match="1 to 3 tokens"):
        tree.add_tail(node, [1] * 4, 1)
    tree.insert([1, 2], [1])
    tail = tree.lock_page(tree.match([1, 2]).partial)
    with pytest.raises(ValueError, match="nothing can follow"):
        tree.extend(tail, [1] * 4, [2])
    tree.unlock(node)
    tree.unlock_page(tail)
    with pytest.raises(HoldError):
        tree.extend(node, [1] * 4, [1])
    assert tree.num_pages == 1
    tree.check()


def test_an_empty_commit_or_insertion_changes_nothing():
    tree = RadixTree(page_size=4)
    assert tree.insert([], []).duplicates == []
    assert tree.namespaces == ()
    node = lease_on(tree, [])
    assert tree.extend(node, [], []).node is node
    assert tree.num_pages == 0
