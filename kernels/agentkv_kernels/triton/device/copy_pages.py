"""Whole pages from some places of a store to others."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["BLOCK", "copy_pages"]

BLOCK = 1024
"""Words of 8 bytes that one program moves."""


@triton.jit
def copy_pages(memory, sources, destinations, page_words, BLOCK: tl.constexpr):
    """Program (i, b) moves block b of page sources[i] to page destinations[i]; no page is in both lists."""
    source = tl.load(sources + tl.program_id(0))
    destination = tl.load(destinations + tl.program_id(0))
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < page_words
    moved = tl.load(memory + source * page_words + words, mask=inside)
    tl.store(memory + destination * page_words + words, moved, mask=inside)
