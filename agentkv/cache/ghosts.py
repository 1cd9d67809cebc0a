"""What was evicted: enough to say whether a token that must be computed was once resident."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sortedcontainers import SortedList

from agentkv_radix import Event, HashPage, chain_hash, common_tokens

__all__ = ["Ghosts", "Remembered"]


@dataclass(frozen=True, slots=True)
class Remembered:
    """Behind the asked position: tokens once resident, and how far any remembered path went that passes there."""

    num_tokens: int
    reach: int


class Ghosts:
    """Evicted pages, at most `capacity` of them, the oldest forgotten first. They explain misses and never make a hit.

    A page is known by what stands before it and by its tokens: `parent_hash + tokens`. Kept in byte order, the pages
    behind one prefix stand together, and the one that shares the most tokens with a prompt is a neighbour of the
    prompt's place, so a prompt that ends or leaves inside an evicted page is told exactly, whatever its siblings were.
    Full pages also have their chained hash, by which a path is followed. A hash collision would mislabel a cause,
    nothing more. Costs O(log capacity) per evicted page and per page of a remembered path, nothing on a hit.
    """

    def __init__(self, capacity: int, *, page_size: int, hash_page: HashPage) -> None:
        self._capacity = capacity
        self._page_bytes = 4 * page_size
        self._hash_page = hash_page
        self._reach: OrderedDict[bytes, int] = OrderedDict()
        """By chained hash of a full page: how far any path through it ever went."""
        self._pages: OrderedDict[bytes, None] = OrderedDict()
        self._order: SortedList[bytes] = SortedList()
        """The keys of `_pages`."""

    def __len__(self) -> int:
        return len(self._pages)

    def on_event(self, event: Event) -> None:
        """Listen to the tree: remember what pressure evicts."""
        if event.kind != "evicted" or event.cause != "pressure" or self._capacity == 0:
            return
        parent, tokens, size = event.parent_hash, event.token_ids, self._page_bytes
        for index, page_hash in enumerate(event.page_hashes):
            page = tokens[index * size : (index + 1) * size]
            if len(page) == size:
                # It may have been evicted before, and longer paths may have gone through it then.
                self._reach[page_hash] = max(event.reach, self._reach.pop(page_hash, 0))
            self._remember(parent + page)
            parent = page_hash
        while len(self._reach) > self._capacity:
            self._reach.popitem(last=False)

    def _remember(self, key: bytes) -> None:
        if key in self._pages:
            self._pages.move_to_end(key)
            return
        self._pages[key] = None
        self._order.add(key)
        if len(self._pages) > self._capacity:
            oldest, _ = self._pages.popitem(last=False)
            self._order.remove(oldest)

    def recall(self, parent_hash: bytes, packed: bytes, start: int) -> Remembered:
        """How many tokens of `packed` from token `start` on, a page boundary, were resident behind `parent_hash`."""
        size, offset = self._page_bytes, 4 * start
        if not self._pages:
            return Remembered(0, 0)
        # The page before may be resident again after it was evicted: the paths of that time are remembered here only.
        reach = self._reach.get(parent_hash, 0)
        while len(page := packed[offset : offset + size]) == size:
            page_hash = chain_hash(parent_hash, page, hash_page=self._hash_page)
            known = self._reach.get(page_hash)
            if known is None:
                break
            reach, parent_hash, offset = max(reach, known), page_hash, offset + size
        return Remembered(offset // 4 - start + self._tokens_of_page(parent_hash, page), reach)

    def _tokens_of_page(self, parent_hash: bytes, page: bytes) -> int:
        """The most tokens that `page` shares with an evicted page behind `parent_hash`."""
        place = self._order.bisect_left(parent_hash + page)
        best = 0
        for key in self._order[max(0, place - 1) : place + 1]:
            if key.startswith(parent_hash):
                best = max(best, common_tokens(page, key[len(parent_hash) :]))
        return best
