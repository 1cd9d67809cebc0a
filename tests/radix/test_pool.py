from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv_radix import PagePool, PageStateError, PoolExhausted


def test_page_zero_is_never_handed_out_and_all_others_are():
    pool = PagePool(10)
    assert sorted(pool.allocate(9)) == list(range(1, 10))
    with pytest.raises(PoolExhausted):
        pool.allocate(1)


def test_a_run_is_handed_out_whole_where_there_is_one():
    pool = PagePool(20)
    pages = pool.allocate(10)
    pool.free(pages[2:4])
    assert list(pool.allocate(3)) == [11, 12, 13]
    assert list(pool.allocate(2)) == [3, 4]


def test_pages_are_gathered_in_ascending_order_where_no_run_is_long_enough():
    pool = PagePool(10)
    pages = pool.allocate(9)
    pool.free(pages[::2])
    assert list(pool.allocate(5)) == [1, 3, 5, 7, 9]
    pool.check()


def test_allocation_is_all_or_nothing_and_says_what_there_was():
    pool = PagePool(5)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match=r"3 pages .* 2 are free") as caught:
        pool.allocate(3)
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert (pool.num_free, pool.num_private) == (2, 2)
    assert list(pool.allocate(0)) == []


@pytest.mark.parametrize(
    ("operation", "state", "says"),
    [
        ("free", "free", "is free, and must be private"),
        ("free", "tree", "is owned by the tree, and must be private"),
        ("to_tree", "tree", "is owned by the tree, and must be private"),
        ("to_private", "private", "is private, and must be owned by the tree"),
        ("to_private", "free", "is free, and must be owned by the tree"),
    ],
)
@pytest.mark.parametrize("order", [[1, 2, 3], [3, 1, 2]], ids=["run", "scattered"])
def test_a_page_in_the_wrong_state_is_named_and_nothing_changes(operation, state, says, order):
    pool = PagePool(6)
    pool.allocate(3)
    right = "tree" if operation == "to_private" else "private"
    for page_id in (1, 2, 3):
        wanted = state if page_id == 2 else right
        if wanted == "tree":
            pool.to_tree([page_id])
        if wanted == "free":
            pool.free([page_id])
    before = (pool.num_free, pool.num_private, pool.num_tree)
    with pytest.raises(PageStateError, match=f"page 2 {says}"):
        getattr(pool, operation)(order)
    assert (pool.num_free, pool.num_private, pool.num_tree) == before
    pool.check()


@pytest.mark.parametrize("page_ids", [[0], [6], [-1], [1, 1], [2, 1, 2]])
def test_null_foreign_and_repeated_pages_are_refused(page_ids):
    pool = PagePool(6)
    pool.allocate(5)
    with pytest.raises(PageStateError):
        pool.free(page_ids)
    assert pool.num_private == 5
    pool.check()


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_a_pool_without_a_usable_page_is_refused(num_pages):
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(num_pages)


@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "to_tree", "to_private"]), st.integers(0, 6), st.randoms()))
)
def test_the_pool_equals_three_sets_under_any_operations(steps):
    pool = PagePool(16)
    free, private, tree = set(range(1, 16)), set(), set()
    for operation, n, draw in steps:
        if operation == "allocate":
            if n <= len(free):
                pages = set(pool.allocate(n))
                assert len(pages) == n
                assert pages <= free
                free -= pages
                private |= pages
            else:
                with pytest.raises(PoolExhausted):
                    pool.allocate(n)
            continue
        source, target = {"free": (private, free), "to_tree": (private, tree), "to_private": (tree, private)}[operation]
        chosen = draw.sample(sorted(source), min(n, len(source)))
        getattr(pool, operation)(chosen)
        source.difference_update(chosen)
        target.update(chosen)
        assert (pool.num_free, pool.num_private, pool.num_tree) == (len(free), len(private), len(tree))
        pool.check()
