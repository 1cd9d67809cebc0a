from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_radix import Event, Node, RadixTree, pack
from support.radix_oracle import Pair


class Listening:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_of_a_chain_of_three_pages_the_last_goes_first():
    for lengths in ((12,), (4, 8, 12)):
        tree = RadixTree(page_size=4)
        for length in lengths:
            tree.insert(list(range(length)), list(range(1, 1 + length // 4)))
        assert [tree.evict(1) for _ in range(4)] == [[3], [2], [1], []]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20).map(tuple), max_size=12),
    st.lists(st.integers(0, 4)),
)
def test_a_parent_outlives_its_children_under_any_eviction_order(prompts, evictions):
    for policy in (None, Highest(), Lowest()):
        pair = Pair(RadixTree(page_size=2, policy=policy), num_pages=400)
        for prompt in prompts:
            pair.insert(b"", prompt)
        for num_pages in evictions:
            pair.evict(num_pages)
            pair.compare()


class Highest:
    """The deepest leaf first."""

    def key(self, node: Node) -> tuple[int]:
        return (-node.depth,)


class Lowest:
    def key(self, node: Node) -> tuple[int]:
        return (node.depth,)


def test_eviction_takes_no_more_than_needed_and_leaves_the_shortened_leaf_usable():
    tree = RadixTree(page_size=4)
    tree.insert(list(range(40)), list(range(1, 11)))
    assert sorted(tree.evict(3)) == [8, 9, 10]
    assert tree.match(list(range(40))).num_tokens == 28
    assert tree.evict(0) == []
    tree.check()


def test_the_least_recently_used_leaf_goes_first_and_a_mere_hold_is_no_use():
    tree = RadixTree(page_size=1)
    for token in (1, 2, 3):
        tree.insert([token], [token])
    lease = tree.lock(tree.match([1]))
    tree.record_hit(other := tree.lock(tree.match([3])))
    tree.unlock(other)
    tree.touch(lease)
    tree.unlock(lease)
    # A hold without a hit, and without use, makes nothing younger.
    tree.unlock(tree.lock(tree.match([2])))
    assert tree.evict(3) == [2, 3, 1]


def test_the_key_is_frozen_while_a_leaf_is_filed():
    class Fickle:
        """Answers differently each time, as a policy with a clock of its own does."""

        calls = 0

        def key(self, node: Node) -> tuple[float, ...]:
            Fickle.calls += 1
            return (random.Random(Fickle.calls).random(),)

    tree = RadixTree(page_size=1, policy=Fickle())
    for token in range(1, 60):
        tree.insert([token], [token])
        tree.check()
    for token in range(1, 60, 2):
        tree.unlock(tree.lock(tree.match([token])))
        tree.check()
    assert sorted(tree.evict(100)) == list(range(1, 60))


def test_a_policy_may_spare_a_victim_once_but_cannot_stop_an_eviction():
    class SparesAll:
        def __init__(self) -> None:
            self.asked: list[int] = []
            self.evicted: list[int] = []

        def key(self, node: Node) -> tuple[int]:
            return (node.priority,)

        def spare(self, node: Node) -> bool:
            self.asked.append(node.page_ids[0])
            node.priority += 1
            return True

        def on_evict(self, node: Node) -> None:
            self.evicted.append(node.page_ids[0])

    policy = SparesAll()
    tree = RadixTree(page_size=1, policy=policy)
    for token in (1, 2, 3):
        tree.insert([token], [token])
    assert tree.evict(2) == [1, 2]
    assert policy.asked == [1, 2, 3]
    assert policy.evicted == [1, 2]
    tree.check()


def test_a_policy_hears_of_new_nodes_and_of_each_node_on_a_hit_path():
    class Notes:
        def __init__(self) -> None:
            self.notes: list[tuple[str, int]] = []

        def key(self, node: Node) -> tuple[int]:
            return (node.hits,)

        def on_insert(self, node: Node) -> None:
            self.notes.append(("insert", node.start))

        def on_hit(self, node: Node) -> None:
            self.notes.append(("hit", node.start))

    policy = Notes()
    tree = RadixTree(page_size=2, policy=policy)
    tree.insert([1, 2, 3, 4], [1, 2])
    tree.insert([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4])
    tree.record_hit(tree.lock(tree.match([1, 2, 3, 4, 5, 6])))
    assert policy.notes == [("insert", 0), ("insert", 4), ("insert", 6), ("hit", 4), ("hit", 0)]


def test_superseded_nodes_are_refiled_and_a_hit_clears_the_flag():
    class SupersededFirst:
        def key(self, node: Node) -> tuple[bool, int]:
            return (not node.superseded, node.last_access)

    tree = RadixTree(page_size=2, policy=SupersededFirst())
    tree.insert([9, 9], [9])
    tree.insert([1, 1], [1])
    tree.insert([1, 1, 2, 2, 3], [1, 2, 3])
    assert tree.supersede([1, 1, 2, 2, 3], 2) == 2
    assert tree.supersede([1, 1, 2, 2, 3], 2) == 0
    tree.check()
    assert tree.evict(1) == [3]
    lease = tree.lock(tree.match([1, 1, 2, 2]))
    assert lease.superseded, "a hold alone is no hit"
    tree.record_hit(lease)
    tree.unlock(lease)
    assert not lease.superseded
    assert tree.evict(1) == [9]


def test_supersede_leaves_what_straddles_the_start_and_what_goes_on_for_others():
    tree = RadixTree(page_size=2)
    tree.insert([1, 1, 2, 2, 3, 3], [1, 2, 3])
    assert tree.supersede([1, 1, 2, 2, 3, 3], 2) == 0
    assert tree.supersede([1, 1, 2, 2], 0) == 0
    assert tree.supersede([1, 1, 2, 2, 3, 3], 0) == 3


@given(st.data())
def test_the_events_alone_rebuild_what_the_tree_holds(data):
    """Replay stored and evicted runs into a dict from page to (tokens, hash): at the end it is the tree."""
    listener = Listening()
    pair = Pair(RadixTree(page_size=2, listener=listener), num_pages=30)
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)))
        action = data.draw(st.sampled_from(["insert", "evict", "lock", "extend", "release"]))
        if action == "insert":
            pair.insert(b"", tokens)
        elif action == "evict":
            pair.evict(data.draw(st.integers(0, 3)))
        elif action == "lock":
            pair.lock(b"", tokens)
        elif action == "extend" and pair.holds:
            pair.extend(pair.holds[-1], pair.cut(tokens)[0])
        elif action == "release" and pair.holds:
            pair.release(pair.holds[0])
    resident: dict[int, tuple[int, bytes, bytes]] = {}
    for event in listener.events:
        parent_hash = event.parent_hash
        for index, (page_id, page_hash) in enumerate(zip(event.page_ids, event.page_hashes, strict=True)):
            page = event.token_ids[8 * index : 8 * index + 8]
            assert page_hash == pair.tree.chain_hash(parent_hash, page)
            parent_hash = page_hash
            if event.kind == "stored":
                assert page_id not in resident
                resident[page_id] = (event.start + 2 * index, page, page_hash)
            else:
                assert resident[page_id] == (event.start + 2 * index, page, page_hash)
            if event.kind == "evicted":
                del resident[page_id]
    assert resident == {
        page_id: (
            node.start + 2 * index,
            bytes(node.tokens[8 * index : 8 * index + 8]),
            node.page_hashes[index],
        )
        for node in pair.nodes()
        for index, page_id in enumerate(node.page_ids)
    }


def test_events_come_as_runs_with_their_cause_owner_and_reach():
    listener = Listening()
    tree = RadixTree(page_size=2, listener=listener)
    tree.insert([1, 1, 2, 2, 3], [1, 2, 3], namespace=b"n", owner="maker")
    match = tree.match([1, 1, 2, 2, 3, 4], namespace=b"n")
    lease = tree.lock(match)
    source = tree.lock_page(match.partial)
    tree.record_hit(lease, match.partial, owner="reader")
    done = tree.extend(lease, [3, 4], [4], owner="reader")
    tree.unlock_page(source)
    tree.unlock(done.node)
    tree.record_hit(head := tree.lock(tree.match([1, 1], namespace=b"n")))
    tree.unlock(head)
    tree.evict(2)
    told = [
        (event.kind, event.cause, event.start, event.token_ids, event.page_ids, event.owner)
        for event in listener.events
    ]
    assert told == [
        ("stored", "insert", 0, pack([1, 1, 2, 2]), (1, 2), "maker"),
        ("stored", "tail", 4, pack([3]), (3,), "maker"),
        ("hit", "lock", 0, pack([1, 1, 2, 2]), (1, 2), "reader"),
        ("hit", "copy", 4, pack([3]), (3,), "reader"),
        ("stored", "extend", 4, pack([3, 4]), (4,), "reader"),
        ("evicted", "covered", 4, pack([3]), (3,), None),
        ("split", "lock", 0, pack([1, 1]), (1,), None),
        ("hit", "lock", 0, pack([1, 1]), (1,), None),
        ("evicted", "pressure", 4, pack([3, 4]), (4,), None),
        ("evicted", "pressure", 2, pack([2, 2]), (2,), None),
    ]
    assert {event.namespace for event in listener.events} == {b"n"}
    assert listener.events[-1].reach == 6


@pytest.mark.parametrize("damage", ["lock_ref", "reach", "page_ids", "page_hashes", "key"])
def test_check_finds_damage(damage):
    """A check that cannot fail would prove nothing."""
    tree = RadixTree(page_size=2)
    tree.insert([1, 1, 2, 2], [1, 2])
    tree.insert([1, 1, 3, 3], [1, 3])
    tree.check()
    node = tree.match([1, 1, 3, 3]).node
    setattr(
        node,
        damage,
        {"lock_ref": 1, "reach": 3, "page_ids": node.page_ids * 2, "page_hashes": [b""], "key": None}[damage],
    )
    with pytest.raises(Exception, match=r"."):
        tree.check()


def test_a_listener_that_names_its_kinds_hears_these_only():
    class HearsEvictions(Listening):
        kinds = frozenset({"evicted"})

    listener = HearsEvictions()
    tree = RadixTree(page_size=2, listener=listener)
    tree.insert([1, 1, 2, 2, 3], [1, 2, 3])
    match = tree.match([1, 1, 2, 2, 3])
    tree.lock_page(match.partial)
    tree.unlock(tree.lock(match))
    assert listener.events == []
    tree.insert([4], [4])
    tree.evict(1)
    assert [event.kind for event in listener.events] == ["evicted"]
