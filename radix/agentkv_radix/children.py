"""The children of one node: found by the hash of their first page, and by byte order from the second child on."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from sortedcontainers import SortedKeyList

from .node import Node
from .tokens import common_tokens

__all__ = ["Children"]

_HEAD = attrgetter("head")


class Children:
    """At least one child. No two children have the same head (tokens of the first page; of a tail: all its tokens).

    Children whose first pages collide under the hash share a bucket and are told apart by their tokens. Byte order
    serves two questions that a hash cannot answer: whose page shares the most tokens with a prompt, and which tail is
    a prefix of what. In a sorted list both answers stand next to the place of the question: whatever lies between a
    prefix and the asked-for bytes begins with that prefix too.
    """

    __slots__ = ("_buckets", "_order", "count")

    def __init__(self, first: Node) -> None:
        self._buckets: dict[bytes, tuple[Node, ...]] = {first.page_hashes[0]: (first,)}
        self._order: SortedKeyList | None = None
        self.count = 1

    def __iter__(self) -> Iterator[Node]:
        for bucket in self._buckets.values():
            yield from bucket

    def find(self, page_hash: bytes, page: bytes) -> Node | None:
        """The child whose first page is exactly `page`. O(1), and O(collisions) under a bad hash."""
        for child in self._buckets.get(page_hash, ()):
            if child.head == page:
                return child
        return None

    def add(self, child: Node) -> None:
        """O(log children)."""
        page_hash = child.page_hashes[0]
        self._buckets[page_hash] = (*self._buckets.get(page_hash, ()), child)
        self.count += 1
        if self._order is not None:
            self._order.add(child)
        elif self.count == 2:
            self._order = SortedKeyList(self, key=_HEAD)

    def remove(self, child: Node) -> None:
        """O(log children). The caller drops this object with its last child."""
        page_hash = child.page_hashes[0]
        rest = tuple(node for node in self._buckets[page_hash] if node is not child)
        if rest:
            self._buckets[page_hash] = rest
        else:
            del self._buckets[page_hash]
        self.count -= 1
        if self._order is not None:
            if self.count == 1:
                self._order = None
            else:
                self._order.remove(child)

    def replace(self, old: Node, new: Node) -> None:
        """Put `new` in the place of `old`, which has the same first page."""
        page_hash = new.page_hashes[0]
        self._buckets[page_hash] = tuple(new if node is old else node for node in self._buckets[page_hash])
        if self._order is not None:
            self._order.remove(old)
            self._order.add(new)

    def nearest(self, tokens: bytes) -> tuple[Node, int]:
        """The child that shares the most leading tokens with `tokens`, and how many. O(log children)."""
        if self._order is None:
            only = self._only()
            return only, common_tokens(tokens, only.head)
        left, right = self._around(tokens)
        best, shared = left or right, -1
        for child in (left, right):
            if child is not None and (common := common_tokens(tokens, child.head)) > shared:
                best, shared = child, common
        assert best is not None, "a Children object is never empty"
        return best, shared

    def prefix_tail(self, tokens: bytes) -> Node | None:
        """The tail that is a proper prefix of `tokens` and covered by nothing else yet. O(log children)."""
        left, _ = self._around(tokens)
        if left is not None and left.is_tail and tokens.startswith(left.head):
            return left
        return None

    def covers(self, tokens: bytes, *, besides: Node | None = None) -> bool:
        """Whether a child other than `besides` begins with `tokens`. O(log children)."""
        if self._order is None:
            only = self._only()
            return only is not besides and only.head.startswith(tokens)
        # At most `besides` itself stands between the place of `tokens` and whatever begins with them.
        for child in self._order.islice(index := self._order.bisect_key_left(tokens), index + 2):
            if child is not besides:
                return bool(child.head.startswith(tokens))
        return False

    def in_order(self) -> list[Node] | None:
        """The children in byte order, None while there is only one. For checks: O(children)."""
        return None if self._order is None else list(self._order)

    def _only(self) -> Node:
        """The one child there is while there is no order."""
        return next(iter(self._buckets.values()))[0]

    def _around(self, tokens: bytes) -> tuple[Node | None, Node | None]:
        """The last child before the place of `tokens` in byte order, and the first one at or behind it."""
        order = self._order
        if order is None:
            only = self._only()
            return (only, None) if only.head < tokens else (None, only)
        index = order.bisect_key_left(tokens)
        return (order[index - 1] if index else None, order[index] if index < len(order) else None)
