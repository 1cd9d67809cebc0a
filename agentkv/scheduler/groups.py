"""Which sequences of a step have pages in common, and for which of them it pays to read these once for all.

The page tables of a step, cut to whole pages of context, are the paths of a tree. Each of its edges is a run of pages
that some sequences share:

    pages  0      2         5
           |--A---|----B----|-- own pages of 0      A: requests 0, 1, 2; pages 0 and 1
                  |    B    |-- own pages of 1      B: requests 0, 1; pages 2, 3 and 4
                  |-- own pages of 2

An edge becomes a group where that costs less than to leave its pages to the edges, and to the sequences, behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .plan import Chunk, Group

__all__ = ["Edge", "Groups", "SharingRule", "cheapest", "shared_edges"]

_BYTES = 4  # of a page id in a packed table


@dataclass(frozen=True, slots=True)
class SharingRule:
    """What a group costs, counted in keys: as long as it takes to read one key of a decoding sequence from a page.

    A sequence that reads its pages alone costs their keys. A group reads its keys once, and has more to do for it: its
    queries are put together, each gets one partial result more, and these are merged. What is read by one sequence
    after another lies in the processor's cache from the second on, so it takes some hundred keys to pay for that. The
    defaults are measured (`python benchmarks/kernels.py crossover`); kernels that differ much want others.
    """

    keys_per_token: int = 576
    """Of each token but one: so, for tokens of decoding sequences, a run of more keys than these pays."""
    most_tokens: int = 8
    """Of a chunk that takes part. A longer one reads a key for so many queries that it gains nothing."""

    def cost(self, num_keys: int, num_tokens: int) -> int:
        """Of one group: the keys of its pages, and the tokens that its sequences compute in the step."""
        return num_keys + self.keys_per_token * (num_tokens - 1)


@dataclass(slots=True, eq=False)
class Edge:
    """Pages first_page .. end_page of the page tables `members`, which are all the tables that have them."""

    first_page: int
    end_page: int
    members: list[int]
    below: list[Edge] = field(default_factory=list)
    parent: Edge | None = None


def shared_edges(tables: Sequence[bytes]) -> list[Edge]:
    """The edges of the tree of page tables that two or more of them have in common, the lower ones first.

    A table is its page ids, four bytes each. Costs a sort of the tables, which compares them as bytes, and for each a
    bisection of the pages that it has in common with the one before it.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)
    # Of each edge that is open: where it ends, from which place of the order on its members stand, what is below it.
    open_edges: list[tuple[int, int, list[Edge]]] = [(0, 0, [])]
    found: list[Edge] = []
    for place in range(1, len(order) + 1):
        common = _common_pages(tables[order[place - 1]], tables[order[place]]) if place < len(order) else 0
        first, below = place - 1, list[Edge]()
        while open_edges[-1][0] > common:
            end, first, within = open_edges.pop()
            edge = Edge(max(common, open_edges[-1][0]), end, sorted(order[first:place]), within + below)
            for lower in edge.below:
                lower.parent = edge
            found.append(edge)
            below = [edge]
        if open_edges[-1][0] < common:
            open_edges.append((common, first, below))
        else:
            open_edges[-1][2].extend(below)
    return found


def _common_pages(one: bytes, other: bytes) -> int:
    low, high = 0, min(len(one), len(other)) // _BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * _BYTES : middle * _BYTES] == other[low * _BYTES : middle * _BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def cheapest(edges: Sequence[Edge], num_tokens: Sequence[int], page_size: int, rule: SharingRule) -> list[Edge]:
    """The edges to read together, such that reading all of them costs the least; the upper ones first.

    `edges` are those of `shared_edges`. An edge that is not read together leaves its pages to what is below it: an
    edge of the result may begin before the one that it comes from. Costs O(edges * depth of the tree).
    """
    least: dict[int, dict[int, tuple[int, bool]]] = {}  # by edge, then by first page: the cost, and whether together
    for edge in edges:
        tokens, here = sum(num_tokens[member] for member in edge.members), {}
        alone = len(edge.members) - sum(len(lower.members) for lower in edge.below)
        behind = sum(least[id(lower)][edge.end_page][0] for lower in edge.below)
        for first in _first_pages(edge):
            keys = (edge.end_page - first) * page_size
            together = rule.cost(keys, tokens) + behind
            apart = alone * keys + sum(least[id(lower)][first][0] for lower in edge.below)
            here[first] = min((together, True), (apart, False))
        least[id(edge)] = here
    chosen = []
    left = [(edge, 0) for edge in reversed(edges) if edge.parent is None]
    while left:
        edge, first = left.pop()
        together = least[id(edge)][first][1]
        if together:
            chosen.append(Edge(first, edge.end_page, edge.members))
        left += [(lower, edge.end_page if together else first) for lower in reversed(edge.below)]
    return chosen


def _first_pages(edge: Edge) -> Iterator[int]:
    """Where the edge may begin: behind the edge above it, or behind a higher one, if those between are left out."""
    above: Edge | None = edge
    while above is not None:
        yield above.first_page
        above = above.parent


class Groups:
    """Finds the groups of each step, and remembers them as long as no step can have others.

    While sequences decode, their tables grow at the end and the tree stays: then a step costs one comparison for each.
    """

    def __init__(self, page_size: int, rule: SharingRule) -> None:
        self._page_size, self._rule = page_size, rule
        self._found: tuple[Group, ...] = ()
        self._who: list[tuple[int, int]] = []
        self._heads: list[bytes] = []
        """Of each table what the tree depends on: up to the first page that is its own, or whole if it has none."""
        self._whole: list[bool] = []

    def of(self, chunks: Sequence[Chunk]) -> tuple[Group, ...]:
        """The groups of a step, those of each request following each other from its page 0."""
        few = [chunk for chunk in chunks if len(chunk.token_ids) <= self._rule.most_tokens]
        if len(few) < 2:
            return ()
        who = [(chunk.request_id, len(chunk.token_ids)) for chunk in few]
        if who != self._who or not all(map(self._stays, few, self._heads, self._whole)):
            self._find(few)
            self._who = who
        return self._found

    def _stays(self, chunk: Chunk, head: bytes, whole: bool) -> bool:
        pages = chunk.context_len // self._page_size
        return (pages * _BYTES == len(head) or (not whole and pages * _BYTES > len(head))) and (
            chunk.page_ids[: len(head) // _BYTES].tobytes() == head
        )

    def _find(self, chunks: Sequence[Chunk]) -> None:
        tables = [chunk.page_ids[: chunk.context_len // self._page_size].tobytes() for chunk in chunks]
        edges = shared_edges(tables)
        shared = [0] * len(tables)
        for edge in edges:
            for member in edge.members:
                shared[member] = max(shared[member], edge.end_page)
        self._heads = [table[: (pages + 1) * _BYTES] for table, pages in zip(tables, shared, strict=True)]
        self._whole = [len(table) == pages * _BYTES for table, pages in zip(tables, shared, strict=True)]
        chosen = cheapest(edges, [len(chunk.token_ids) for chunk in chunks], self._page_size, self._rule)
        self._found = tuple(
            Group(
                tuple(chunks[member].request_id for member in edge.members),
                edge.first_page,
                edge.end_page - edge.first_page,
            )
            for edge in chosen
        )
