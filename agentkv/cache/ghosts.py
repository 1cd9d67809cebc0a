"""What was evicted: enough to say whether a token that must be computed was once resident."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agentkv_radix import Event, HashPage, chain_hash

__all__ = ["Ghosts", "Remembered"]


@dataclass(frozen=True, slots=True)
class Remembered:
    """Behind the asked position: tokens once resident, and the length of the path they belonged to."""

    num_tokens: int
    reach: int


class Ghosts:
    """Hashes of evicted pages, at most `capacity` of them, the oldest forgotten first.

    Full pages are found by their chained hash, which names the whole prefix; the last page evicted behind a given
    prefix is also kept by its tokens, so that a prompt that ends or leaves inside a page is told exactly. A ghost
    never makes a hit: it only explains a miss. A hash collision would mislabel a cause, nothing more.
    Costs O(pages) per eviction and per look-up of a remembered run, nothing on a hit.
    """

    def __init__(self, capacity: int, *, page_size: int, hash_page: HashPage) -> None:
        self._capacity = capacity
        self._page_bytes = 4 * page_size
        self._hash_page = hash_page
        self._reach: OrderedDict[bytes, int] = OrderedDict()
        self._last_page: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reach)

    def on_event(self, event: Event) -> None:
        """Listen to the tree: remember what pressure evicts."""
        if event.kind != "evicted" or event.cause != "pressure" or self._capacity == 0:
            return
        parent, tokens, size = event.parent_hash, event.token_ids, self._page_bytes
        for index, page_hash in enumerate(event.page_hashes):
            page = tokens[index * size : (index + 1) * size]
            if len(page) == size:
                self._reach.pop(page_hash, None)
                self._reach[page_hash] = event.reach
            self._last_page.pop(parent, None)
            self._last_page[parent] = (page, event.reach)
            parent = page_hash
        while len(self._reach) > self._capacity:
            self._reach.popitem(last=False)
        while len(self._last_page) > self._capacity:
            self._last_page.popitem(last=False)

    def recall(self, parent_hash: bytes, packed: bytes, start: int) -> Remembered:
        """How many tokens of `packed` from token `start` on, a page boundary, were resident behind `parent_hash`."""
        size = self._page_bytes
        offset, reach = 4 * start, 0
        if not self._last_page:
            return Remembered(0, 0)
        while True:
            page = packed[offset : offset + size]
            if len(page) == size:
                page_hash = chain_hash(parent_hash, page, hash_page=self._hash_page)
                known = self._reach.get(page_hash)
                if known is not None:
                    reach, parent_hash, offset = max(reach, known), page_hash, offset + size
                    continue
            last = self._last_page.get(parent_hash)
            if last is not None:
                common = _common_tokens(page, last[0])
                if common:
                    return Remembered(offset // 4 + common - start, max(reach, last[1]))
            return Remembered(offset // 4 - start, reach)


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens, 4 bytes each, that both begin with."""
    length = min(len(left), len(right))
    for index in range(0, length, 4):
        if left[index : index + 4] != right[index : index + 4]:
            return index // 4
    return length // 4
