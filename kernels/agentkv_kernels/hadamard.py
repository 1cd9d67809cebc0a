"""Queries and keys rotated before keys are kept in few bits, so that no element of a key stands out.

A key of int8 has one scale, set by its largest element. In many models a few dimensions of every key are several times
as large as the others, whose rounding they make as many times as coarse. A Hadamard matrix mixes all dimensions alike,
so that what stands out is spread over all of them; it is orthogonal, so queries that are rotated too have the same
scores (QuaRot, Ashkboos et al. 2024). Elements of one size would by the matrix alone be gathered into one; signs in
the order of the Rudin-Shapiro sequence, which is like no row of the matrix, come first.

    rotated = vector * signs @ matrix / sqrt(block)    blocks of the largest power of two that divides the size

The division is by powers of two, parted between queries and keys: exact, also where `block` is no square.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .errors import DtypeMismatch, ShapeMismatch

__all__ = ["Factors", "Hadamard", "Rotation", "check_heads"]


class Rotation(Protocol):
    """Rotates the queries and keys of layers of one key size and dtype."""

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """query [tokens, num_heads, size] and key [tokens, kv_heads, size], both rotated, as new tensors.

        Scores of the two are those of the originals, but for the rounding of the results to their dtype. Raises
        ShapeMismatch, DtypeMismatch.
        """
        ...


@dataclass(frozen=True, slots=True)
class Factors:
    """What queries and keys are multiplied by beside the matrix: powers of two whose product is 1 / block."""

    block: int
    query: float
    key: float

    @classmethod
    def of(cls, size: int) -> Factors:
        """For vectors of that size."""
        block = size & -size
        doublings = block.bit_length() - 1
        return cls(block, 2.0 ** -(doublings // 2), 2.0 ** -(doublings - doublings // 2))


class Hadamard:
    """The rotation by torch, on any device: a product of every head with a matrix [size, size]."""

    def __init__(self, size: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        factors = Factors.of(size)
        matrix = torch.ones(1, 1)
        while len(matrix) < factors.block:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        signed = _signs(factors.block).unsqueeze(1) * matrix
        # Entries are 0 and powers of two, which any dtype holds.
        whole = torch.kron(torch.eye(size // factors.block), signed)
        self._size, self._dtype = size, dtype
        self._for_query = (whole * factors.query).to(device, dtype)
        self._for_key = (whole * factors.key).to(device, dtype)

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        check_heads(query, key, self._size, self._dtype)
        return query @ self._for_query, key @ self._for_key


def check_heads(query: Tensor, key: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raise ShapeMismatch or DtypeMismatch for what is no heads of that size and dtype, as many of both."""
    shapes = tuple(query.shape), tuple(key.shape)
    if any(len(shape) != 3 or shape[2] != size for shape in shapes) or shapes[0][0] != shapes[1][0]:
        raise ShapeMismatch(f"heads of {size} of as many queries as keys are wanted, not {shapes[0]}, {shapes[1]}")
    if query.dtype is not dtype or key.dtype is not dtype:
        raise DtypeMismatch(f"heads of {dtype} are wanted, not of {query.dtype} and {key.dtype}")


def _signs(block: int) -> Tensor:
    """Rudin-Shapiro: -1 where a one follows a one an odd number of times among the bits of the index."""
    return torch.tensor([-1.0 if (i & i >> 1).bit_count() % 2 else 1.0 for i in range(block)])
