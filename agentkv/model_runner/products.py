"""Products with a weight that stays: rows [n, in] times weight [out, in], plus bias, as `torch.nn.Linear` has them.

Several projections that read the same rows are one product over their weights, one below the other. The weights of the
model object are never touched: what is packed is a copy of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Packed", "PackedOnUse", "Plain", "Product", "Weights", "can_pack", "linear_weights"]

_PACKED_FOR_ROWS = 32
"""oneDNN lays a weight out for a number of rows; what it chooses for 32 was found to be as good for 1 and for 1,024."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of projections that read the same rows: each [out, in], with its bias [out] or None."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]

    @property
    def num_elements(self) -> int:
        return sum(weight.numel() for weight in self.weights)

    @property
    def num_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights)

    def joined(self) -> Tensor:
        """[sum of out, in]; a copy where there are several."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def bias(self) -> Tensor | None:
        """[sum of out], zeros where only some projections have one; None where none has."""
        if all(bias is None for bias in self.biases):
            return None
        parts = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return torch.cat(parts)


class Product(Protocol):
    """[n, in] to [n, sum of out], a tensor of the caller's own."""

    def __call__(self, rows: Tensor) -> Tensor: ...


class Plain:
    """By torch's own linear, on the weights as they lie in the model."""

    def __init__(self, weights: Weights) -> None:
        self._pairs = tuple(zip(weights.weights, weights.biases, strict=True))

    def __call__(self, rows: Tensor) -> Tensor:
        parts = [functional.linear(rows, weight, bias) for weight, bias in self._pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Packed:
    """By oneDNN, on a copy of the weights that is laid out once for it, and not again in every call.

    Measured on two Zen 4 cores, bf16: half the time of `Plain` from 1 to 16 rows, 0.8 of it at 64, 0.95 at 512.
    """

    def __init__(self, weights: Weights) -> None:
        """Costs one read and one write of the weights, about 3 GB/s."""
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weights.joined().detach(), _PACKED_FOR_ROWS)
        self._bias = weights.bias()

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return result


class PackedOnUse:
    """As `Packed`, made by the first call: a start waits for no weights, and the first step reads them anyway."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._packed: Packed | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is None:
            self._packed = Packed(self._weights)
        return self._packed(rows)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN, and oneDNN products of this dtype on this processor."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def linear_weights(*linears: torch.nn.Linear) -> Weights:
    """Of linear layers that read the same rows."""
    biases: Sequence[Tensor | None] = [linear.bias for linear in linears]
    return Weights(tuple(linear.weight.detach() for linear in linears), tuple(biases))
