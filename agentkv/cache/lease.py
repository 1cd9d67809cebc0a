"""A running call's hold on its path through the tree, and on the private pages behind it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from agentkv_radix import Node, Partial

__all__ = ["Lease", "PageCopy"]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The first `num_tokens` slots of the page `source` are wanted in the page `destination`."""

    source: int
    destination: int
    num_tokens: int


@dataclass(slots=True, eq=False)
class Lease:
    """Made by `PrefixCache.lookup`, grown by `allocate` and `commit`, given back once by `release`.

        |--- tree's pages, locked ---|--- private pages ---|
        |-- num_cached_tokens --|
        |------- num_tokens (their KV exists) ------|
                                     |-- open_tokens -|         the last, partly filled page

    `page_ids` is the sequence's page table row: page ids in order, the tree's first. The tree owns the first
    `num_tree_pages` of them, the lease the rest.
    """

    namespace: bytes
    node: Node | None
    """The held node, which ends where the tree's pages end; None for a call that does not touch the tree."""
    page_ids: array[int] = field(default_factory=lambda: array("i"))
    num_tree_pages: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    copy: PageCopy | None = None
    """What the device must copy before the first forward; None where the hit ends at a page boundary."""
    open_tokens: bytearray = field(default_factory=bytearray)
    misses: dict[str, int] = field(default_factory=dict)
    """Prompt tokens to compute, by cause; final once `allocate` has succeeded."""
    owner: str | None = None
    admitted: bool = False
    released: bool = False
    partial: Partial | None = None
    """Where the copy comes from."""
    held_source: Node | None = None
    """The hold on the page that is to be copied, until the first commit."""
