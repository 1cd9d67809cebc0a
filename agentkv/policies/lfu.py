"""Least frequently used first."""

from __future__ import annotations

from agentkv_radix import Node

__all__ = ["LFU"]


class LFU:
    """Evict the node with the fewest hits, the least recently used among equals.

    Counts are of resident nodes: what is evicted starts anew when it returns. A node that was popular long ago stays,
    which suits stable system prompts and not shifting traffic.
    """

    def key(self, node: Node) -> tuple[int, int]:
        """(hits, last_access): smallest goes first."""
        return (node.hits, node.last_access)
