"""A prefix cache with a witness beside it: plain dicts of what is resident and what ever was, and slots that tell.

`Witness` hears the events of the cache and keeps, for each resident prefix that ends a page or a tail, its page. From
that and from the history of what was ever stored it says, without any tree, what a look-up must find and why the rest
is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentkv.cache import Event, Lease, PrefixCache
from agentkv.errors import PoolFull
from agentkv.usage import no_misses
from support.fake_engine import Memory, values_of

__all__ = ["CacheUnderTest", "Witness"]

Tokens = tuple[int, ...]
Key = tuple[bytes, Tokens]


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class Witness:
    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.resident: dict[Key, int] = {}
        self.ever: set[Key] = set()
        """Every prefix that was ever resident, by the end of its last page or tail."""
        self.evicted: list[Key] = []
        self._prefix_of: dict[bytes, Tokens] = {}

    def on_event(self, event: Event) -> None:
        if event.kind not in ("stored", "evicted"):
            return
        above = self._prefix_of[event.parent_hash] if event.start else ()
        tokens = tuple(memoryview(event.token_ids).cast("I"))
        for index, (page_id, page_hash) in enumerate(zip(event.page_ids, event.page_hashes, strict=True)):
            prefix = above + tokens[: (index + 1) * self.page_size]
            self._prefix_of[page_hash] = prefix
            key = (event.namespace, prefix)
            if event.kind == "stored":
                assert key not in self.resident, "stored twice"
                self.resident[key] = page_id
                self.ever.add(key)
            else:
                assert self.resident.pop(key) == page_id
                if event.cause == "pressure":
                    self.evicted.append(key)

    def paths(self, namespace: bytes, keys: Sequence[Key] | set[Key] | dict[Key, int]) -> list[Tokens]:
        return [prefix for space, prefix in keys if space == namespace]

    def whole(self, namespace: bytes, tokens: Tokens) -> int:
        """Tokens of resident whole pages at the head of `tokens`."""
        end = 0
        while end + self.page_size <= len(tokens) and (namespace, tokens[: end + self.page_size]) in self.resident:
            end += self.page_size
        return end

    def found(self, namespace: bytes, tokens: Tokens) -> int:
        """Tokens that can be had: whole pages, and the part of one page more."""
        end = self.whole(namespace, tokens)
        pages = [path for path in self.paths(namespace, self.resident) if end < len(path) <= end + self.page_size]
        return max([end, *(common(tokens, path) for path in pages)])

    def misses(self, namespace: bytes, tokens: Tokens) -> dict[str, int]:
        """Why each token must be computed, from history alone."""
        misses, length, size = no_misses(), len(tokens), self.page_size
        if self.found(namespace, tokens) == length:
            misses["last_token"] = 1
            return misses
        ever = self.paths(namespace, self.ever)
        hit = self.found(namespace, tokens)
        whole = self.whole(namespace, tokens)
        known = max([hit, *(common(tokens, path) for path in ever)])
        misses["evicted"] = known - hit
        if known >= size:
            reach = max(len(path) for path in ever if common(tokens, path) >= max(whole, size))
            misses["diverged"] = max(0, min(length, reach) - known)
        misses["never_seen"] = length - known - misses["diverged"]
        return misses


class CacheUnderTest:
    """Each operation on the cache, on its slots and on the witness; `compare` after each."""

    def __init__(self, num_pages: int, *, page_size: int, **options) -> None:
        self.witness = Witness(page_size)
        self.cache = PrefixCache(num_pages + 1, page_size=page_size, listener=self.witness, **options)
        self.memory = Memory(self.cache)
        self.leases: dict[Lease, list[int]] = {}
        """Live leases, and the tokens that each is to hold."""
        self.prompts: dict[Lease, int] = {}
        """How many of them each was looked up for."""
        self.past: list[Key] = []
        """What former leases held at their end, for a next turn to go on from."""

    def lookup(self, tokens: Sequence[int], namespace: bytes = b"", *, reuse: bool = True) -> Lease:
        cache, tokens = self.cache, tuple(tokens)
        expected = min(self.witness.found(namespace, tokens), len(tokens) - 1) if reuse else 0
        misses = self.witness.misses(namespace, tokens) if reuse else no_misses() | {"cache_disabled": len(tokens)}
        before = cache.counters()
        lease = cache.lookup(list(tokens), namespace, reuse=reuse)
        assert lease.num_cached_tokens == lease.num_tokens == expected
        assert lease.misses == misses
        assert sum(lease.misses.values()) == len(tokens) - lease.num_cached_tokens
        assert cache.counters().evicted_pages == before.evicted_pages
        self.leases[lease] = list(tokens)
        self.prompts[lease] = len(tokens)
        return lease

    def allocate(self, lease: Lease, seq_len: int) -> bool:
        """True where there was room. Evicts no more than is short, and nothing that anybody holds."""
        cache = self.cache
        before, evicted, copy = cache.counters(), len(self.witness.evicted), lease.copy
        needed = cache.pages_for(seq_len) - len(lease.page_ids)
        own = self._held(lease)
        refusal: PoolFull | None = None
        try:
            page_ids = cache.allocate(lease, seq_len)
        except PoolFull as error:
            refusal = error
        if refusal is not None:
            assert needed > before.free + before.cached
            assert (refusal.needed, refusal.free, refusal.evictable) == (needed, before.free, before.cached)
            assert cache.counters() == before
            return False
        assert len(page_ids) * cache.page_size >= seq_len
        assert len(self.witness.evicted) - evicted <= max(0, needed - before.free)
        assert not own & set(self.witness.evicted[evicted:]), "its own path was evicted"
        if copy is not None and lease.copy is None:
            assert needed > before.free + before.cached, "a copy was given up though there was room"
            assert lease.num_cached_tokens == lease.num_tree_pages * cache.page_size
        assert sum(lease.misses.values()) + lease.num_cached_tokens == self.prompts[lease]
        return True

    def compute(self, lease: Lease, seq_len: int) -> None:
        """Forward and commit up to seq_len, for which there are pages."""
        tokens = self.leases[lease]
        self.memory.compute(lease, tokens, seq_len)
        self.cache.commit(lease, tokens[lease.num_tokens : seq_len])
        assert lease.num_tokens == seq_len
        for end in range(self.cache.page_size, seq_len + 1, self.cache.page_size):
            page = self.witness.resident[lease.namespace, tuple(tokens[:end])]
            assert page == lease.page_ids[end // self.cache.page_size - 1], "the lease is to use the resident page"

    def release(self, lease: Lease, *, keep_partial: bool) -> None:
        tokens = tuple(self.leases.pop(lease)[: lease.num_tokens])
        self.past = [*self.past[-7:], (lease.namespace, tokens)]
        kept = keep_partial and lease.admitted and (lease.held_source is None)
        self.cache.release(lease, keep_partial=keep_partial)
        self.cache.release(lease, keep_partial=keep_partial)
        if kept:
            assert self.witness.found(lease.namespace, tokens) == len(tokens), "what was kept is not there"

    def _held(self, lease: Lease) -> set[Key]:
        size, tokens = self.cache.page_size, self.leases[lease]
        return {(lease.namespace, tuple(tokens[:end])) for end in range(size, lease.num_tree_pages * size + 1, size)}

    def compare(self) -> None:
        """Books, and dictionary against tree; every page of a live lease holds what it should."""
        cache, witness = self.cache, self.witness
        cache.check()
        assert cache.tree.num_pages == len(witness.resident)
        assert len(set(witness.resident.values())) == len(witness.resident)
        for (_, prefix), page_id in witness.resident.items():
            assert page_id > 0
            size = cache.page_size
            above = prefix[: (len(prefix) - 1) // size * size]
            assert not above or any(path == above for _, path in witness.resident), "a parent left before its child"
        owners: Counter[int] = Counter()
        for lease, tokens in self.leases.items():
            assert self._held(lease) <= witness.resident.keys(), "a page of a live lease was evicted"
            owners.update(lease.page_ids[lease.num_tree_pages :])
            for key in self._held(lease):
                page = witness.resident[key]
                assert page == lease.page_ids[len(key[1]) // cache.page_size - 1]
            if lease.held_source is None:
                self.memory.read(lease.page_ids, values_of(lease.namespace, tokens[: lease.num_tokens]))
            elif lease.copy is not None:
                assert lease.copy.source in witness.resident.values(), "the source of a copy was evicted"
        assert max(owners.values(), default=0) <= 1, "a private page has two owners"
        assert not owners.keys() & set(witness.resident.values())
