"""How much of a layer one program takes at a time.

None of these figures was measured on a GPU yet; they follow from the registers and the shared memory that the compiler
takes for them on compute capabilities 8.0 and 9.0: no variable of a loop is spilled, and two programs fit a processor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..store import LayerSpec

__all__ = ["Blocks", "blocks_for"]

NARROW_ROWS = 16
"""Rows of a matrix product for a few queries: as few as tensor cores take."""
WIDE_ROWS = 64
NARROW_KEYS = 16
"""Keys a step for fp32, whose products run outside the tensor cores and keep their operands in registers."""
KEY_BLOCK_BYTES = 16 << 10
"""Keys of one step of a program's loop; two or three steps of keys and values wait in shared memory."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sizes that a kernel is compiled for."""

    heads: int
    """Query heads of one KV head that one program serves."""
    narrow: int
    """Rows, tokens times heads, of a tile with few tokens."""
    wide: int
    """Rows of a tile with many."""
    keys: int
    key_size: int
    """Elements of a key, rounded up to a power of two that a matrix product takes."""
    value_size: int
    wide_warps: int
    """Warps of 32 threads that run a wide tile; a narrow one takes four."""

    @property
    def narrow_tokens(self) -> int:
        """Tokens of a narrow tile."""
        return self.narrow // self.heads

    @property
    def wide_tokens(self) -> int:
        """Tokens of a wide tile."""
        return self.wide // self.heads


@lru_cache(maxsize=256)
def blocks_for(spec: LayerSpec, num_heads: int) -> Blocks:
    """The blocks for a layer under so many query heads."""
    key_size, value_size = _power_of_two(spec.key_size), _power_of_two(spec.value_size)
    largest, exact = max(key_size, value_size), spec.dtype == torch.float32
    wide = WIDE_ROWS // 2 if exact else WIDE_ROWS
    heads = min(num_heads // spec.kv_heads, wide)
    return Blocks(
        heads=heads,
        narrow=max(NARROW_ROWS, _power_of_two(heads)),
        wide=wide,
        keys=NARROW_KEYS if exact else min(64, KEY_BLOCK_BYTES // (largest * spec.dtype.itemsize)),
        key_size=key_size,
        value_size=value_size,
        wide_warps=8 if exact or largest > 128 else 4,
    )


def _power_of_two(number: int) -> int:
    return max(16, 1 << (number - 1).bit_length())
