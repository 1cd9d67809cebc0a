"""The evictable leaves, in the order in which a policy gives them up; where it fails, nobody else is harmed."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

from sortedcontainers import SortedKeyList

from .node import Node
from .policy import LRU, Policy

__all__ = ["Leaves"]

_log = logging.getLogger("agentkv")


class Leaves:
    """Leaves that nobody holds, ordered by the key that each had when it was filed.

    The key is frozen on the node: a policy's answer may change while a leaf stands here, and a list ordered by living
    keys could no longer find it. The node's serial ends the key, so equal keys keep the order of creation and taking
    one out is a bisection, not a walk over its equals.

    The policy is asked in the middle of changes to the tree, which must not be left half done. So where it raises, or
    gives keys that cannot be compared with each other, that is logged once, and from then on LRU decides instead. A
    CancelledError is caught as well, though it is no Exception: on this thread nothing can be cancelled by it, so what
    a policy that touches asyncio raises is a fault like any other.
    """

    __slots__ = ("_order", "_policy")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._order = _in_order()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    def hook(self, name: str) -> Callable[[Node], Any] | None:
        """An optional method of the policy, None where it has none; once the policy was let go it does nothing."""
        policy, method = self._policy, getattr(self._policy, name, None)
        if method is None:
            return None

        def guarded(node: Node) -> Any:
            if self._policy is not policy:
                return None
            try:
                return method(node)
            except (Exception, CancelledError):
                self._let_go()
                return None

        return guarded

    def file(self, leaf: Node) -> None:
        """O(log leaves) and one call of the policy."""
        assert leaf.key is None, f"{leaf} is filed already"
        self._add(leaf, self._key(leaf))

    def remove(self, leaf: Node) -> None:
        """O(log leaves)."""
        try:
            self._order.remove(leaf)
        except (Exception, CancelledError):
            # Keys that are not ordered among each other, such as NaN, hide a leaf from the bisection, or raise in it.
            self._let_go()
            self._order.remove(leaf)
        leaf.key = None

    def refile(self, leaf: Node) -> None:
        """As remove and file; does not touch the list where the key has not changed."""
        key, policy = self._key(leaf), self._policy
        try:
            unchanged = bool(key == leaf.key)
        except (Exception, CancelledError):
            self._let_go()  # This leaf is filed anew with all others.
            return
        if not unchanged:
            self.remove(leaf)
            self._add(leaf, key if self._policy is policy else self._key(leaf))

    def first(self) -> Node:
        """The next victim; there must be one."""
        leaf: Node = self._order[0]
        return leaf

    def _key(self, leaf: Node) -> tuple[Any, ...]:
        try:
            return (*self._policy.key(leaf), leaf.serial)
        except (Exception, CancelledError):
            self._let_go()
            return (*self._policy.key(leaf), leaf.serial)

    def _add(self, leaf: Node, key: tuple[Any, ...]) -> None:
        leaf.key = key
        try:
            self._order.add(leaf)
        except (Exception, CancelledError):
            self._let_go()
            leaf.key = self._key(leaf)
            self._order.add(leaf)

    def _let_go(self) -> None:
        """Go on with LRU: all leaves are filed anew by it. Called where the policy's exception is being handled."""
        _log.exception("the eviction policy %s failed; LRU takes its place", type(self._policy).__name__)
        self._policy = LRU()
        leaves = list(self._order)
        for leaf in leaves:
            leaf.key = self._key(leaf)
        self._order = _in_order()
        self._order.update(leaves)


def _in_order() -> SortedKeyList:
    return SortedKeyList(key=attrgetter("key"))
