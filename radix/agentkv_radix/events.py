"""What the tree tells its one listener: runs of pages that were stored, hit, evicted, split or expired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Event", "EventKind", "Listener"]

EventKind = Literal["stored", "hit", "evicted", "split", "expired"]


@dataclass(frozen=True, slots=True)
class Event:
    """One run of pages, next to each other on one path.

    kind         stored: pages are resident from now on; hit: a call holds them; evicted: they left the tree;
                 split: the run became a node of its own, no page moved; expired: a pin on them ran out
    parent_hash  chained hash of the page before the run (the root's hash where start is 0)
    start        index of the run's first token
    token_ids    packed, 4 bytes a token
    page_ids, page_hashes   one each for every page of the run, in order
    cause        stored: extend, insert, tail; hit: lock, copy; evicted: pressure, covered; split: what asked for it
    owner        name of the call that did it, or None
    reach        the furthest token end that any path through the run's node ever had
    """

    kind: EventKind
    namespace: bytes
    parent_hash: bytes
    start: int
    token_ids: bytes
    page_ids: tuple[int, ...]
    page_hashes: tuple[bytes, ...]
    cause: str
    owner: str | None
    reach: int


class Listener(Protocol):
    """Receives every event of a tree, in order, after the change it tells of.

    It is called in the middle of an operation: it must not call the tree, and must not raise.
    """

    def on_event(self, event: Event) -> None: ...
