"""What the tree tells its one listener: runs of pages that were stored, hit, evicted, split or expired."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, get_args

if TYPE_CHECKING:
    from .node import Node, Partial

__all__ = ["Event", "EventKind", "Listener", "copy_event", "heard_kinds", "path_event", "run_event"]

EventKind = Literal["stored", "hit", "evicted", "split", "expired"]


@dataclass(frozen=True, slots=True)
class Event:
    """One run of pages, next to each other on one path.

    kind         stored: pages are resident from now on; hit: a call holds them; evicted: they left the tree;
                 split: the run became a node of its own, no page moved; expired: a pin on them ran out
    parent_hash  chained hash of the page before the run (the root's hash where start is 0)
    start        index of the run's first token
    token_ids    packed, 4 bytes a token
    page_ids     one for every page of the run, in order; page_hashes likewise
    cause        stored: extend, insert, tail; hit: lock, copy; evicted: pressure, covered; split: what
                 asked for it
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
    """Receives every event of a tree, in the order of the changes.

    It is called in the middle of an operation: it must not call the tree, and must not raise. A listener that has an
    attribute `kinds`, a set of event kinds, hears these only, and the others are not even built: a hit event copies
    its whole prefix.
    """

    def on_event(self, event: Event) -> None: ...


def heard_kinds(listener: Listener | None) -> frozenset[str]:
    """The kinds of event that this listener wants to hear."""
    if listener is None:
        return frozenset()
    return frozenset(getattr(listener, "kinds", get_args(EventKind)))


def run_event(kind: EventKind, node: Node, first: int, page_size: int, cause: str, owner: str | None) -> Event:
    """Tells of the pages of `node` from its page `first` on. Copies them."""
    return Event(
        kind=kind,
        namespace=node.namespace,
        parent_hash=_hash_before(node, first),
        start=node.start + first * page_size,
        token_ids=bytes(node.tokens[4 * first * page_size :]),
        page_ids=tuple(node.page_ids[first:]),
        page_hashes=tuple(node.page_hashes[first:]),
        cause=cause,
        owner=owner,
        reach=node.reach,
    )


def path_event(node: Node, owner: str | None) -> Event:
    """Tells of a hit: one run from the root to the end of `node`. Copies the whole prefix."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    root, *nodes = reversed(path)
    return Event(
        kind="hit",
        namespace=node.namespace,
        parent_hash=root.page_hashes[-1],
        start=0,
        token_ids=b"".join(each.tokens for each in nodes),
        page_ids=tuple(page_id for each in nodes for page_id in each.page_ids),
        page_hashes=tuple(page_hash for each in nodes for page_hash in each.page_hashes),
        cause="lock",
        owner=owner,
        reach=node.reach,
    )


def copy_event(partial: Partial, node: Node, page_size: int, owner: str | None) -> Event:
    """Tells of a hit inside a page of `node`: the shared tokens only, and the page they are copied from."""
    index = partial.page_index - node.depth
    first = 4 * index * page_size
    return Event(
        kind="hit",
        namespace=node.namespace,
        parent_hash=_hash_before(node, index),
        start=partial.start,
        token_ids=bytes(node.tokens[first : first + 4 * partial.num_tokens]),
        page_ids=(partial.page_id,),
        page_hashes=(node.page_hashes[index],),
        cause="copy",
        owner=owner,
        reach=node.reach,
    )


def _hash_before(node: Node, index: int) -> bytes:
    """Chained hash of what stands before page `index` of a node."""
    if index:
        return node.page_hashes[index - 1]
    assert node.parent is not None, f"{node} is a root, and has no pages to tell of"
    return node.parent.page_hashes[-1]
