"""A node of the tree, what a match found, and the small results of the tree's operations."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import StaleMatch

if TYPE_CHECKING:
    from .children import Children

__all__ = ["Extended", "Inserted", "Match", "Node", "Partial", "TailAdded"]

MAX_OWNERS = 8


class Node:
    """An edge of whole pages and the place where it ends; or a tail: one page of fewer tokens, without children.

    Policies and reports read the fields below; only the tree writes them (`priority` and `expires` are for whoever
    keeps pins). Times are ticks of the tree's logical clock.

        |------------- start -------------|---------- tokens ----------|
        |  pages of the ancestors (depth) |  num_pages pages           |
        |---------------------------- end -----------------------------|
    """

    __slots__ = (
        "alive",
        "children",
        "created",
        "depth",
        "end",
        "expires",
        "head",
        "hits",
        "is_tail",
        "key",
        "last_access",
        "lock_ref",
        "namespace",
        "owners",
        "page_hashes",
        "page_ids",
        "parent",
        "pin_ref",
        "priority",
        "reach",
        "serial",
        "start",
        "superseded",
        "tokens",
        "writer",
    )

    def __init__(
        self,
        *,
        namespace: bytes,
        serial: int,
        parent: Node | None,
        tokens: bytearray,
        page_ids: array[int],
        page_hashes: list[bytes],
        head: bytes,
        now: int,
        is_tail: bool = False,
    ) -> None:
        self.namespace = namespace
        self.serial = serial
        """Unique in its tree and ascending: breaks ties between equal policy keys."""
        self.parent = parent
        self.children: Children | None = None
        """None for a leaf, never empty."""
        self.tokens = tokens
        """The edge, packed. A bytearray, since the node of a running answer grows by a page at a time."""
        self.page_ids = page_ids
        self.page_hashes = page_hashes
        """Chained hash of each page. A root has no page and one entry, the hash of its namespace."""
        self.head = head
        """Tokens of the first page (of a tail: all); no two siblings have the same."""
        self.is_tail = is_tail
        self.start: int = 0 if parent is None else parent.end
        self.end: int = self.start + len(tokens) // 4
        self.depth: int = 0 if parent is None else parent.depth + len(parent.page_ids)
        """Pages before its first page."""
        self.reach = self.end
        """The furthest token end that any path through this node ever had while the node was alive."""
        self.lock_ref = 0
        """Running holders of this node or of a node below it."""
        self.pin_ref = 0
        """Holds across calls of this node or of a node below it."""
        self.last_access = now
        self.created = now
        self.hits = 0
        self.owners: tuple[str, ...] = ()
        """Names of the calls that made or hit it: at most 8, then "many"."""
        self.priority = 0
        self.expires: float | None = None
        self.superseded = False
        self.writer = False
        """Its only holder is the call that made it, at its end: it may grow in place."""
        self.key: tuple[Any, ...] | None = None
        """The policy's key as it was when this leaf was filed; None where it is not evictable."""
        self.alive = True

    @property
    def num_pages(self) -> int:
        return len(self.page_ids)

    @property
    def is_leaf(self) -> bool:
        return self.children is None

    @property
    def is_held(self) -> bool:
        return self.lock_ref > 0 or self.pin_ref > 0

    def add_owner(self, owner: str) -> None:
        owners = self.owners
        if owner not in owners and len(owners) <= MAX_OWNERS:
            self.owners = (*owners, owner if len(owners) < MAX_OWNERS else "many")

    def __repr__(self) -> str:
        kind = "root" if self.parent is None else "tail" if self.is_tail else "node"
        counts = f"lock_ref={self.lock_ref} pin_ref={self.pin_ref}"
        return f"<{kind} {self.serial} tokens {self.start}..{self.end} {counts}>"


class Partial(NamedTuple):
    """The page that shares the most tokens with what follows the whole pages of a match: worth a copy, never a lock.

    page_id     the source; num_tokens of it (1..page_size-1) are the prompt's
    node        whose edge held the page when it was found: a tail, a sibling's first page, or the next
                in an edge
    start       index of the page's first token
    page_index  depth of the page, in pages
    """

    page_id: int
    num_tokens: int
    node: Node
    start: int
    page_index: int

    def owner_node(self) -> Node:
        """The node that holds the page now (a split may have moved it above `node`). Raises StaleMatch if none does."""
        node = self.node
        while node.depth > self.page_index and node.parent is not None:
            node = node.parent
        index = self.page_index - node.depth
        if not node.alive or index >= len(node.page_ids) or node.page_ids[index] != self.page_id:
            raise StaleMatch(f"page {self.page_id}, found as a partial hit, has left the tree since; match again")
        return node


class Match:
    """What the tree holds of a prompt: whole pages, and perhaps a part of one more.

    A match holds nothing: it stays right only while the tree keeps what it found. `page_ids`, `RadixTree.lock` and
    `RadixTree.page_hash` check that and raise StaleMatch; splits and insertions in between do no harm.
    """

    __slots__ = ("_page_ids", "namespace", "node", "num_pages", "num_tokens", "partial")

    def __init__(self, namespace: bytes, node: Node, num_pages: int, num_tokens: int, partial: Partial | None) -> None:
        self.namespace = namespace
        self.node = node
        """The node that holds the last matched page; the match may end inside its edge. The root where none does."""
        self.num_pages = num_pages
        self.num_tokens = num_tokens
        """Tokens of whole pages only."""
        self.partial = partial
        self._page_ids: array[int] | None = None

    @property
    def page_ids(self) -> array[int]:
        """Ids of the matched whole pages, in order. Built at the first use: one memcpy a node."""
        if self._page_ids is None:
            self._page_ids = path_page_ids(self.located(), None, self.num_pages)
        return self._page_ids

    def located(self) -> Node:
        """The node that holds the last matched page now. Raises StaleMatch where that page was evicted.

        The lower half of a split keeps its identity, so the page stands in that node or above it, and a node that has
        left still tells where it stood. A node that was shortened is never lengthened again (nobody held it, so it has
        no writer): where a living node reaches num_tokens, its tokens are those that were matched. O(splits since).
        """
        node = self.node
        while node.start >= self.num_tokens and node.parent is not None:
            node = node.parent
        if self.num_tokens and not (node.alive and node.end >= self.num_tokens):
            raise StaleMatch(f"pages of a match of {self.num_tokens} tokens have been evicted since; match again")
        return node

    def __repr__(self) -> str:
        return f"<match of {self.num_tokens} tokens in {self.node}, partial={self.partial}>"


def path_page_ids(node: Node, above: Node | None, num_pages: int | None = None) -> array[int]:
    """Page ids from below `above` (None: from the root) down to the end of `node`, cut to depth `num_pages`.

    Costs one memcpy a node.
    """
    runs: list[array[int]] = []
    walk: Node | None = node
    while walk is not None and walk is not above:
        runs.append(walk.page_ids)
        walk = walk.parent
    page_ids = array("i")
    for run in reversed(runs):
        page_ids.extend(run)
    if num_pages is not None:
        del page_ids[num_pages - (0 if above is None else above.depth + above.num_pages) :]
    return page_ids


@dataclass(frozen=True, slots=True)
class Extended:
    """Result of a commit. `duplicates` are the caller's still, `released` are the caller's from now on."""

    node: Node
    """Ends exactly where the committed tokens end; the caller's one lock stands on it now."""
    page_ids: array[int]
    """The ids to use from now on, one for each committed page: resident ones where there were any."""
    duplicates: list[int]
    """Ids of the caller that are not needed, since the same page was resident already."""
    released: list[int]
    """Pages of tails that the tree gave up, since a full page covers them."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """Result of an insertion; as `Extended`, without a lock. `node` is where the whole pages end."""

    node: Node
    page_ids: array[int]
    duplicates: list[int]
    released: list[int]


@dataclass(frozen=True, slots=True)
class TailAdded:
    """Result of `add_tail`. Not added: the page is the caller's still. `released` is the caller's from now on."""

    added: bool
    released: list[int]

    def __bool__(self) -> bool:
        return self.added
