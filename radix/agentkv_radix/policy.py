"""Which leaf goes first. The tree asks for a key when a leaf becomes evictable, and evicts the smallest first."""

from __future__ import annotations

from typing import Any, Protocol

from .node import Node

__all__ = ["LRU", "Policy"]


class Policy(Protocol):
    """Order of eviction: one method, and four more that a policy may have.

    `key(node)` is computed once when a leaf is filed (it became a leaf, was released, superseded, shortened or
    spared) and frozen until it is filed again; the smallest goes first, equal keys in the order of creation. All keys
    of one policy must be comparable with each other. Policies read the public fields of a node, may write `priority`
    and `expires`, and never call the tree. A policy that raises, or whose keys cannot be compared, is logged and gives
    way to LRU for good.

    Optional, looked for once when the tree is made:
    `on_insert(node)`: the node is new. `on_hit(node)`: called for each node of a hit path.
    `spare(node) -> bool`: asked of the victim, at most once in one evict(); True: its key changed, file it
    again. `on_evict(node)`: pages are about to leave the end of the node.
    """

    def key(self, node: Node) -> tuple[Any, ...]: ...


class LRU:
    """Least recently used first: by the logical time of the last hit, insertion or release."""

    def key(self, node: Node) -> tuple[Any, ...]:
        return (node.last_access,)
