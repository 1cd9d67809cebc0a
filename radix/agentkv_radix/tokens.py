"""Token ids as bytes, four a token, little-endian and unsigned: what the tree stores, compares and hashes.

Bytes are compared in place by `startswith`, which is one memcmp; a list of ints or a memoryview would be compared
element by element, about seventy times slower.
"""

from __future__ import annotations

import sys
from array import array
from typing import TypeAlias

__all__ = ["TOKEN_BYTES", "TokenIds", "common_tokens", "equal_pages", "pack"]

TOKEN_BYTES = 4
"""Bytes that one packed token takes."""

TokenIds: TypeAlias = "list[int] | tuple[int, ...] | array[int] | bytes"
"""Token ids as callers may give them; bytes are taken as packed already."""

_UNSIGNED = next(code for code in ("I", "L") if array(code).itemsize == TOKEN_BYTES)


def pack(token_ids: TokenIds) -> bytes:
    """Four bytes a token, little-endian; bytes come back as they are, so packing twice costs nothing.

    Costs about 6 ns a token for a list, one memcpy for an unsigned 32-bit array. Raises TypeError for what is no
    list, tuple, array or bytes or holds something that is no int, ValueError for an id outside 0..2**32-1.
    """
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(
                f"packed token ids take {TOKEN_BYTES} bytes each; {len(token_ids)} bytes are no multiple "
                f"of it. Pass a list of ints, or bytes made by pack()."
            )
        return token_ids
    if not isinstance(token_ids, (list, tuple, array)):
        raise TypeError(
            f"token_ids must be a list, tuple or array of int, or packed bytes, "
            f"not {type(token_ids).__name__}; turn a tensor or another iterable into a list first."
        )
    try:
        packed = array(_UNSIGNED, token_ids)
    except (TypeError, OverflowError) as error:
        raise _wrong_token(token_ids) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _wrong_token(token_ids: list[int] | tuple[int, ...] | array[int]) -> Exception:
    """The error that names the first id that cannot be packed, found by a second, slow walk."""
    for index, token in enumerate(token_ids):
        if not hasattr(token, "__index__"):
            return TypeError(f"token_ids[{index}] is {token!r}; a token id must be an int")
        if not 0 <= int(token) < 1 << 32:
            return ValueError(f"token_ids[{index}] is {token}; a token id must lie in 0..{(1 << 32) - 1}")
    return TypeError("token_ids must hold ints in 0..2**32-1")


def common_tokens(left: bytes, right: bytes) -> int:
    """Number of leading tokens that two packed runs share. For runs of a page: costs O(length), no Python loop."""
    length = min(len(left), len(right))
    differing = int.from_bytes(left[:length], "little") ^ int.from_bytes(right[:length], "little")
    if not differing:
        return length // TOKEN_BYTES
    lowest_bit = (differing & -differing).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)


def equal_pages(edge: bytearray, packed: bytes, offset: int, limit: int, page_bytes: int) -> int:
    """How many leading pages of `edge` equal `packed[offset:limit]`, by bisection.

    Each step compares in place through a memoryview given to `startswith` (a memcmp of what is still unknown), so the
    whole costs one memcmp of the edge and log2(pages) calls, and copies nothing.
    """
    low, high = 0, min(len(edge), limit - offset) // page_bytes
    with memoryview(edge) as view:
        if packed.startswith(view[: high * page_bytes], offset):
            return high
        # Invariant: the first `low` pages are equal, the first `high` are not.
        while high - low > 1:
            middle = (low + high) // 2
            if packed.startswith(view[low * page_bytes : middle * page_bytes], offset + low * page_bytes):
                low = middle
            else:
                high = middle
    return low
