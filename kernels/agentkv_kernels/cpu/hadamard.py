"""The rotation of queries and keys by the compiled kernels (`src/hadamard.h`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DtypeMismatch, ShapeMismatch
from ..hadamard import Factors, check_heads
from . import interface
from .interface import DTYPES, MOST_ELEMENTS
from .library import Library

__all__ = ["CompiledHadamard"]


class CompiledHadamard:
    """As `hadamard.Hadamard`, of fp32 or bf16; sums are fp32, in an order that no batch changes, and rounded once."""

    def __init__(self, library: Library, isa: int, size: int, dtype: torch.dtype) -> None:
        if not 1 <= size <= MOST_ELEMENTS:
            raise ShapeMismatch(f"heads of 1 to {MOST_ELEMENTS} elements are rotated, not of {size}")
        if dtype not in DTYPES:
            raise DtypeMismatch(f"heads of {', '.join(map(str, DTYPES))} are rotated, not of {dtype}")
        self._calls, self._size, self._dtype, self._isa = library.calls, size, dtype, isa
        self._factors = Factors.of(size)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Raises ShapeMismatch, DtypeMismatch. Costs microseconds for a token."""
        size = self._size
        check_heads(query, key, size, self._dtype)
        num_tokens, num_heads, _ = query.shape
        if query.stride(2) != 1 or key.stride(2) != 1:
            query, key = query.contiguous(), key.contiguous()
        both = torch.empty(num_tokens, num_heads + key.shape[1], size, dtype=self._dtype)
        how = interface.Hadamard(
            _heads(query, self._factors.query),
            _heads(key, self._factors.key),
            size,
            DTYPES[self._dtype],
            self._isa,
            torch.get_num_threads(),
        )
        self._calls.akv_hadamard_heads(how, num_tokens, both.data_ptr())
        return both[:, :num_heads], both[:, num_heads:]


def _heads(tensor: Tensor, factor: float) -> interface.Heads:
    token_stride, head_stride, _ = tensor.stride()
    return interface.Heads(tensor.data_ptr(), token_stride, head_stride, tensor.shape[1], factor)
