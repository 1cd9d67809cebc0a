"""Chained page hashes: a page's hash names its tokens and all that stand before them, the namespace included.

    root_hash(namespace) --> page 0 --> page 1 --> ...
        hash of a page = hash_page(hash of the page before + its tokens)

They depend on nothing but their input (no PYTHONHASHSEED, no address), so they may leave the process. The tree finds
children by them and then compares tokens, so even a constant `hash_page` gives right answers, only slower.
"""

from __future__ import annotations

from collections.abc import Callable

from xxhash import xxh3_128_digest

__all__ = ["HashPage", "chain_hash", "chain_hashes", "root_hash", "xxh3_128"]

HashPage = Callable[[bytes], bytes]
"""A digest of bytes: deterministic, of any length."""


xxh3_128: HashPage = xxh3_128_digest
"""16 bytes of XXH3-128: not cryptographic, about 10 GB/s. The C function itself, since it runs once a page."""


def root_hash(namespace: bytes, *, hash_page: HashPage = xxh3_128) -> bytes:
    """The hash that stands before the first page of a namespace."""
    return hash_page(namespace)


def chain_hash(parent_hash: bytes, page_tokens: bytes, *, hash_page: HashPage = xxh3_128) -> bytes:
    """The hash of a page (packed tokens) that follows the page or root with `parent_hash`. About 0.2 µs."""
    return hash_page(parent_hash + page_tokens)


def chain_hashes(parent_hash: bytes, tokens: bytes, page_bytes: int, hash_page: HashPage) -> list[bytes]:
    """The chained hashes of a run of pages; a rest below a page gets one too. Costs about 0.25 µs a page."""
    hashes = []
    for start in range(0, len(tokens), page_bytes):
        parent_hash = hash_page(parent_hash + tokens[start : start + page_bytes])
        hashes.append(parent_hash)
    return hashes
