"""The description of a step."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentkv_kernels import KernelError, PlanMismatch, plan


@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 4, 16]),
    spare=st.integers(0, 2),
    form=st.sampled_from(["lists", "arrays", "tensor"]),
)
def test_every_token_is_given_its_position_and_its_slot(lens, page_size, spare, form):
    query, context = [q for q, _ in lens], [c for _, c in lens]
    counts = [-(-(q + c) // page_size) for q, c in lens]
    tables = [[100 * i + p + 1 for p in range(count + spare)] for i, count in enumerate(counts)]
    given_tables = tables
    if form == "arrays":
        given_tables = [array("i", table) for table in tables]
    elif form == "tensor":
        width = max(map(len, tables))
        given_tables = torch.tensor([table + [77] * (width - len(table)) for table in tables], dtype=torch.int32)
    metadata = plan(query, context, given_tables, page_size=page_size)

    positions = [c + i for q, c in lens for i in range(q)]
    slots = [
        table[p // page_size] * page_size + p % page_size
        for (q, c), table in zip(lens, tables, strict=True)
        for p in range(c, c + q)
    ]
    assert metadata.positions.tolist() == positions
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.slot_mapping.dtype == torch.int64
    assert metadata.num_tokens == sum(query)
    assert metadata.num_seqs == len(lens)
    assert list(metadata.query_start) == [sum(query[:i]) for i in range(len(query) + 1)]
    assert list(metadata.seq_lens) == [q + c for q, c in lens]
    assert sorted(metadata.decode + metadata.extend) == list(range(len(lens)))
    assert all(query[i] == 1 for i in metadata.decode)
    padded = [table[:count] + [0] * (max(counts) - count) for table, count in zip(tables, counts, strict=True)]
    assert metadata.page_table.tolist() == padded
    assert metadata.page_table.dtype == torch.int32


def test_the_caller_may_change_its_page_table_after_planning():
    pages = array("i", [3, 4])
    table = torch.tensor([[3, 4]], dtype=torch.int32)
    planned = [plan([2], [3], [pages], page_size=4), plan([2], [3], table, page_size=4)]
    pages[0] = 9
    table[0, 0] = 9
    assert [metadata.page_table.tolist() for metadata in planned] == [[[3, 4]], [[3, 4]]]


@pytest.mark.parametrize(
    ("query", "context", "tables", "message"),
    [
        ([], [], [], "at least one sequence"),
        ([1], [0, 1], [[1]], "1 query_lens, 2 context_lens and 1 page tables"),
        ([1], [0], [], "0 page tables"),
        ([0], [4], [[1]], "query_len is at least 1"),
        ([1], [-1], [[1]], "context_len at least 0"),
        ([1, 1], [3, 4], [[1], [2]], "sequence 1 of the step has 5 tokens and needs 2 pages of 4"),
        ([2], [4], torch.ones(1, 1, dtype=torch.int32), "needs 2 pages of 4, its page table has 1"),
        ([2], [4], torch.ones(1, 2, dtype=torch.int64), "int32"),
        ([2], [4], torch.ones(1, dtype=torch.int32), r"\[num_seqs, max_pages\]"),
    ],
)
def test_lengths_and_tables_that_contradict_each_other_are_refused(query, context, tables, message):
    with pytest.raises(PlanMismatch, match=message) as caught:
        plan(query, context, tables, page_size=4)
    assert isinstance(caught.value, KernelError)


def test_a_page_size_below_one_is_plain_misuse():
    with pytest.raises(ValueError, match="page_size"):
        plan([1], [0], [[1]], page_size=0)


def test_once_computes_for_each_key_once():
    metadata = plan([1], [0], [[1]], page_size=4)
    made: list[int] = []
    assert [metadata.once("a", lambda: made.append(1) or len(made)) for _ in range(3)] == [1, 1, 1]
    assert metadata.once("b", lambda: made.append(1) or len(made)) == 2
