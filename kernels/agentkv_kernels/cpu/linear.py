"""Products with weights that stay, RMS norms and RoPE by the compiled kernels (`src/linear.h`).

A weight is laid down once in panels of 32 outputs, which a product reads from the first byte to the last: with few
rows a step costs what reading the weights costs. The sum of an output takes its inputs in their order, whatever rows
stand beside, so that a row gives the same bits alone and in a batch, on one thread and on many.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import zeroed
from . import interface
from .interface import DTYPES
from .library import Library

__all__ = ["Linear", "LinearPlan", "Linears", "RMSNorm", "Turn"]

_WRITE, _ADD, _GATE = 0, 1, 2
_PANEL = 32
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Weights [out, in] over the same inputs, one below the other, each with its bias [out] or None.

    `gated`: there are two of equal size, and a product is silu(the first's) times the second's.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    gated: bool = False

    @property
    def out(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    def described(self) -> interface.Linear:
        weight = self.weights[0]
        return interface.Linear(None, None, weight.shape[1], self.out, DTYPES[weight.dtype])


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, rounded as models in bf16 do it: before the weight, and behind it."""

    __slots__ = ("_weight", "struct")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.detach().float().contiguous()
        self.struct = interface.Norm(self._weight.data_ptr(), eps)


class Linears:
    """The panels of all weights of a model, in one mapping, whose memory is taken as they are laid down."""

    def __init__(self, library: Library, isa: int, plans: Sequence[LinearPlan]) -> None:
        """`isa`: the code of an instruction set.

        Costs microseconds: a weight is laid down by the first product with it, which reads it anyway.
        """
        self.calls = library.calls
        self.isa = isa
        sizes = [
            -(-int(self.calls.akv_panel_bytes(byref(plan.described()), plan.gated)) // _ALIGNED) * _ALIGNED
            for plan in plans
        ]
        self._memory = zeroed((sum(sizes) + _ALIGNED,), torch.uint8, torch.device("cpu"))
        start = self._memory.data_ptr()
        self.linears: list[Linear] = []
        for plan, size in zip(plans, sizes, strict=True):
            self.linears.append(Linear(self, plan, start))
            start += size

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()


class Linear:
    """One of them: rows [n, in] to [n, out], or with gated halves to [n, out / 2]."""

    __slots__ = ("_bias", "_is_gated", "_owner", "_plan", "_product", "_start", "_struct", "out")

    def __init__(self, owner: Linears, plan: LinearPlan, start: int) -> None:
        self._owner = owner
        self._plan: LinearPlan | None = plan
        self._start = start
        self._struct = plan.described()
        self._bias = _bias_of(plan)
        self._product = interface.Product(then=_GATE if plan.gated else _WRITE, isa=owner.isa)
        self._is_gated = plan.gated
        self.out = plan.out // 2 if plan.gated else plan.out

    def __call__(self, rows: Tensor, out: Tensor, *, norm: RMSNorm | None = None, add: bool = False) -> Tensor:
        """Write into out [n, self.out], or add to it; `norm` is applied to the rows first. Returns `out`.

        Rows and results have the weight's dtype and a contiguous last dimension. Raises MemoryError.
        """
        if self._plan is not None:
            self._lay_down(self._plan)
        product = self._product
        product.rows, product.row_stride = rows.data_ptr(), rows.stride(0)
        product.out, product.out_stride = out.data_ptr(), out.stride(0)
        product.num_rows = rows.shape[0]
        if add:
            assert not self._is_gated, "what is gated is not added"
            product.then = _ADD
        elif not self._is_gated:
            product.then = _WRITE
        product.threads = torch.get_num_threads()
        if self._owner.calls.akv_multiply(self._struct, None if norm is None else norm.struct, product):
            raise MemoryError(f"memory for {rows.shape[0]} rows of {rows.shape[1]} inputs cannot be had")
        return out

    def _lay_down(self, plan: LinearPlan) -> None:
        kept = [weight if weight.stride(-1) == 1 else weight.contiguous() for weight in plan.weights]
        parts = (interface.Part * len(kept))(
            *(interface.Part(weight.data_ptr(), weight.stride(0), weight.shape[0]) for weight in kept)
        )
        threads = torch.get_num_threads()
        self._owner.calls.akv_pack(byref(self._struct), plan.gated, parts, len(kept), self._start, threads)
        self._struct.panels = self._start
        self._struct.bias = None if self._bias is None else self._bias.data_ptr()
        self._plan = None


class Turn:
    """RoPE over whole heads, and the norms of heads before it: queries and the keys behind them, in place."""

    def __init__(
        self,
        owner: Linears,
        *,
        num_query_heads: int,
        num_heads: int,
        size: int,
        dtype: torch.dtype,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
    ) -> None:
        self._calls = owner.calls
        self._norms = (query_norm, key_norm)
        self._struct = interface.Turn(
            None,
            None,
            query_norm.struct if query_norm else interface.Norm(),
            key_norm.struct if key_norm else interface.Norm(),
            num_query_heads,
            num_heads,
            size,
            DTYPES[dtype],
            owner.isa,
        )

    def __call__(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> None:
        """tokens [n, at least num_heads * size], the heads first; cos, sin fp32 [n, size], contiguous."""
        self._struct.cos, self._struct.sin = cos.data_ptr(), sin.data_ptr()
        self._struct.threads = torch.get_num_threads()
        self._calls.akv_turn_heads(self._struct, tokens.data_ptr(), tokens.stride(0), tokens.shape[0])


def _bias_of(plan: LinearPlan) -> Tensor | None:
    """fp32, 32 for each panel; None where there is none."""
    if all(bias is None for bias in plan.biases):
        return None
    parts = [
        torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
        for weight, bias in zip(plan.weights, plan.biases, strict=True)
    ]
    if not plan.gated:
        flat = torch.cat(parts)
        return torch.nn.functional.pad(flat, (0, -flat.shape[0] % _PANEL))
    half = _PANEL // 2
    halves = [torch.nn.functional.pad(part, (0, -part.shape[0] % half)).view(-1, half) for part in parts]
    return torch.cat(halves, dim=1).flatten()
