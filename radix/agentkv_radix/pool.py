"""Page accounting: which page is free, private to one sequence, or owned by the tree.

                 allocate            to_tree
         free ------------> private ----------> tree
              <------------         <----------
                  free               to_private

Page 0 is the null page, where padding writes; it is in none of these states and is never handed out. Pages are ints
only: the pool touches no memory, and says who may write to what.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from .errors import InvariantError, PageStateError, PoolExhausted

__all__ = ["PagePool"]

_FREE, _PRIVATE, _TREE, _NULL = range(4)
_STATE_NAMES = ("free", "private", "owned by the tree", "the null page")
_FREE_RUNS = re.compile(rb"\x00+")


class PagePool:
    """`num_pages` pages, of which page 0 is never handed out; one byte of state each.

    Allocation is first fit by address, which keeps runs ascending and the pool compact. All operations are all or
    nothing: where one page is in the wrong state, none is changed.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (page 0 is the null page), not {num_pages}")
        self._states = bytearray(num_pages)
        self._states[0] = _NULL
        # No page below this one is free; it spares the scan over the full front of the pool.
        self._lowest_free = 1
        self._counts = [num_pages - 1, 0, 0]

    @property
    def num_pages(self) -> int:
        """All pages, the null page included; one less can be used."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        return self._counts[_FREE]

    @property
    def num_private(self) -> int:
        return self._counts[_PRIVATE]

    @property
    def num_tree(self) -> int:
        return self._counts[_TREE]

    def allocate(self, n: int) -> array[int]:
        """`n` free pages, from now on private to the caller: ascending, and in one run where one is long enough.

        All or nothing: raises PoolExhausted(needed, free) and changes nothing. Costs O(n) and a scan (1 byte a page,
        at memchr's speed) from the lowest free page to the run that is taken.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages; the number must be 0 or more")
        if n > self.num_free:
            raise PoolExhausted(n, self.num_free)
        if not n:
            return array("i")
        start = self._states.find(bytes(n), self._lowest_free)
        if start >= 0:
            page_ids = array("i", range(start, start + n))
            self._states[start : start + n] = bytes((_PRIVATE,)) * n
        else:
            page_ids = self._gather(n)
        self._lowest_free = self._next_free(self._lowest_free)
        self._counts[_FREE] -= n
        self._counts[_PRIVATE] += n
        return page_ids

    def free(self, page_ids: Sequence[int]) -> None:
        """Private pages are free from now on. Raises PageStateError for any other page. Costs O(pages)."""
        self._move(page_ids, _PRIVATE, _FREE)
        if page_ids:
            self._lowest_free = min(self._lowest_free, min(page_ids))

    def to_tree(self, page_ids: Sequence[int]) -> None:
        """Private pages belong to the tree from now on: nobody writes to them. Costs O(pages)."""
        self._move(page_ids, _PRIVATE, _TREE)

    def to_private(self, page_ids: Sequence[int]) -> None:
        """Pages that the tree gave up are private to the caller from now on. Costs O(pages)."""
        self._move(page_ids, _TREE, _PRIVATE)

    def check(self) -> None:
        """Prove by recount that free + private + tree = num_pages - 1. Costs O(num_pages); raises InvariantError."""
        counted = [self._states.count(state) for state in (_FREE, _PRIVATE, _TREE)]
        if counted != self._counts or sum(counted) != self.num_pages - 1 or self._states[0] != _NULL:
            raise InvariantError(
                f"the pool of {self.num_pages} pages counts free, private, tree = {self._counts}; "
                f"a recount finds {counted}"
            )
        if _FREE in self._states[: self._lowest_free]:
            raise InvariantError(f"a page below {self._lowest_free} is free, and would never be found")

    def _gather(self, n: int) -> array[int]:
        """The lowest `n` free pages, from as many runs as it takes."""
        page_ids = array("i")
        for run in _FREE_RUNS.finditer(self._states, self._lowest_free):
            page_ids.extend(range(run.start(), min(run.end(), run.start() + n - len(page_ids))))
            if len(page_ids) == n:
                break
        for page_id in page_ids:
            self._states[page_id] = _PRIVATE
        return page_ids

    def _next_free(self, start: int) -> int:
        found = self._states.find(_FREE, start)
        return found if found >= 0 else self.num_pages

    def _move(self, page_ids: Sequence[int], before: int, after: int) -> None:
        n = len(page_ids)
        if not n:
            return
        first, states = page_ids[0], self._states
        if first > 0 and array("i", page_ids) == array("i", range(first, first + n)):
            if states.count(before, first, first + n) != n:
                self._refuse(page_ids, before)
            states[first : first + n] = bytes((after,)) * n
        else:
            # The walk marks as it goes, so a page named twice is found at its second place; then all is undone.
            for done, page_id in enumerate(page_ids):
                if not 0 < page_id < len(states) or states[page_id] != before:
                    for undo in page_ids[:done]:
                        states[undo] = before
                    self._refuse(page_ids[done:], before, named=page_ids[:done])
                states[page_id] = after
        self._counts[before] -= n
        self._counts[after] += n

    def _refuse(self, page_ids: Sequence[int], wanted: int, named: Sequence[int] = ()) -> None:
        """Raise for the first page of `page_ids` that is not in the state `wanted`."""
        for page_id in page_ids:
            if not 0 <= page_id < len(self._states):
                raise PageStateError(page_id, f"outside 0..{len(self._states) - 1}", _STATE_NAMES[wanted])
            if page_id in named:
                raise PageStateError(page_id, "named twice in this call", _STATE_NAMES[wanted])
            if self._states[page_id] != wanted:
                raise PageStateError(page_id, _STATE_NAMES[self._states[page_id]], _STATE_NAMES[wanted])
        raise AssertionError(f"every page of {list(page_ids)} is {_STATE_NAMES[wanted]}")
