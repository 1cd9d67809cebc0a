"""Products with weights that stay, RMS norms and RoPE by the compiled kernels (`src/linear.h`).

A weight is laid down once in panels of 32 outputs, which a product reads from the first byte to the last: with few
rows a step costs what reading the weights costs. The sum of an output takes its inputs in their order, whatever rows
stand beside, so that a row gives the same bits alone and in a batch, on one thread and on many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..memory import zeroed
from . import interface
from .interface import DTYPES
from .library import Library

__all__ = ["CodesPlan", "Linear", "LinearPlan", "Linears", "RMSNorm", "Turn"]

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

    @property
    def described(self) -> interface.Linear:
        weight = self.weights[0]
        return interface.Linear(None, None, weight.shape[1], self.out, DTYPES[weight.dtype], 0)

    def bias(self) -> Tensor | None:
        """fp32 [out]; None where there is none."""
        if all(bias is None for bias in self.biases):
            return None
        parts = [
            torch.zeros(weight.shape[0]) if bias is None else bias.detach().float()
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]
        return torch.cat(parts)

    def lay_down(self, calls: ctypes.CDLL, start: int) -> None:
        kept = [weight if weight.stride(-1) == 1 else weight.contiguous() for weight in self.weights]
        parts = (interface.Part * len(kept))(
            *(interface.Part(weight.data_ptr(), weight.stride(0), weight.shape[0]) for weight in kept)
        )
        calls.akv_pack(byref(self.described), self.gated, parts, len(kept), start, torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class CodesPlan:
    """A weight [out, in] of few bits: code * scale, or code * scale + middle. Rows and results are bf16.

    codes: int8 [out, in], contiguous: with 8 bits -127 to 127, with 4 bits -8 to 7
    scale: bf16 [out], or with 4 bits [out, in / 32]
    middle: bf16 [out, in / 32], with 4 bits alone, where `in` is a multiple of 32
    gated: as a LinearPlan's, of the first and the second half of the outputs
    """

    codes: Tensor
    scale: Tensor
    middle: Tensor | None
    bias_of_outputs: Tensor | None
    gated: bool = False

    @property
    def out(self) -> int:
        return self.codes.shape[0]

    @property
    def described(self) -> interface.Linear:
        bits = 8 if self.middle is None else 4
        return interface.Linear(None, None, self.codes.shape[1], self.out, DTYPES[torch.bfloat16], bits)

    def bias(self) -> Tensor | None:
        return None if self.bias_of_outputs is None else self.bias_of_outputs.detach().float()

    def lay_down(self, calls: ctypes.CDLL, start: int) -> None:
        codes, scale = self.codes.contiguous(), self.scale.contiguous()
        middle = None if self.middle is None else self.middle.contiguous()
        address = None if middle is None else middle.data_ptr()
        threads = torch.get_num_threads()
        calls.akv_pack_codes(
            byref(self.described), self.gated, codes.data_ptr(), scale.data_ptr(), address, start, threads
        )


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, rounded as models in bf16 do it: before the weight, and behind it."""

    __slots__ = ("_weight", "struct")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight.detach().float().contiguous()
        self.struct = interface.Norm(self._weight.data_ptr(), eps)


class Linears:
    """The panels of all weights of a model, in one mapping, whose memory is taken as they are laid down."""

    def __init__(self, library: Library, isa: int, plans: Sequence[LinearPlan | CodesPlan]) -> None:
        """`isa`: the code of an instruction set.

        Costs microseconds: a weight is laid down by the first product with it, which reads it anyway.
        """
        self.calls = library.calls
        self.isa = isa
        sizes = [
            -(-int(self.calls.akv_panel_bytes(byref(plan.described), plan.gated)) // _ALIGNED) * _ALIGNED
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

    def __init__(self, owner: Linears, plan: LinearPlan | CodesPlan, start: int) -> None:
        self._owner = owner
        self._plan: LinearPlan | CodesPlan | None = plan
        self._start = start
        self._struct = plan.described
        self._bias = _bias_of(plan)
        self._product = interface.Product(then=_GATE if plan.gated else _WRITE, isa=owner.isa)
        self._is_gated = plan.gated
        self.out = plan.out // 2 if plan.gated else plan.out

    def __call__(self, rows: Tensor, out: Tensor, *, norm: RMSNorm | None = None, add: bool = False) -> Tensor:
        """Write into out [n, self.out], or add to it; `norm` is applied to the rows first. Returns `out`.

        Rows and results have the weight's dtype and a contiguous last dimension. Raises MemoryError.
        """
        self.lay_down()
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

    def lay_down(self) -> None:
        """Put the weight into its panels now, not with the first product; the tensors of the plan are let go."""
        if self._plan is not None:
            self._plan.lay_down(self._owner.calls, self._start)
            self._struct.panels = self._start
            self._struct.bias = None if self._bias is None else self._bias.data_ptr()
            self._plan = None


class Turn:
    """RoPE over whole heads, and the norms of heads before it: queries and the keys behind them, in place."""

    def __init__(
        self,
        library: Library,
        isa: int,
        *,
        num_query_heads: int,
        num_heads: int,
        size: int,
        dtype: torch.dtype,
        query_norm: RMSNorm | None = None,
        key_norm: RMSNorm | None = None,
    ) -> None:
        self._calls = library.calls
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
            isa,
        )

    def __call__(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> None:
        """tokens [n, at least num_heads * size], the heads first; cos, sin fp32 [n, size], contiguous."""
        self._struct.cos, self._struct.sin = cos.data_ptr(), sin.data_ptr()
        self._struct.threads = torch.get_num_threads()
        self._calls.akv_turn_heads(self._struct, tokens.data_ptr(), tokens.stride(0), tokens.shape[0])


def _bias_of(plan: LinearPlan | CodesPlan) -> Tensor | None:
    """fp32, 32 for each panel; None where there is none."""
    bias = plan.bias()
    if bias is None or not plan.gated:
        return None if bias is None else pad(bias, (0, -bias.shape[0] % _PANEL))
    half = _PANEL // 2
    halves = [pad(part, (0, -part.shape[0] % half)).view(-1, half) for part in bias.chunk(2)]
    return torch.cat(halves, dim=1).flatten()
