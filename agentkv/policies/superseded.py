"""What a later turn replaced goes first."""

from __future__ import annotations

from agentkv_radix import Node

__all__ = ["SupersededFirst"]


class SupersededFirst:
    """Evict pages of turns that a later turn replaced before any other page, then least recently used.

    An agent that rolls back or rewrites its history leaves a branch that nobody will ask for again, and that LRU would
    keep over older, still living branches. `PrefixCache.supersede` marks such a branch; a hit clears the mark.
    """

    def key(self, node: Node) -> tuple[bool, int]:
        """(still current, last_access): smallest goes first."""
        return (not node.superseded, node.last_access)
