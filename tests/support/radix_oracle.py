"""A prefix cache that a child could check: a dict of prefixes, one of tails, a list of holds.

`Pair` does each operation on the real tree and pool and on these dicts, and compares everything after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from agentkv_radix import Match, Node, PagePool, RadixTree, StaleMatch

Tokens = tuple[int, ...]
Key = tuple[bytes, Tokens]
"""A namespace and a prefix: it names the page that ends the prefix."""


@dataclass(eq=False)
class Hold:
    kind: str
    """lock, page or pin"""
    node: Node
    key: Key


def node_tokens(node: Node) -> Tokens:
    """All tokens from the root to the end of a node."""
    above = node_tokens(node.parent) if node.parent is not None else ()
    return above + tuple(memoryview(bytes(node.tokens)).cast("I"))


def common(left: Tokens, right: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


class Pair:
    """A tree with its pool, and the dicts that must say the same."""

    def __init__(self, tree: RadixTree, num_pages: int = 40) -> None:
        self.tree = tree
        self.pool = PagePool(num_pages)
        self.page_size = tree.page_size
        self.pages: dict[Key, int] = {}
        """Whole pages, by the prefix that they end."""
        self.tails: dict[Key, int] = {}
        self.holds: list[Hold] = []
        self.born: dict[Key, int] = {}
        """When each prefix was stored last, to tell pages that came back from pages that stayed."""
        self.births = 0
        self.remembered: list[tuple[Match, Key, int | None]] = []
        self.reach: dict[int, int] = {}

    # ---- questions to the dicts ----

    def cut(self, tokens: Tokens) -> tuple[Tokens, Tokens]:
        whole = len(tokens) - len(tokens) % self.page_size
        return tokens[:whole], tokens[whole:]

    def matched(self, namespace: bytes, tokens: Tokens) -> int:
        end = 0
        while end + self.page_size <= len(tokens) and (namespace, tokens[: end + self.page_size]) in self.pages:
            end += self.page_size
        return end

    def siblings(self, namespace: bytes, parent: Tokens) -> dict[Tokens, int]:
        """Last pages of the prefixes that follow `parent`, tails too, with their page ids."""
        found = {}
        for (space, prefix), page_id in [*self.pages.items(), *self.tails.items()]:
            rest = prefix[len(parent) :]
            if space == namespace and prefix[: len(parent)] == parent and 0 < len(rest) <= self.page_size:
                found[rest] = page_id
        return found

    def held(self, kinds: str = "lock page pin") -> set[Key]:
        """Prefixes of pages and tails that a hold keeps."""
        keys: set[Key] = set()
        for hold in self.holds:
            if hold.kind in kinds.split():
                space, tokens = hold.key
                ends = range(self.page_size, len(tokens) + 1, self.page_size)
                keys.update((space, tokens[:end]) for end in ends)
                keys.add(hold.key)
        return keys & (self.pages.keys() | self.tails.keys())

    # ---- operations on both ----

    def take(self, n: int) -> list[int] | None:
        """Pages to write into, by eviction where it must be; None where there are not enough."""
        if self.pool.num_free + self.tree.num_evictable_pages < n:
            return None
        if self.pool.num_free < n:
            self.evict(n - self.pool.num_free)
        return list(self.pool.allocate(n))

    def insert(self, namespace: bytes, tokens: Tokens) -> None:
        needed = -(-len(tokens) // self.page_size)
        page_ids = self.take(needed)
        if page_ids is None:
            return
        result = self.tree.insert(list(tokens), page_ids, namespace=namespace)
        whole, rest = self.cut(tokens)
        canonical, duplicates, released = self._store_pages(namespace, (), whole, page_ids)
        if rest:
            tail_id = page_ids[-1]
            if any(sibling[: len(rest)] == rest for sibling in self.siblings(namespace, whole)):
                duplicates.append(tail_id)
                covering = result.page_ids[-1]
                assert any(
                    sibling[: len(rest)] == rest and page_id == covering
                    for sibling, page_id in self.siblings(namespace, whole).items()
                )
                canonical.append(covering)
            else:
                released += self._store_tail(namespace, tokens, tail_id)
                canonical.append(tail_id)
        assert list(result.page_ids) == canonical
        assert result.duplicates == duplicates
        assert sorted(result.released) == sorted(released)
        assert node_tokens(result.node) == whole
        self._hand_over(page_ids, duplicates, released)

    def match(self, namespace: bytes, tokens: Tokens, max_tokens: int | None = None) -> Match:
        before = self.snapshot()
        match = self.tree.match(list(tokens), namespace=namespace, max_tokens=max_tokens)
        limited = tokens if max_tokens is None else tokens[:max_tokens]
        end = self.matched(namespace, limited)
        assert match.num_tokens == end
        expected = [self.pages[namespace, tokens[:stop]] for stop in range(self.page_size, end + 1, self.page_size)]
        assert list(match.page_ids) == expected
        rest = limited[end:][: self.page_size - 1]
        shared = {page_id: common(rest, page) for page, page_id in self.siblings(namespace, tokens[:end]).items()}
        best = max(shared.values(), default=0)
        assert (match.partial.num_tokens if match.partial else 0) == best
        if match.partial:
            assert shared[match.partial.page_id] == best
            assert match.partial.start == end
        assert self.snapshot() == before
        return match

    def lock(self, namespace: bytes, tokens: Tokens, kind: str = "lock") -> Hold:
        match = self.match(namespace, tokens)
        node = self.tree.lock(match) if kind == "lock" else self.tree.pin(match)
        assert node.end == match.num_tokens
        assert list(match.page_ids) == [
            self.pages[namespace, tokens[:stop]] for stop in range(self.page_size, node.end + 1, self.page_size)
        ]
        hold = Hold(kind, node, (namespace, tokens[: node.end]))
        self.holds.append(hold)
        return hold

    def remember(self, namespace: bytes, tokens: Tokens) -> None:
        match = self.tree.match(list(tokens), namespace=namespace)
        key = (namespace, tokens[: match.num_tokens])
        self.remembered.append((match, key, self.born.get(key)))

    def lock_remembered(self, index: int) -> None:
        """An old match is locked where its pages stayed, whatever else happened, and refused elsewhere."""
        match, key, born = self.remembered.pop(index)
        stayed = not key[1] or (key in self.pages and self.born[key] == born)
        try:
            node = self.tree.lock(match)
        except StaleMatch:
            assert not stayed
        else:
            assert stayed
            self.holds.append(Hold("lock", node, key))

    def lock_page(self, namespace: bytes, tokens: Tokens) -> None:
        match = self.match(namespace, tokens)
        if match.partial is not None:
            node = self.tree.lock_page(match.partial)
            self.holds.append(Hold("page", node, (namespace, node_tokens(node))))

    def release(self, hold: Hold) -> None:
        self.holds.remove(hold)
        release = {"lock": self.tree.unlock, "page": self.tree.unlock_page, "pin": self.tree.unpin}[hold.kind]
        released = release(hold.node)
        expected = []
        if hold.key in self.tails and hold.key not in self.held():
            whole, rest = self.cut(hold.key[1])
            if any(other != rest and other[: len(rest)] == rest for other in self.siblings(hold.key[0], whole)):
                expected = [self.tails.pop(hold.key)]
        assert released == expected
        self._hand_over([], [], released)

    def extend(self, hold: Hold, new: Tokens) -> None:
        page_ids = self.take(len(new) // self.page_size)
        if page_ids is None:
            return
        namespace, before = hold.key
        result = self.tree.extend(hold.node, list(new), page_ids)
        canonical, duplicates, released = self._store_pages(namespace, before, before + new, page_ids)
        assert list(result.page_ids) == canonical
        assert result.duplicates == duplicates
        assert sorted(result.released) == sorted(released)
        hold.node, hold.key = result.node, (namespace, before + new)
        self._hand_over(page_ids, duplicates, released)

    def add_tail(self, hold: Hold, rest: Tokens) -> None:
        page_ids = self.take(1)
        if page_ids is None:
            return
        namespace, before = hold.key
        refused = any(sibling[: len(rest)] == rest for sibling in self.siblings(namespace, before))
        result = self.tree.add_tail(hold.node, list(rest), page_ids[0])
        assert result.added is not refused
        released = [] if refused else self._store_tail(namespace, before + rest, page_ids[0])
        assert result.released == released
        self._hand_over(page_ids, page_ids if refused else [], released)

    def evict(self, num_pages: int) -> None:
        held = self.held()
        evictable = {page_id: key for key, page_id in [*self.pages.items(), *self.tails.items()] if key not in held}
        evicted = self.tree.evict(num_pages)
        assert len(evicted) == len(set(evicted)) == min(num_pages, len(evictable))
        for page_id in evicted:
            key = evictable[page_id]
            (self.pages if key in self.pages else self.tails).pop(key)
        self._hand_over([], [], evicted)

    def supersede(self, namespace: bytes, tokens: Tokens, start: int) -> None:
        self.tree.supersede(list(tokens), start, namespace=namespace)
        end = self.matched(namespace, tokens)
        best = max((common(tokens[end:], page) for page in self.siblings(namespace, tokens[:end])), default=0)
        for node in self.nodes():
            # A tail is on the path if it is the end of it; a covered one, still held, is beside it.
            on_path = node.end == end + best if node.is_tail else node.end <= end
            if on_path and node.namespace == namespace and node_tokens(node) == tokens[: node.end]:
                assert node.superseded or node.start < start

    # ---- the same on the dicts ----

    def _store_pages(
        self, namespace: bytes, before: Tokens, tokens: Tokens, page_ids: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        canonical, duplicates, released = [], [], []
        for stop, page_id in zip(
            range(len(before) + self.page_size, len(tokens) + 1, self.page_size), page_ids, strict=False
        ):
            key = (namespace, tokens[:stop])
            if key in self.pages:
                duplicates.append(page_id)
            else:
                released += self._cover(namespace, tokens[:stop], tokens[: stop - self.page_size])
                self.pages[key] = page_id
                self.births += 1
                self.born[key] = self.births
            canonical.append(self.pages[key])
        return canonical, duplicates, released

    def _store_tail(self, namespace: bytes, tokens: Tokens, page_id: int) -> list[int]:
        released = self._cover(namespace, tokens, self.cut(tokens)[0])
        self.tails[namespace, tokens] = page_id
        return released

    def _cover(self, namespace: bytes, tokens: Tokens, parent: Tokens) -> list[int]:
        held = self.held()
        gone = [
            key
            for key in self.tails
            if key[0] == namespace
            and len(key[1]) > len(parent)
            and tokens[: len(key[1])] == key[1]
            and self.cut(key[1])[0] == parent
            and key not in held
        ]
        return [self.tails.pop(key) for key in gone]

    def _hand_over(self, own: list[int], kept: list[int], released: list[int]) -> None:
        self.pool.to_tree([page_id for page_id in own if page_id not in kept])
        self.pool.free(kept)
        self.pool.to_private(released)
        self.pool.free(released)

    # ---- comparing ----

    def nodes(self) -> Iterator[Node]:
        stack = [child for root in self.tree._roots.values() for child in root.children or ()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children or ())

    def snapshot(self) -> dict[Key, int]:
        """What the tree holds, as the dicts would say it."""
        found: dict[Key, int] = {}
        for node in self.nodes():
            tokens = node_tokens(node)
            for index, page_id in enumerate(node.page_ids):
                stop = node.end if node.is_tail else node.start + (index + 1) * self.page_size
                assert (node.namespace, tokens[:stop]) not in found, "the same prefix is in the tree twice"
                found[node.namespace, tokens[:stop]] = page_id
        return found

    def compare(self) -> None:
        tree, pool = self.tree, self.pool
        tree.check()
        pool.check()
        assert self.snapshot() == {**self.pages, **self.tails}
        assert pool.num_private == 0
        assert tree.num_pages == pool.num_tree == len(self.pages) + len(self.tails)
        assert tree.num_locked_pages == len(self.held("lock page"))
        assert tree.num_pinned_pages == len(self.held("pin"))
        assert tree.num_evictable_pages == tree.num_pages - len(self.held())
        for _, prefix in self.pages:
            assert len(prefix) == self.page_size or any(key[1] == prefix[: -self.page_size] for key in self.pages)
        for hold in self.holds:
            assert hold.node.alive
            assert (hold.node.namespace, node_tokens(hold.node)) == hold.key
        self._compare_counts()
        self._compare_reach()

    def _compare_counts(self) -> None:
        """lock_ref and pin_ref of each node are exactly the holds that pass through it."""
        locks: Counter[int] = Counter()
        pins: Counter[int] = Counter()
        for hold in self.holds:
            walk: Node | None = hold.node
            while walk is not None:
                (pins if hold.kind == "pin" else locks)[walk.serial] += 1
                walk = walk.parent
        for node in [*self.nodes(), *self.tree._roots.values()]:
            assert (node.lock_ref, node.pin_ref) == (locks[node.serial], pins[node.serial])

    def _compare_reach(self) -> None:
        """reach never shrinks while a node lives, and is at least what is below it now."""
        now = {}
        for node in self.nodes():
            key = (node.namespace, node_tokens(node))
            deepest = max(
                len(tokens)
                for space, tokens in (*self.pages, *self.tails)
                if space == key[0] and (tokens == key[1] if node.is_tail else tokens[: node.end] == key[1])
            )
            assert node.reach >= max(deepest, self.reach.get(node.serial, 0))
            now[node.serial] = node.reach
        self.reach = now
