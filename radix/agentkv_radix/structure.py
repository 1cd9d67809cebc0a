"""What every operation of the tree is made of: nodes hung in and taken out, splits, holds, and the counters of it."""

from __future__ import annotations

from array import array

from .children import Children
from .errors import HoldError
from .events import EventKind, Listener, heard_kinds, run_event
from .hashing import HashPage, chain_hashes, root_hash
from .leaves import Leaves
from .node import Node, Partial, TailAdded
from .policy import Policy
from .tokens import TOKEN_BYTES, common_tokens, equal_pages

__all__ = ["Structure"]


class Structure:
    """Roots, nodes and holds, with the counters always right and the evictable leaves always filed.

    Two rules stand over all of it. A hold counts on every node from where it stands up to the root, so a count of
    zero says that nothing below is held either, and a parent is never less held than a child. And a split leaves the
    lower half its identity, so a hold, a match or a policy's note on a node stays true: the upper half is new and
    inherits all counts, since every hold below it passes through it.
    """

    def __init__(self, page_size: int, policy: Policy, listener: Listener | None, hash_page: HashPage) -> None:
        self.page_size = page_size
        self._page_bytes = TOKEN_BYTES * page_size
        self._hash = hash_page
        self._listener = listener
        self._heard = heard_kinds(listener)
        self._roots: dict[bytes, Node] = {}
        self._leaves = Leaves(policy)
        self._on_hit = self._leaves.hook("on_hit")
        self._on_insert = self._leaves.hook("on_insert")
        self._on_evict = self._leaves.hook("on_evict")
        self._spare = self._leaves.hook("spare")
        self._clock = 0
        self._serial = 0
        self._num_pages = 0
        self._num_tokens = 0
        self._num_nodes = 0
        self._num_leaves = 0
        self._num_locked = 0
        self._num_pinned = 0
        self._num_held = 0
        """Pages of nodes with a lock or a pin; the others are evictable."""

    # ---- looking ----

    def _descend(self, node: Node, packed: bytes, offset: int, limit: int) -> tuple[Node, int, int]:
        """Follow whole pages of `packed[offset:limit]` down from the end of `node`, changing nothing.

        Returns the node that holds the last matched page, how many of its pages matched, and the offset behind them.
        Costs, for each node: one hash of a page, one dict access, one memcmp of the edge.
        """
        page_bytes, hash_page = self._page_bytes, self._hash
        pages = len(node.page_ids)
        while limit - offset >= page_bytes and (children := node.children) is not None:
            page = packed[offset : offset + page_bytes]
            child = children.find(hash_page(node.page_hashes[-1] + page), page)
            if child is None:
                break
            node, edge = child, child.tokens
            pages = len(node.page_ids)
            if len(edge) > limit - offset or not packed.startswith(edge, offset):
                pages = equal_pages(edge, packed, offset, limit, page_bytes)
                return node, pages, offset + pages * page_bytes
            offset += len(edge)
        return node, pages, offset

    def _nearest_page(self, node: Node, pages: int, packed: bytes, offset: int, limit: int) -> Partial | None:
        """The page behind page `pages` of `node` that shares the most tokens with `packed[offset:limit]`."""
        rest = packed[offset : min(offset + self._page_bytes - TOKEN_BYTES, limit)]
        if not rest:
            return None
        if pages < len(node.page_ids):
            source, index = node, pages
            start = pages * self._page_bytes
            shared = common_tokens(rest, bytes(node.tokens[start : start + len(rest)]))
        elif node.children is not None:
            index = 0
            source, shared = node.children.nearest(rest)
        else:
            return None
        if not shared:
            return None
        return Partial(source.page_ids[index], shared, source, offset // TOKEN_BYTES, source.depth + index)

    # ---- nodes ----

    def _new_root(self, namespace: bytes) -> Node:
        """A root that is not registered: what a match in an unknown namespace stands on."""
        self._serial += 1
        hashes = [root_hash(namespace, hash_page=self._hash)]
        return Node(
            namespace=namespace,
            serial=self._serial,
            parent=None,
            tokens=bytearray(),
            page_ids=array("i"),
            page_hashes=hashes,
            head=b"",
            now=self._clock,
        )

    def _root(self, namespace: bytes) -> Node:
        """The registered root of a namespace, made where there is none."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new_root(namespace)
        return root

    def _attach(
        self, parent: Node, tokens: bytes, page_ids: array[int], owner: str | None, *, is_tail: bool = False
    ) -> Node:
        """Hang a new leaf, which nobody holds, below `parent`; it is filed by the caller once its holds are known."""
        self._serial += 1
        node = Node(
            namespace=parent.namespace,
            serial=self._serial,
            parent=parent,
            tokens=bytearray(tokens),
            page_ids=page_ids,
            page_hashes=chain_hashes(parent.page_hashes[-1], tokens, self._page_bytes, self._hash),
            head=tokens[: self._page_bytes],
            now=self._clock,
            is_tail=is_tail,
        )
        if parent.children is None:
            parent.children = Children(node)
            if parent.parent is not None:
                self._num_leaves -= 1
            if parent.key is not None:
                self._leaves.remove(parent)
        else:
            parent.children.add(node)
        self._num_nodes += 1
        self._num_leaves += 1
        self._num_pages += len(page_ids)
        self._num_tokens += len(tokens) // TOKEN_BYTES
        if owner is not None:
            node.add_owner(owner)
        self._raise_reach(node)
        if self._on_insert is not None:
            self._on_insert(node)
        return node

    def _detach(self, node: Node) -> None:
        """Take a leaf that nobody holds out of the tree; its parent may become a leaf, or an empty root that goes."""
        parent = node.parent
        assert parent is not None, f"{node} is a root"
        assert node.children is None, f"{node} has children"
        assert not node.is_held, f"{node} is held"
        if node.key is not None:
            self._leaves.remove(node)
        node.alive = False
        self._num_nodes -= 1
        self._num_leaves -= 1
        self._num_pages -= len(node.page_ids)
        self._num_tokens -= len(node.tokens) // TOKEN_BYTES
        assert parent.children is not None
        if parent.children.count > 1:
            parent.children.remove(node)
            return
        parent.children = None
        if parent.parent is not None:
            self._num_leaves += 1
        if not parent.is_held:
            self._settle(parent)

    def _split(self, node: Node, pages: int, cause: str) -> Node:
        """Cut `node` behind `pages` of its pages and return the upper half, which is new. O(pages of the edge)."""
        parent, cut = node.parent, pages * self._page_bytes
        assert 0 < pages < len(node.page_ids), f"{node} cannot be cut behind page {pages}"
        assert parent is not None, f"{node} is a root"
        assert parent.children is not None, f"{parent} does not know {node}"
        self._serial += 1
        upper = Node(
            namespace=node.namespace,
            serial=self._serial,
            parent=parent,
            tokens=node.tokens[:cut],
            page_ids=node.page_ids[:pages],
            page_hashes=node.page_hashes[:pages],
            head=node.head,
            now=node.last_access,
        )
        for field in (
            "created",
            "hits",
            "owners",
            "priority",
            "expires",
            "superseded",
            "lock_ref",
            "pin_ref",
            "reach",
        ):
            setattr(upper, field, getattr(node, field))
        parent.children.replace(node, upper)
        del node.tokens[:cut], node.page_ids[:pages], node.page_hashes[:pages]
        node.parent = upper
        node.head = bytes(node.tokens[: self._page_bytes])
        node.start = upper.end
        node.depth += pages
        upper.children = Children(node)
        self._num_nodes += 1
        self._tell_run("split", upper, 0, cause)
        return upper

    def _raise_reach(self, node: Node) -> None:
        """Tell the ancestors how far a path through them goes now. O(depth), and less where they knew."""
        end = node.end
        walk: Node | None = node
        while walk is not None and (walk.reach < end or walk is node):
            walk.reach = max(walk.reach, end)
            walk = walk.parent

    def _grow(self, node: Node, packed: bytes, page_ids: array[int], owner: str | None) -> None:
        """Lengthen the node of a running call in place. Amortised O(new pages) + O(depth)."""
        old_pages, page_hash = node.num_pages, node.page_hashes[-1]
        for start in range(0, len(packed), self._page_bytes):
            page_hash = self._hash(page_hash + packed[start : start + self._page_bytes])
            node.page_hashes.append(page_hash)
        node.tokens += packed
        node.page_ids.extend(page_ids)
        node.end += len(packed) // TOKEN_BYTES
        node.last_access = self._clock
        node.superseded = False
        self._num_pages += len(page_ids)
        self._num_tokens += len(packed) // TOKEN_BYTES
        self._num_locked += len(page_ids)
        self._num_held += len(page_ids)
        self._raise_reach(node)
        self._tell_run("stored", node, old_pages, "extend", owner)

    def _shorten(self, leaf: Node, kept: int) -> None:
        self._num_pages -= leaf.num_pages - kept
        self._num_tokens -= (leaf.num_pages - kept) * self.page_size
        del leaf.tokens[kept * self._page_bytes :], leaf.page_ids[kept:], leaf.page_hashes[kept:]
        leaf.end = leaf.start + kept * self.page_size
        self._leaves.refile(leaf)

    # ---- holds ----

    def _add_lock(self, node: Node, above: Node | None = None) -> None:
        """One lock on every node from `node` up to below `above` (None: the root included). O(nodes)."""
        walk: Node | None = node
        while walk is not None and walk is not above:
            if not walk.lock_ref:
                self._num_locked += len(walk.page_ids)
                if not walk.pin_ref:
                    self._become_held(walk)
            walk.lock_ref += 1
            walk = walk.parent

    def _add_pin(self, node: Node) -> None:
        walk: Node | None = node
        while walk is not None:
            if not walk.pin_ref:
                self._num_pinned += len(walk.page_ids)
                if not walk.lock_ref:
                    self._become_held(walk)
            walk.pin_ref += 1
            walk = walk.parent

    def _drop_lock(self, node: Node) -> list[int]:
        """Take one lock off the path; returns the page of a covered tail that went with its last hold."""
        walk: Node | None = node
        while walk is not None:
            walk.lock_ref -= 1
            if not walk.lock_ref:
                self._num_locked -= len(walk.page_ids)
                if not walk.pin_ref:
                    self._num_held -= len(walk.page_ids)
            walk = walk.parent
        return self._settle(node)

    def _drop_pin(self, node: Node) -> list[int]:
        walk: Node | None = node
        while walk is not None:
            walk.pin_ref -= 1
            if not walk.pin_ref:
                self._num_pinned -= len(walk.page_ids)
                if not walk.lock_ref:
                    self._num_held -= len(walk.page_ids)
            walk = walk.parent
        return self._settle(node)

    def _become_held(self, node: Node) -> None:
        self._num_held += len(node.page_ids)
        if node.key is not None:
            self._leaves.remove(node)

    def _settle(self, node: Node) -> list[int]:
        """Find the place of a node that may have lost its last hold or child: filed, dropped, or left as it is.

        Only the node where a hold stood can become evictable by its end: the nodes above have a child.
        """
        if node.is_held or node.children is not None:
            return []
        if node.parent is None:
            self._roots.pop(node.namespace, None)
            node.alive = False
            return []
        if node.is_tail and self._is_covered(node):
            return self._drop_tail(node)
        self._leaves.file(node)
        return []

    def _require_hold(self, count: int, node: Node, kind: str) -> None:
        if not count:
            raise HoldError(f"{node} has no {kind}: it was released already, or never taken")

    def _stamp(self, node: Node) -> None:
        """The path down to `node` is in use at this tick. O(nodes)."""
        now = self._tick()
        walk: Node | None = node
        while walk is not None:
            walk.last_access = now
            walk = walk.parent

    def _hit(self, node: Node, owner: str | None, above: Node | None = None) -> None:
        """Note on the path up to below `above` that a call uses it, and tell the policy. O(nodes)."""
        now, on_hit = self._tick(), self._on_hit
        walk = node
        while walk is not above and walk.parent is not None:
            walk.last_access = now
            walk.hits += 1
            walk.superseded = False
            if owner is not None:
                walk.add_owner(owner)
            if on_hit is not None:
                on_hit(walk)
            walk = walk.parent

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # ---- tails ----

    def _store_tail(self, parent: Node, packed: bytes, ids: array[int], owner: str | None) -> TailAdded:
        if parent.children is not None and parent.children.covers(packed):
            return TailAdded(False, [])
        self._tick()
        tail = self._attach(parent, packed, ids, owner, is_tail=True)
        self._leaves.file(tail)
        self._tell_run("stored", tail, 0, "tail", owner)
        return TailAdded(True, self._cover_tails(tail))

    def _is_covered(self, tail: Node) -> bool:
        assert tail.parent is not None, f"{tail} is a root"
        assert tail.parent.children is not None, f"{tail.parent} does not know {tail}"
        return tail.parent.children.covers(tail.head, besides=tail)

    def _drop_tail(self, tail: Node) -> list[int]:
        """Take out a tail that nobody holds, since a sibling begins with it."""
        self._tell_run("evicted", tail, 0, "covered")
        self._detach(tail)
        return list(tail.page_ids)

    def _cover_tails(self, node: Node) -> list[int]:
        """Drop the sibling tail that the new `node` begins with; a held one stays until its last hold ends.

        One is all there can be: of two tails that are prefixes of `node`, the shorter is a prefix of the longer, so
        it was dropped when that came, or is held.
        """
        assert node.parent is not None, f"{node} is a root"
        assert node.parent.children is not None, f"{node.parent} does not know {node}"
        tail = node.parent.children.prefix_tail(node.head)
        return self._drop_tail(tail) if tail is not None and not tail.is_held else []

    # ---- telling the listener ----

    def _tell_run(self, kind: EventKind, node: Node, first: int, cause: str, owner: str | None = None) -> None:
        """Tell of the pages of `node` from its page `first` on; what nobody hears is not built."""
        if self._listener is not None and kind in self._heard:
            self._listener.on_event(run_event(kind, node, first, self.page_size, cause, owner))
