"""The prefix tree: which pages hold the KV of which token prefix, who uses them, and which go first.

    root(namespace) ── 512 pages ──┬── 128 pages ── tail of 9 tokens
                                   └── 40 pages ──┬── 3 pages
                                                  └── tail of 2 tokens

Read to learn, with thanks: RadixAttention (Zheng et al. 2024, "SGLang: Efficient Execution of Structured Language
Model Programs", section 3) for the idea of a radix tree over a KV cache with leaf eviction.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from .check import check_tree
from .events import Listener, copy_event, path_event
from .hashing import HashPage, chain_hash, root_hash, xxh3_128
from .node import Extended, Inserted, Match, Node, Partial, TailAdded, path_page_ids
from .policy import LRU, Policy
from .structure import Structure
from .tokens import TOKEN_BYTES, TokenIds, pack

__all__ = ["RadixTree"]


class RadixTree(Structure):
    """Prefixes of tokens, in whole pages, and below them tails of one partly filled page.

    Page ids are the caller's until a call hands them over (`extend`, `add_tail`, `insert`) and again once a result
    gives them back (`evict`, `released`, `duplicates`, `unlock`); what the tree owns is never written. The tree knows
    no pool and no memory. Not thread-safe: one thread owns it. Token ids may be given as a list, an array or packed
    (`pack`); packing once and passing the bytes on saves 6 ns a token in each call.
    """

    def __init__(
        self,
        *,
        page_size: int = 16,
        policy: Policy | None = None,
        listener: Listener | None = None,
        hash_page: HashPage = xxh3_128,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1 token, not {page_size}")
        super().__init__(page_size, LRU() if policy is None else policy, listener, hash_page)

    # ---- counters, all O(1) ----

    @property
    def num_pages(self) -> int:
        """Pages that the tree owns, tails included."""
        return self._num_pages

    @property
    def num_tokens(self) -> int:
        """Tokens in them."""
        return self._num_tokens

    @property
    def num_evictable_pages(self) -> int:
        """Pages without lock and pin, all of which `evict` can give back, one after another."""
        return self._num_pages - self._num_held

    @property
    def num_locked_pages(self) -> int:
        return self._num_locked

    @property
    def num_pinned_pages(self) -> int:
        """Pages under a pin, from the root to where it stands. A page may be locked as well."""
        return self._num_pinned

    @property
    def num_nodes(self) -> int:
        """Nodes and tails, roots not counted."""
        return self._num_nodes

    @property
    def num_leaves(self) -> int:
        """Nodes without children, held or not, roots not counted."""
        return self._num_leaves

    @property
    def namespaces(self) -> tuple[bytes, ...]:
        """Namespaces with a page or a hold in them, oldest first. O(namespaces)."""
        return tuple(self._roots)

    def check(self) -> None:
        """Prove every invariant by recount, rehashing all pages. Raises InvariantError. O(pages): for tests, strict."""
        check_tree(self)

    # ---- looking ----

    def match(self, token_ids: TokenIds, *, namespace: bytes = b"", max_tokens: int | None = None) -> Match:
        """What the tree holds of the first `max_tokens` of `token_ids` (None: of all). Looks, changes nothing.

        Costs O(nodes on the path): a page hash and one memcmp of the edge each, where it leaves an edge a bisection
        of that edge, and one in the byte order of the siblings for `Match.partial`. Nothing is held afterwards.
        """
        packed = pack(token_ids)
        limit = len(packed)
        if max_tokens is not None:
            if max_tokens < 0:
                raise ValueError(f"max_tokens must be 0 or more, not {max_tokens}")
            limit = min(limit, TOKEN_BYTES * max_tokens)
        root = self._roots.get(namespace)
        if root is None:
            return Match(namespace, self._new_root(namespace), 0, 0, None)
        node, pages, offset = self._descend(root, packed, 0, limit)
        partial = self._nearest_page(node, pages, packed, offset, limit)
        return Match(namespace, node, node.depth + pages, offset // TOKEN_BYTES, partial)

    def page_hash(self, at: Match | Node) -> bytes:
        """The chained hash at the end of a match's whole pages or of a node; of its namespace for a root.

        Raises StaleMatch where a matched page was evicted since. O(nodes that a split put above the match's own).
        """
        if isinstance(at, Node):
            return at.page_hashes[-1]
        node = at.located()
        return node.page_hashes[at.num_pages - node.depth - 1 if at.num_pages else -1]

    def chain_hash(self, parent_hash: bytes, page_tokens: bytes) -> bytes:
        """The hash that a page of packed tokens has, or would have, behind `parent_hash`. One hash of a page."""
        return chain_hash(parent_hash, page_tokens, hash_page=self._hash)

    def root_hash(self, namespace: bytes = b"") -> bytes:
        """The hash that stands before the first page of a namespace. One hash of it."""
        return root_hash(namespace, hash_page=self._hash)

    # ---- holding ----

    def lock(self, match: Match) -> Node:
        """Hold what `match` found; the node returned ends exactly at `match.num_tokens`.

        Where that is inside an edge the node is split; for 0 tokens it is the root. A hold is no hit: a caller that is
        refused afterwards leaves no trace (see `record_hit`). Release it with `unlock`, once. Raises StaleMatch where
        a matched page was evicted since; changes in between that left them do no harm. Costs O(nodes on the path), and
        O(pages of one edge) for a split.
        """
        node = self._end_node(match, "lock")
        self._add_lock(node)
        return node

    def record_hit(self, node: Node, partial: Partial | None = None, *, owner: str | None = None) -> None:
        """The caller goes on from what it holds: the path to `node`, and the page of `partial`.

        Stamps and counts the nodes of the path, clears `superseded`, tells the policy and the listener. Of a partial
        hit a tail is counted; a longer edge that shares but a part of a page stays as old as it was. Costs O(nodes on
        the path), and O(tokens) more for a listener that hears hits.
        """
        self._require_hold(node.lock_ref, node, "lock")
        self._hit(node, owner)
        if self._listener is not None and node.end and "hit" in self._heard:
            self._listener.on_event(path_event(node, owner))
        if partial is not None:
            source = partial.owner_node()
            if source.is_tail:
                self._hit(source, owner, source.parent)
            if self._listener is not None and "hit" in self._heard:
                self._listener.on_event(copy_event(partial, source, self.page_size, owner))

    def touch(self, node: Node) -> None:
        """The path to `node` is in use now, without a new hit: what a call that ran for long says at its end.

        O(nodes on the path).
        """
        self._stamp(node)

    def num_pages_freed_by(self, *nodes: Node) -> int:
        """Pages that would become evictable if one lock on each of `nodes` were released, a node named as often as it
        is to lose one. O(nodes on the paths)."""
        released: Counter[Node] = Counter()
        for node in nodes:
            walk: Node | None = node
            while walk is not None:
                released[walk] += 1
                walk = walk.parent
        return sum(node.num_pages for node, locks in released.items() if node.lock_ref == locks and not node.pin_ref)

    def unlock(self, node: Node) -> list[int]:
        """Release one lock that stands on `node`.

        Returns the page that the tree gave up with it, if `node` is a covered tail and this was its last hold: the
        caller's from then on. Raises HoldError where there is no lock. Costs O(nodes on the path) + O(log leaves).
        """
        self._require_hold(node.lock_ref, node, "lock")
        # Of two holders that stand here nobody can tell which one leaves: neither lengthens the node from now on.
        node.writer = False
        return self._drop_lock(node)

    def lock_page(self, partial: Partial) -> Node:
        """Keep the page of a partial hit from leaving until it was copied; release with `unlock_page`.

        It holds the whole node that the page is in, without a split: the copy takes a moment, and a split meanwhile
        does no harm, since the page then lies in that node or above it. Raises StaleMatch. Costs O(nodes on the path).
        """
        source = partial.owner_node()
        self._add_lock(source)
        return source

    def unlock_page(self, node: Node) -> list[int]:
        """Release what `lock_page` returned. Returns page ids as `unlock` does."""
        self._require_hold(node.lock_ref, node, "lock")
        return self._drop_lock(node)

    def pin(self, match: Match) -> Node:
        """As `lock`, a hold across calls: counted apart in `pin_ref`, no hit, no event. Release with `unpin`, once.

        Raises StaleMatch. Costs O(nodes on the path), and O(pages of one edge) for a split.
        """
        node = self._end_node(match, "pin")
        self._add_pin(node)
        self._stamp(node)
        return node

    def unpin(self, node: Node) -> list[int]:
        """Release one pin on `node`. Returns page ids as `unlock` does; it makes the path no younger.

        Raises HoldError where there is no pin. Costs O(nodes on the path) + O(log leaves).
        """
        self._require_hold(node.pin_ref, node, "pin")
        return self._drop_pin(node)

    # ---- storing ----

    def extend(self, node: Node, token_ids: TokenIds, page_ids: Sequence[int], *, owner: str | None = None) -> Extended:
        """Hand over whole pages that follow `node`, on which the caller has one lock; the lock moves with them.

        The node returned ends exactly where these tokens end. Pages that are resident already are taken over and the
        caller keeps its own (`duplicates`); the rest is the tree's. A new run becomes a child, or lengthens `node` if
        this caller made it, alone holds it and nothing follows it: so a long answer is one node. Costs O(new pages)
        for their hashes, O(nodes) otherwise, and O(pages of one edge) for a split. Raises HoldError without a lock,
        ValueError for what is no run of whole pages with an id each.
        """
        packed, ids = self._checked_run(token_ids, page_ids)
        if len(packed) % self._page_bytes:
            raise ValueError(
                f"extend takes whole pages of {self.page_size} tokens, not {len(packed) // TOKEN_BYTES} "
                f"tokens; hand the rest over with add_tail."
            )
        self._require_place(node)
        if not packed:
            return Extended(node, array("i"), [], [])
        self._tick()
        may_grow = node.writer and node.lock_ref == 1 and not node.pin_ref and node.children is None
        if may_grow:
            self._grow(node, packed, ids, owner)
            return Extended(node, ids, [], [])
        node.writer = False
        end, resident = self._walk_resident(node, packed, "extend")
        released: list[int] = []
        canonical = path_page_ids(end, node)
        if resident < len(ids):
            end = self._attach(end, packed[resident * self._page_bytes :], ids[resident:], owner)
            end.writer = True
            self._tell_run("stored", end, 0, "extend", owner)
            released = self._cover_tails(end)
            canonical.extend(end.page_ids)
        self._add_lock(end, node)
        self._mark_used(end, node, owner)
        return Extended(end, canonical, _unneeded(ids, canonical, resident), released)

    def add_tail(self, node: Node, token_ids: TokenIds, page_id: int, *, owner: str | None = None) -> TailAdded:
        """Hand over one partly filled page (1..page_size-1 tokens) behind `node`, which the caller holds.

        Not added, and the page still the caller's, where a page or tail that begins with these tokens is there. A
        sibling tail that is a prefix of them goes (`released`), or is dropped with its last hold. The new tail is
        held by nobody. Costs O(log siblings).
        """
        packed, ids = self._checked_run(token_ids, (page_id,))
        if not 0 < len(packed) < self._page_bytes:
            raise ValueError(
                f"a tail has 1 to {self.page_size - 1} tokens, not {len(packed) // TOKEN_BYTES}; "
                f"whole pages go to extend."
            )
        self._require_place(node)
        return self._store_tail(node, packed, ids, owner)

    def insert(
        self,
        token_ids: TokenIds,
        page_ids: Sequence[int],
        *,
        namespace: bytes = b"",
        owner: str | None = None,
    ) -> Inserted:
        """Hand over the pages of a whole prefix, one id for each begun page; a rest below a page becomes a tail.

        Pages whose tokens are resident come back in `duplicates`, a refused tail's page too: still the caller's. Ids
        equal to the resident ones are no duplicates. Nothing is held afterwards. Costs as `match` and `extend`.
        """
        packed, ids = self._checked_run(token_ids, page_ids)
        self._tick()
        if not packed:
            return Inserted(self._roots.get(namespace) or self._new_root(namespace), array("i"), [], [])
        whole = len(packed) - len(packed) % self._page_bytes
        num_whole = whole // self._page_bytes
        end, resident = self._walk_resident(self._root(namespace), packed[:whole], "insert")
        canonical, released = path_page_ids(end, None), []
        if resident < num_whole:
            end = self._attach(end, packed[resident * self._page_bytes : whole], ids[resident:num_whole], owner)
            self._tell_run("stored", end, 0, "insert", owner)
            released = self._cover_tails(end)
            canonical.extend(end.page_ids)
            self._leaves.file(end)
        self._mark_used(end, None, owner)
        duplicates = _unneeded(ids[:num_whole], canonical, resident)
        if whole < len(packed):
            tail = self._store_tail(end, packed[whole:], ids[num_whole:], owner)
            released += tail.released
            if tail.added:
                canonical.extend(ids[num_whole:])
            else:
                covering = self._nearest_page(end, end.num_pages, packed, whole, len(packed))
                assert covering is not None, "a tail is refused only where a page begins with it"
                canonical.append(covering.page_id)
                duplicates += [page_id for page_id in ids[num_whole:] if page_id != covering.page_id]
        return Inserted(end, canonical, duplicates, released)

    # ---- giving up ----

    def evict(self, num_pages: int) -> list[int]:
        """Give up to `num_pages` pages back, from the end of the leaf that the policy likes least, and so on.

        No more than needed: a leaf is shortened where that is enough. Fewer come back where nothing more is
        evictable. The pages are the caller's from then on. A parent never leaves before its children, a held path
        never leaves. Costs O(log leaves) for each leaf touched.
        """
        evicted: list[int] = []
        spared: set[int] = set()
        while len(evicted) < num_pages and len(self._leaves):
            leaf = self._leaves.first()
            # Each leaf is asked once, so a policy that spares everybody delays and cannot stop an eviction.
            if self._spare is not None and leaf.serial not in spared and self._spare(leaf):
                spared.add(leaf.serial)
                self._leaves.refile(leaf)
                continue
            if self._on_evict is not None:
                self._on_evict(leaf)
            kept = max(0, leaf.num_pages - (num_pages - len(evicted)))
            self._tell_run("evicted", leaf, kept, "pressure")
            evicted.extend(leaf.page_ids[kept:])
            if kept:
                self._shorten(leaf, kept)
            else:
                self._detach(leaf)
        return evicted

    def supersede(self, token_ids: TokenIds, start: int, *, namespace: bytes = b"") -> int:
        """Flag the nodes on the path of `token_ids` that lie wholly at or behind token `start`; a hit clears the flag.

        Nodes that go on beyond these tokens belong to somebody else as well and are left. Evictable leaves are filed
        again with the policy's new key. Returns the number of pages flagged anew. Costs as `match`.
        """
        if start < 0:
            raise ValueError(f"start must be 0 or more, not {start}")
        match = self.match(token_ids, namespace=namespace)
        walk: Node | None = match.node
        if match.partial is not None and match.partial.node.end == match.num_tokens + match.partial.num_tokens:
            walk = match.partial.node
        elif match.node.end > match.num_tokens:
            walk = match.node.parent
        flagged = 0
        while walk is not None and walk.parent is not None and walk.start >= start:
            if not walk.superseded:
                walk.superseded = True
                flagged += walk.num_pages
                if walk.key is not None:
                    self._leaves.refile(walk)
            walk = walk.parent
        return flagged

    # ---- parts of the above ----

    def _end_node(self, match: Match, cause: str) -> Node:
        """The node that ends exactly where the match does, split off where there is none yet."""
        if not match.num_tokens:
            return self._root(match.namespace)
        node = match.located()
        pages = match.num_pages - node.depth
        return node if pages == node.num_pages else self._split(node, pages, cause)

    def _walk_resident(self, node: Node, packed: bytes, cause: str) -> tuple[Node, int]:
        """Follow `packed` behind `node` over what is resident; the node where that ends, and how many pages it was."""
        end, pages, offset = self._descend(node, packed, 0, len(packed))
        if pages < end.num_pages:
            end = self._split(end, pages, cause)
        return end, offset // self._page_bytes

    def _mark_used(self, node: Node, above: Node | None, owner: str | None) -> None:
        """Stamp what a commit or an insertion walked over: it is in use now, though nobody was spared work by it."""
        walk: Node | None = node
        while walk is not None and walk is not above and walk.parent is not None:
            walk.last_access = self._clock
            walk.superseded = False
            if owner is not None:
                walk.add_owner(owner)
            if walk.key is not None:
                self._leaves.refile(walk)
            walk = walk.parent

    def _checked_run(self, token_ids: TokenIds, page_ids: Sequence[int]) -> tuple[bytes, array[int]]:
        """Packed tokens and their page ids; ValueError where they cannot belong together."""
        packed, ids = pack(token_ids), array("i", page_ids)
        needed = -(-len(packed) // self._page_bytes)
        if len(ids) != needed:
            raise ValueError(
                f"{len(packed) // TOKEN_BYTES} tokens take {needed} pages of {self.page_size}, "
                f"and {len(ids)} page ids came"
            )
        if ids and min(ids) < 1:
            raise ValueError(f"page ids start at 1 (page 0 is the null page), and {min(ids)} came")
        return packed, ids

    def _require_place(self, node: Node) -> None:
        """Something may follow `node`: it is held, and no tail."""
        self._require_hold(node.lock_ref, node, "lock")
        if node.is_tail:
            raise ValueError(
                f"nothing can follow {node}: its page is not full. Copy the page and go on from its parent."
            )


def _unneeded(own: array[int], canonical: array[int], resident: int) -> list[int]:
    """The caller's ids of resident pages, less those that are the resident ones themselves."""
    return [mine for mine, there in zip(own[:resident], canonical[:resident], strict=True) if mine != there]
