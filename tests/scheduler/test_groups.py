"""Groups are the tree of pages that sequences have in common, cut where reading together does not pay."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.scheduler import Chunk, Group, SharingRule
from agentkv.scheduler.groups import Groups, cheapest, shared_edges
from agentkv_kernels import SharedRun
from agentkv_kernels.shared_runs import check_shared_runs
from support.examples import examples

Run = tuple[tuple[int, ...], int, int]
"""Places of the sequences, first page, page behind the last."""

ALWAYS = SharingRule(keys_per_token=0)


@st.composite
def page_tables(draw: st.DrawFn) -> list[list[int]]:
    """Each goes along an earlier one for a while, and on by pages of its own; ids use all four bytes."""
    ids, tables = itertools.count(1, 0x01010101 // 3), list[list[int]]()
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from(tables)) if tables else []
        kept = parent[: draw(st.integers(0, len(parent)))]
        tables.append([*kept, *itertools.islice(ids, draw(st.integers(0, 4)))])
    return draw(st.permutations(tables))


def brute_edges(tables: Sequence[Sequence[int]]) -> set[Run]:
    """By definition: the tables that have each page in common, and neighbouring pages of the same tables as one run."""
    members_at: dict[tuple[int, ...], list[int]] = {}
    for place, table in enumerate(tables):
        for end in range(1, len(table) + 1):
            members_at.setdefault(tuple(table[:end]), []).append(place)
    runs = set()
    for head, members in members_at.items():
        longer = [members_at[other] for other in members_at if len(other) == len(head) + 1 and other[:-1] == head]
        if len(members) > 1 and members not in longer:
            first = len(head)
            while first > 0 and members_at[head[:first]] == members:
                first -= 1
            runs.add((tuple(members), first, len(head)))
    return runs


def packed(tables: Sequence[Sequence[int]]) -> list[bytes]:
    return [array("i", table).tobytes() for table in tables]


@given(page_tables())
def test_the_edges_are_those_of_the_definition(tables: list[list[int]]) -> None:
    found = shared_edges(packed(tables))
    assert {(tuple(edge.members), edge.first_page, edge.end_page) for edge in found} == brute_edges(tables)
    assert len(found) == len(brute_edges(tables))
    for edge in found:
        assert all(lower.parent is edge and lower.first_page == edge.end_page for lower in edge.below)


def cost_of(tables: Sequence[Sequence[int]], runs: Sequence[Run], rule: SharingRule, tokens: Sequence[int]) -> int:
    """All keys that are read, and what the groups cost beyond them."""
    covered = [0] * len(tables)
    cost = 0
    for members, first, end in runs:
        cost += rule.cost((end - first) * 4, sum(tokens[member] for member in members))
        for member in members:
            assert covered[member] == first, "the runs of a sequence follow each other"
            covered[member] = end
    return cost + sum(4 * (len(table) - end) for table, end in zip(tables, covered, strict=True))


@settings(max_examples=examples(60))
@given(page_tables(), st.integers(0, 12), st.data())
def test_no_other_choice_of_edges_costs_less(tables: list[list[int]], per_token: int, data: st.DataObject) -> None:
    rule = SharingRule(per_token)
    tokens = [data.draw(st.integers(1, 3)) for _ in tables]
    edges = shared_edges(packed(tables))
    chosen = [(tuple(edge.members), edge.first_page, edge.end_page) for edge in cheapest(edges, tokens, 4, rule)]
    least = None
    for size in range(len(edges) + 1):
        for some in itertools.combinations(sorted(edges, key=lambda edge: edge.first_page), size):
            runs, covered = list[Run](), [0] * len(tables)
            for edge in some:
                # What stands above it and is not read together is read with it.
                runs.append((tuple(edge.members), covered[edge.members[0]], edge.end_page))
                for member in edge.members:
                    covered[member] = edge.end_page
            cost = cost_of(tables, runs, rule, tokens)
            least = cost if least is None else min(least, cost)
    assert cost_of(tables, chosen, rule, tokens) == least


def test_a_run_pays_from_so_many_keys_on_as_its_group_costs_and_no_earlier() -> None:
    rule = SharingRule(keys_per_token=20)
    # Two read 4 keys a page: together saves 4 a page, and costs 20 for the second.
    for pages, pays in ((5, False), (6, True)):
        edges = shared_edges(packed([[*range(1, pages + 1), 100], [*range(1, pages + 1), 200]]))
        assert bool(cheapest(edges, [1, 1], 4, rule)) is pays


def chunk(request_id: int, pages: Sequence[int], page_size: int, *, tokens: int = 1, more: int = 0) -> Chunk:
    """A sequence whose context fills these pages, and `more` tokens of the next."""
    return Chunk(request_id, (7,) * tokens, len(pages) * page_size + more, array("i", [*pages, 99]), samples=True)


@given(page_tables(), st.data())
def test_what_is_remembered_from_step_to_step_is_what_would_be_found_anew(
    tables: list[list[int]], data: st.DataObject
) -> None:
    """Tables grow, as sequences decode; also along pages that others have already, and sequences come and go."""
    groups, ids = Groups(4, ALWAYS), itertools.count(10**6)
    lengths = [data.draw(st.integers(0, len(table))) for table in tables]
    for _ in range(6):
        present = data.draw(st.lists(st.sampled_from(range(len(tables))), unique=True)) or list(range(len(tables)))
        chunks = [chunk(place, tables[place][: lengths[place]], 4, more=place % 4) for place in present]
        assert groups.of(chunks) == Groups(4, ALWAYS).of(chunks)
        for place, table in enumerate(tables):
            if data.draw(st.booleans()):
                lengths[place] += 1
                if lengths[place] > len(table):
                    table.append(next(ids))


@given(page_tables(), st.integers(0, 12))
def test_the_kernels_accept_every_group(tables: list[list[int]], per_token: int) -> None:
    chunks = [chunk(place, table, 4) for place, table in enumerate(tables)]
    groups = Groups(4, SharingRule(per_token)).of(chunks)
    longest = max(len(each.page_ids) for each in chunks)
    table = torch.tensor([[*each.page_ids, *[0] * (longest - len(each.page_ids))] for each in chunks])
    runs = [SharedRun(group.request_ids, group.first_page, group.num_pages) for group in groups]
    assert len(check_shared_runs(runs, [each.context_len for each in chunks], table, 4)) == len(groups)


def test_only_whole_pages_of_context_are_shared() -> None:
    groups = Groups(4, ALWAYS)
    assert groups.of([chunk(0, [1, 2], 4, more=3), chunk(1, [1, 2], 4, more=1)]) == (Group((0, 1), 0, 2),)
    assert groups.of([chunk(0, [1, 2], 4), chunk(1, [1], 4, more=3)]) == (Group((0, 1), 0, 1),)
    assert groups.of([chunk(0, [1], 4), chunk(1, [], 4, more=3)]) == ()


def test_long_chunks_read_for_themselves() -> None:
    chunks = [chunk(0, [1, 2], 4), chunk(1, [1, 2], 4, tokens=9), chunk(2, [1, 2], 4, tokens=8)]
    assert Groups(4, ALWAYS).of(chunks) == (Group((0, 2), 0, 2),)


def test_sequences_that_decode_are_not_looked_at_anew_each_step() -> None:
    found: list[int] = []

    class Counting(SharingRule):
        __slots__ = ()

        def cost(self, num_keys: int, num_tokens: int) -> int:
            found.append(num_keys)
            return num_keys

    groups = Groups(4, Counting())
    for step in range(40):
        pages = [[1, 2, *range(10 * who, 10 * who + 1 + step // 4)] for who in (1, 2, 3)]
        assert groups.of([chunk(who, table, 4, more=step % 4) for who, table in enumerate(pages)])
    assert len(found) == 1
