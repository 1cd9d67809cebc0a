"""Errors of the host mechanism, all below `RadixError`. The cache translates them into the runtime's own.

RadixError
├── PoolExhausted     more pages were asked for than are free: evict, or wait
├── PageStateError    a page is not in the state that the operation needs (a double free, a foreign page)
├── StaleMatch        the pages that a match found have left the tree since: match again
├── HoldError         a node was used as held that nobody holds (released twice, or never locked)
└── InvariantError    a recount found the books wrong: a bug in this package or in its caller
"""

from __future__ import annotations

__all__ = ["HoldError", "InvariantError", "PageStateError", "PoolExhausted", "RadixError", "StaleMatch"]


class RadixError(Exception):
    """Root of every error that agentkv_radix raises on purpose; plain misuse is a ValueError or TypeError."""


class PoolExhausted(RadixError):
    """Fewer pages are free than were asked for; none was handed out. Figures are in pages."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} pages were asked for and {free} are free; evict some, or ask for fewer.")
        self.needed = needed
        self.free = free


class PageStateError(RadixError):
    """A page is in another state than the operation needs; no page was changed."""

    def __init__(self, page_id: int, state: str, wanted: str) -> None:
        super().__init__(
            f"page {page_id} is {state}, and must be {wanted} for this. "
            f"Was it given up twice, or does it belong to somebody else?"
        )
        self.page_id = page_id
        self.state = state
        self.wanted = wanted


class StaleMatch(RadixError):
    """Pages that a match found have been evicted since; nothing was locked. Match again."""


class HoldError(RadixError):
    """The operation needs a node that the caller holds, and nobody holds this one."""


class InvariantError(RadixError):
    """A recount of the tree or of the pool disagrees with its books."""
