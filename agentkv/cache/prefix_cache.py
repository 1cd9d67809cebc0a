"""Tree, pool, policy and leases together: the one place where pages change hands."""

from __future__ import annotations

import logging
from array import array
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentkv.counters import PagesByName
from agentkv.errors import PoolFull
from agentkv.policies import make_policy
from agentkv.usage import no_misses
from agentkv_radix import (
    Event,
    HashPage,
    Listener,
    Match,
    PagePool,
    Policy,
    RadixTree,
    TokenIds,
    heard_kinds,
    pack,
    xxh3_128,
)

from .ghosts import Ghosts
from .lease import Lease, PageCopy
from .translate import translated

__all__ = ["CacheCounters", "PrefixCache"]

_log = logging.getLogger("agentkv")


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """Pages by state, which are disjoint and add up to the usable pages, and what happened since the start."""

    free: int
    cached: int
    """Owned by the tree and evictable now."""
    in_use: int
    """Private to a running call, or locked by one."""
    pinned: int
    peak: int
    """The most pages that were ever not free at once."""
    evicted_pages: int
    """Pages given up for room, ever."""
    evictions: int
    """Runs of pages given up for room, ever."""
    evicted_for: Mapping[str, int]
    """evicted_pages by the owner of the lease that needed the room, in a bounded number of rows. Never changed."""


class PrefixCache:
    """Which tokens have keys and values, where, and who holds them. Knows nothing of devices.

    A lease's life: `lookup` → `allocate` → (copy, forward, `commit`, `allocate`) … → `release`. Every public method
    leaves the books balanced, whatever it raises; `check` proves it.
    """

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int = 16,
        policy: str | Policy = "lru",
        listener: Listener | None = None,
        ghost_pages: int | None = None,
        hash_page: HashPage = xxh3_128,
    ) -> None:
        """`num_pages` counts the null page. `ghost_pages`: evicted pages remembered, by default 4 * num_pages."""
        self.page_size = page_size
        self.pool = PagePool(num_pages)
        self.ghosts = Ghosts(
            4 * num_pages if ghost_pages is None else ghost_pages, page_size=page_size, hash_page=hash_page
        )
        self._listener = listener
        self._told_kinds = heard_kinds(listener)
        self.kinds = frozenset({"evicted"}) | self._told_kinds
        self.tree = RadixTree(page_size=page_size, policy=make_policy(policy), listener=self, hash_page=hash_page)
        self._leases: set[Lease] = set()
        self._peak = 0
        self._evicted_pages = 0
        self._evictions = 0
        self._evicted_for = PagesByName()

    @property
    def usable_pages(self) -> int:
        """Pages that can hold tokens: all but the null page."""
        return self.pool.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def on_event(self, event: Event) -> None:
        """Hear the tree, then tell the ghosts and the listener given at the start."""
        if event.kind == "evicted" and event.cause == "pressure":
            self._evictions += 1
            self._evicted_pages += len(event.page_ids)
        self.ghosts.on_event(event)
        if self._listener is not None and event.kind in self._told_kinds:
            try:
                self._listener.on_event(event)
            except (Exception, CancelledError):
                # The tree is in the middle of a change, which must not be left half done for somebody's report. A
                # CancelledError, which is no Exception, comes from futures that a listener asks, and cancels nobody.
                _log.exception("the listener raised on a %s event; it is not called any more", event.kind)
                self._listener = None

    # -- looking up ---------------------------------------------------------------------------------------------

    @translated
    def num_resident_tokens(self, token_ids: TokenIds, namespace: bytes = b"") -> int:
        """Tokens of the prompt's head that a look-up would supply now. Changes nothing. O(nodes on the path)."""
        packed = pack(token_ids)
        found = self.tree.match(packed, namespace=namespace, max_tokens=len(packed) // 4 - 1)
        return found.num_tokens + (found.partial.num_tokens if found.partial else 0)

    @translated
    def lookup(
        self, token_ids: TokenIds, namespace: bytes = b"", *, owner: str | None = None, reuse: bool = True
    ) -> Lease:
        """Lock the longest resident head of the prompt, at most len - 1 tokens, so that the last one yields logits.

        The matched pages stay the tree's; the caller holds them, and the source page of `lease.copy`, until `release`.
        With reuse=False nothing is matched, and what the call computes is still handed to the tree. The hit is counted,
        and the policy told, when `allocate` first succeeds: a call refused for want of room leaves no trace.
        O(nodes on the path); naming the causes of a miss adds O(pages) where evicted pages are recognised.
        """
        packed = pack(token_ids)
        length = len(packed) // 4
        if length < 1:
            raise ValueError("a prompt needs at least one token")
        found = self.tree.match(packed, namespace=namespace, max_tokens=length if reuse else 0)
        whole = reuse and found.num_tokens + (found.partial.num_tokens if found.partial else 0) == length
        if whole:
            found = self.tree.match(packed, namespace=namespace, max_tokens=length - 1)
        misses = self._explain(packed, found, whole) if reuse else no_misses() | {"cache_disabled": length}
        page_ids = array("i", found.page_ids)
        node = self.tree.lock(found)
        try:
            held_source = self.tree.lock_page(found.partial) if found.partial is not None else None
        except BaseException:
            self._take_back(self.tree.unlock(node))
            raise
        lease = Lease(
            namespace=namespace,
            node=node,
            page_ids=page_ids,
            num_tree_pages=len(page_ids),
            num_tokens=found.num_tokens,
            num_cached_tokens=found.num_tokens,
            misses=misses,
            owner=owner,
            partial=found.partial,
            held_source=held_source,
        )
        if found.partial is not None:
            shared, start = found.partial.num_tokens, 4 * found.num_tokens
            # The destination is known once allocate has a page; page 0, the null page, stands for "none yet".
            lease.copy = PageCopy(found.partial.page_id, 0, shared)
            lease.num_tokens += shared
            lease.num_cached_tokens += shared
            lease.open_tokens += packed[start : start + 4 * shared]
        self._leases.add(lease)
        return lease

    def private_lease(self, num_tokens: int, *, owner: str | None = None) -> Lease:
        """A lease for a call that neither reads nor feeds the tree: all of its pages are freed at release."""
        lease = Lease(b"", None, misses=no_misses() | {"cache_disabled": num_tokens}, owner=owner)
        self._leases.add(lease)
        return lease

    def _explain(self, packed: bytes, found: Match, whole: bool) -> dict[str, int]:
        """Split the tokens that must be computed by cause; exact, from the tree and the ghosts as they are now."""
        misses = no_misses()
        length = len(packed) // 4
        hit = found.num_tokens + (found.partial.num_tokens if found.partial else 0)
        if whole:
            misses["last_token"] = length - hit
            return misses
        ghost = self.ghosts.recall(self.tree.page_hash(found), packed, found.num_tokens)
        known = max(hit, found.num_tokens + ghost.num_tokens)
        misses["evicted"] = known - hit
        if known >= self.page_size:
            # Of the node that the match ends in, not of the page that shares a few more tokens: every path that goes
            # on behind the whole pages is left here.
            reach = max(ghost.reach, found.node.reach if found.num_tokens else 0)
            misses["diverged"] = max(0, min(length, reach) - known)
        misses["never_seen"] = length - known - misses["diverged"]
        return misses

    # -- growing ------------------------------------------------------------------------------------------------

    def allocate(self, lease: Lease, seq_len: int) -> array[int]:
        """Give the lease pages for `seq_len` tokens, evicting as needed; returns its page ids, all of them.

        New pages are private to the lease. All or nothing: on PoolFull nothing was evicted and nothing changed.
        Where a copy's source and destination do not both fit, and giving up the copy makes room, `lease.copy` becomes
        None and `num_cached_tokens` drops to whole pages. Never evicts the lease's own path or copy source.
        O(pages wanted), and O(log leaves) per leaf evicted.
        """
        self.allocate_together([(lease, seq_len)])
        return lease.page_ids

    @translated
    def allocate_together(self, wanted: Sequence[tuple[Lease, int]]) -> None:
        """`allocate` for several leases, for all of them or for none: PoolFull leaves everything as it was."""
        short = 0
        for lease, seq_len in wanted:
            assert not lease.released, "a released lease cannot grow"
            short += max(0, self.pages_for(seq_len) - len(lease.page_ids))
        if short > self.pool.num_free:
            optional = [lease for lease, _ in wanted if lease.copy is not None and not lease.admitted]
            # Leases that grow together are samples of one prompt, and have one owner.
            self._make_room(short, optional, wanted[0][0].owner)
        for lease, seq_len in wanted:
            self._grow(lease, seq_len)

    def _make_room(self, needed: int, optional: list[Lease], owner: str | None) -> None:
        """Free pages until there are `needed`. The copies of the leases in `optional` may be given up for it."""
        pool, tree = self.pool, self.tree
        room = pool.num_free + tree.num_evictable_pages
        if needed > room:
            sources = [lease.held_source for lease in optional if lease.held_source is not None]
            if needed > room + tree.num_pages_freed_by(*sources):
                raise PoolFull(needed, pool.num_free, tree.num_evictable_pages, tree.num_pinned_pages)
        while needed > pool.num_free + tree.num_evictable_pages:
            self._give_up_copy(optional.pop())
        if needed > pool.num_free:
            given_up = tree.evict(needed - pool.num_free)
            self._take_back(given_up)
            self._evicted_for.count(owner, len(given_up))

    def _grow(self, lease: Lease, seq_len: int) -> None:
        """Take pages that are free, and tell the tree of the hit if this is the lease's first growth."""
        missing = self.pages_for(seq_len) - len(lease.page_ids)
        if missing > 0:
            lease.page_ids.extend(self.pool.allocate(missing))
            self._peak = max(self._peak, self.usable_pages - self.pool.num_free)
        if lease.copy is not None and lease.copy.destination == 0:
            lease.copy = PageCopy(lease.copy.source, lease.page_ids[lease.num_tree_pages], lease.copy.num_tokens)
        if not lease.admitted:
            lease.admitted = True
            if lease.node is not None:
                self.tree.record_hit(lease.node, lease.partial if lease.copy else None, owner=lease.owner)

    def _give_up_copy(self, lease: Lease) -> None:
        assert lease.copy is not None
        lease.misses["evicted"] += lease.copy.num_tokens
        lease.num_tokens -= lease.copy.num_tokens
        lease.num_cached_tokens -= lease.copy.num_tokens
        lease.open_tokens.clear()
        lease.copy = None
        self._drop_source(lease)

    def _drop_source(self, lease: Lease) -> None:
        if lease.held_source is not None:
            released = self.tree.unlock_page(lease.held_source)
            lease.held_source = None
            self._take_back(released)

    def _take_back(self, page_ids: Sequence[int]) -> None:
        """Pages that the tree gave up become free."""
        if page_ids:
            self.pool.to_private(page_ids)
            self.pool.free(page_ids)

    # -- feeding ------------------------------------------------------------------------------------------------

    @translated
    def commit(self, lease: Lease, new_token_ids: TokenIds) -> array[int]:
        """Record that the keys and values of `new_token_ids`, which follow the lease's tokens, exist now.

        Pages that are full go to the tree at once, so that others can hit them while this call still runs. Where the
        tree already has the same page the lease moves onto it and its own copy is freed: the returned page ids replace
        the former ones. The first commit lets go of the copy's source. O(new pages + nodes made).
        """
        assert not lease.released, "a released lease cannot commit"
        packed = pack(new_token_ids)
        lease.num_tokens += len(packed) // 4
        assert lease.num_tokens <= len(lease.page_ids) * self.page_size, "tokens committed without pages for them"
        lease.open_tokens += packed
        self._drop_source(lease)
        if lease.node is None:
            lease.open_tokens.clear()
            return lease.page_ids
        full = len(lease.open_tokens) // (4 * self.page_size)
        if full:
            self._hand_over(lease, full)
        return lease.page_ids

    def _hand_over(self, lease: Lease, full: int) -> None:
        """Give the first `full` private pages to the tree."""
        assert lease.node is not None
        size = 4 * self.page_size * full
        first = lease.num_tree_pages
        own = lease.page_ids[first : first + full]
        done = self.tree.extend(lease.node, bytes(lease.open_tokens[:size]), own, owner=lease.owner)
        del lease.open_tokens[:size]
        lease.node = done.node
        lease.page_ids[first : first + full] = array("i", done.page_ids)
        lease.num_tree_pages += full
        self.pool.to_tree(own)
        self._take_back(done.duplicates)
        self._take_back(done.released)

    # -- letting go ---------------------------------------------------------------------------------------------

    @translated
    def release(self, lease: Lease, *, keep_partial: bool) -> None:
        """End the lease: unlock its path, free its private pages. A second call does nothing.

        With keep_partial the last, partly filled page becomes a tail of the tree, if it is of use there.
        O(nodes on the path + private pages).
        """
        if lease.released:
            return
        lease.released = True
        self._leases.discard(lease)
        # Until the first commit the open tokens are promised by a copy that has not been made: no slot holds them.
        has_tail = bool(lease.open_tokens) and lease.held_source is None
        self._drop_source(lease)
        private = lease.page_ids[lease.num_tree_pages :]
        try:
            if lease.node is not None and keep_partial and has_tail:
                tail = self.tree.add_tail(lease.node, bytes(lease.open_tokens), private[0], owner=lease.owner)
                if tail.added:
                    self.pool.to_tree(private[:1])
                    del private[:1]
                self._take_back(tail.released)
            if lease.node is not None and lease.admitted:
                self.tree.touch(lease.node)
        finally:
            # What comes before is a favour to later calls; giving back what is held is owed in any case.
            if lease.node is not None:
                self._take_back(self.tree.unlock(lease.node))
            self.pool.free(private)

    @translated
    def supersede(self, token_ids: TokenIds, start: int, namespace: bytes = b"") -> None:
        """Mark what is cached of `token_ids` wholly behind token `start` as replaced by a later turn.

        A later hit clears the mark. O(nodes on the path).
        """
        self.tree.supersede(token_ids, start, namespace=namespace)

    # -- the books ----------------------------------------------------------------------------------------------

    @property
    def num_leases(self) -> int:
        """Leases not yet released."""
        return len(self._leases)

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values exist: the tree's, and those in private pages of leases. O(leases)."""
        private = sum(lease.num_tokens - lease.num_tree_pages * self.page_size for lease in self._leases)
        return self.tree.num_tokens + private

    def counters(self) -> CacheCounters:
        """The books from counters kept all along: O(1), and O(owners) where one of them made others give up pages."""
        pinned = self.tree.num_pinned_pages
        cached = self.tree.num_evictable_pages
        return CacheCounters(
            free=self.pool.num_free,
            cached=cached,
            in_use=self.usable_pages - self.pool.num_free - cached - pinned,
            pinned=pinned,
            peak=self._peak,
            evicted_pages=self._evicted_pages,
            evictions=self._evictions,
            evicted_for=self._evicted_for.frozen(),
        )

    @translated
    def check(self) -> None:
        """Prove the books by a full recount; AssertionError names what is off. O(everything), for tests and strict."""
        self.pool.check()
        self.tree.check()
        assert self.pool.num_tree == self.tree.num_pages, (
            f"pool counts {self.pool.num_tree} tree pages, the tree holds {self.tree.num_pages}"
        )
        private = sum(len(lease.page_ids) - lease.num_tree_pages for lease in self._leases)
        assert self.pool.num_private == private, f"{self.pool.num_private} private pages, leases hold {private}"
        for lease in self._leases:
            open_tokens = lease.num_tokens - lease.num_tree_pages * self.page_size
            assert open_tokens >= 0, f"lease has fewer tokens than its {lease.num_tree_pages} tree pages hold"
            if lease.node is not None:
                assert lease.node.end == lease.num_tree_pages * self.page_size, "a lease's node ends elsewhere"
                assert len(lease.open_tokens) == 4 * open_tokens, "a lease's open tokens were miscounted"

    def check_idle(self) -> None:
        """`check`, and that nothing is private or locked."""
        self.check()
        assert not self._leases, f"{len(self._leases)} leases are still held at idle"
        assert self.pool.num_private == 0, f"{self.pool.num_private} pages are private at idle"
        assert self.tree.num_locked_pages == 0, f"{self.tree.num_locked_pages} pages are locked at idle"
