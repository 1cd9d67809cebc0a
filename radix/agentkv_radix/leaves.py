"""The evictable leaves, in the order in which a policy gives them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList

from .node import Node

__all__ = ["Leaves"]


class Leaves:
    """Leaves that nobody holds, ordered by the key that each had when it was filed.

    The key is frozen on the node: a policy's answer may change while a leaf stands here, and a list ordered by living
    keys could no longer find it. The node's serial ends the key, so equal keys keep the order of creation and taking
    one out is a bisection, not a walk over its equals.
    """

    __slots__ = ("_order", "_policy_key")

    def __init__(self, policy_key: Callable[[Node], tuple[Any, ...]]) -> None:
        self._policy_key = policy_key
        self._order: SortedKeyList = SortedKeyList(key=attrgetter("key"))

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def file(self, leaf: Node) -> None:
        """O(log leaves) and one call of the policy."""
        assert leaf.key is None, f"{leaf} is filed already"
        leaf.key = (*self._policy_key(leaf), leaf.serial)
        self._order.add(leaf)

    def remove(self, leaf: Node) -> None:
        """O(log leaves)."""
        self._order.remove(leaf)
        leaf.key = None

    def refile(self, leaf: Node) -> None:
        """As remove and file; does not touch the list where the key has not changed."""
        key = (*self._policy_key(leaf), leaf.serial)
        if key != leaf.key:
            self._order.remove(leaf)
            leaf.key = key
            self._order.add(leaf)

    def first(self) -> Node:
        """The next victim; there must be one."""
        leaf: Node = self._order[0]
        return leaf
