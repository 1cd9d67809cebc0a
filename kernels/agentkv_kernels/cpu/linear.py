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

from ..errors import DtypeMismatch, ShapeMismatch
from ..memory import zeroed
from . import interface
from .interface import DTYPES, MOST_ELEMENTS
from .library import Library

__all__ = ["CodesPlan", "HeadsPlan", "Linear", "LinearPlan", "Linears", "RMSNorm", "Turn"]

_WRITE, _ADD, _GATE = 0, 1, 2
_PANEL = 32
_GROUP = 32
"""Inputs that share a scale where codes have 4 bits."""
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Weights [out, in] over the same inputs, one below the other, each with its bias [out] or None.

    `gated`: there are two of equal size, and a product is silu(the first's) times the second's.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    gated: bool = False

    def __post_init__(self) -> None:
        """Raise ShapeMismatch or DtypeMismatch: what does not fit is nothing that the kernels could see."""
        shapes = [tuple(weight.shape) for weight in self.weights]
        if not shapes or any(len(shape) != 2 or min(shape) < 1 or shape[1] != shapes[0][1] for shape in shapes):
            raise ShapeMismatch(f"weights of a product are [out, in], over the same inputs; these are {shapes}")
        if self.gated and (len(shapes) != 2 or shapes[0] != shapes[1]):
            raise ShapeMismatch(f"gates are a weight and another of its size; these are {shapes}")
        biases = [None if bias is None else tuple(bias.shape) for bias in self.biases]
        wanted = [(None, shape[:1]) for shape in shapes]
        if len(biases) != len(shapes) or any(bias not in known for bias, known in zip(biases, wanted, strict=True)):
            raise ShapeMismatch(f"each weight has a bias [out] or None; weights {shapes} have {biases}")
        kinds = {(str(weight.device), weight.dtype) for weight in self.weights}
        if len(kinds) != 1 or self.weights[0].dtype not in DTYPES or self.weights[0].device.type != "cpu":
            raise DtypeMismatch(f"weights of a product are of one dtype, fp32 or bf16, on the CPU; these are {kinds}")

    @property
    def out(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def described(self) -> interface.Linear:
        return interface.Linear(None, None, self.inputs, self.out, DTYPES[self.dtype], 0)

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

    def __post_init__(self) -> None:
        """Raise ShapeMismatch or DtypeMismatch: what does not fit is nothing that the kernels could see."""
        codes, scale, middle, bias = self.codes, self.scale, self.middle, self.bias_of_outputs
        if codes.dim() != 2 or min(codes.shape) < 1 or (self.gated and codes.shape[0] % 2):
            raise ShapeMismatch(
                f"codes are [out, in], of two equal halves where they are gates, not {tuple(codes.shape)}"
            )
        out, inputs = codes.shape
        if middle is not None and inputs % _GROUP:
            raise ShapeMismatch(f"codes of 4 bits come in groups of {_GROUP}, of which {inputs} inputs are no multiple")
        wanted = (out,) if middle is None else (out, inputs // _GROUP)
        if any(each is not None and each.shape != wanted for each in (scale, middle)):
            raise ShapeMismatch(f"codes {tuple(codes.shape)} have scales, and middles with 4 bits, of {wanted}")
        if bias is not None and bias.shape != (out,):
            raise ShapeMismatch(f"a bias is [out] = [{out}], not {tuple(bias.shape)}")
        if codes.dtype is not torch.int8 or any(
            each is not None and each.dtype is not torch.bfloat16 for each in (scale, middle)
        ):
            raise DtypeMismatch(f"codes are int8, scales and middles bf16; not {codes.dtype}, {scale.dtype}")

    @property
    def out(self) -> int:
        return self.codes.shape[0]

    @property
    def inputs(self) -> int:
        return self.codes.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def described(self) -> interface.Linear:
        return interface.Linear(None, None, self.inputs, self.out, DTYPES[self.dtype], 8 if self.middle is None else 4)

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

    __slots__ = ("_weight", "size", "struct")

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight [size], of any dtype."""
        if weight.dim() != 1:
            raise ShapeMismatch(f"the weight of a norm is [size], not {tuple(weight.shape)}")
        self._weight = weight.detach().float().contiguous()
        self.size = weight.shape[0]
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
    """One of them: rows [n, in] to [n, out], or with gated halves to [n, out / 2]. One thread at a time calls it."""

    __slots__ = ("_bias", "_dtype", "_inputs", "_is_gated", "_owner", "_plan", "_product", "_start", "_struct", "out")

    def __init__(self, owner: Linears, plan: LinearPlan | CodesPlan, start: int) -> None:
        self._owner = owner
        self._plan: LinearPlan | CodesPlan | None = plan
        self._start = start
        self._struct = plan.described
        self._bias = _bias_of(plan)
        self._product = interface.Product(then=_GATE if plan.gated else _WRITE, isa=owner.isa)
        self._is_gated = plan.gated
        self._dtype = plan.dtype
        self._inputs = plan.inputs
        self.out = plan.out // 2 if plan.gated else plan.out

    def __call__(self, rows: Tensor, out: Tensor, *, norm: RMSNorm | None = None, add: bool = False) -> Tensor:
        """Write into out [n, self.out], or add to it; `norm` is applied to the rows first. Returns `out`.

        Rows and results have the weight's dtype and a contiguous last dimension, and share no memory. Raises
        ShapeMismatch, DtypeMismatch, MemoryError.
        """
        num_rows = rows.shape[0]
        if rows.shape != (num_rows, self._inputs) or out.shape != (num_rows, self.out):
            raise ShapeMismatch(
                f"a product of [n, {self._inputs}] to [n, {self.out}] was given {tuple(rows.shape)}, {tuple(out.shape)}"
            )
        if rows.dtype is not self._dtype or out.dtype is not self._dtype:
            raise DtypeMismatch(f"a product in {self._dtype} was given {rows.dtype} to write into {out.dtype}")
        if (rows.stride(1) != 1 and self._inputs > 1) or (out.stride(1) != 1 and self.out > 1):
            raise ShapeMismatch(f"rows with strides {rows.stride()}, {out.stride()}: the last has to be 1")
        if norm is not None and norm.size != self._inputs:
            raise ShapeMismatch(f"a norm over {norm.size} elements was given for rows of {self._inputs}")
        self.lay_down()
        product = self._product
        product.rows, product.row_stride = rows.data_ptr(), rows.stride(0)
        product.out, product.out_stride = out.data_ptr(), out.stride(0)
        product.num_rows = num_rows
        if not self._is_gated:
            product.then = _ADD if add else _WRITE
        elif add:
            raise ValueError("what is gated is written, not added")
        product.threads = torch.get_num_threads()
        if self._owner.calls.akv_multiply(self._struct, None if norm is None else norm.struct, product):
            raise MemoryError(f"memory for {num_rows} rows of {self._inputs} inputs cannot be had")
        return out

    def lay_down(self) -> None:
        """Put the weight into its panels now, not with the first product; the tensors of the plan are let go."""
        if self._plan is not None:
            self._plan.lay_down(self._owner.calls, self._start)
            self._struct.panels = self._start
            self._struct.bias = None if self._bias is None else self._bias.data_ptr()
            self._plan = None


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """Heads that RoPE turns: of queries, and of keys behind them, `num_heads` together, of `size` elements each.

    query_norm, key_norm: over each head, before RoPE
    """

    num_query_heads: int
    num_heads: int
    size: int
    dtype: torch.dtype
    query_norm: RMSNorm | None = None
    key_norm: RMSNorm | None = None

    def __post_init__(self) -> None:
        """Raise ShapeMismatch or DtypeMismatch for heads that the kernels are not made for."""
        size, num_query_heads, num_heads = self.size, self.num_query_heads, self.num_heads
        if size < 2 or size % 2 or size > MOST_ELEMENTS or not 0 <= num_query_heads <= num_heads:
            raise ShapeMismatch(
                f"{num_query_heads} of {num_heads} heads of {size} elements; "
                f"even sizes up to {MOST_ELEMENTS} are wanted"
            )
        if any(norm is not None and norm.size != size for norm in (self.query_norm, self.key_norm)):
            raise ShapeMismatch(f"a norm over heads has {size} elements, as they have")
        if self.dtype not in DTYPES:
            raise DtypeMismatch(f"heads are fp32 or bf16, not {self.dtype}")


class Turn:
    """RoPE over whole heads, and the norms of heads before it: queries and the keys behind them, in place."""

    def __init__(self, library: Library, isa: int, plan: HeadsPlan) -> None:
        self._plan = plan
        self._width = plan.num_heads * plan.size
        self._size = plan.size
        self._dtype = plan.dtype
        self._calls = library.calls
        self._struct = interface.Turn(
            None,
            None,
            plan.query_norm.struct if plan.query_norm else interface.Norm(),
            plan.key_norm.struct if plan.key_norm else interface.Norm(),
            plan.num_query_heads,
            plan.num_heads,
            plan.size,
            DTYPES[plan.dtype],
            isa,
        )

    def __call__(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> None:
        """tokens [n, at least num_heads * size], the heads first; cos, sin fp32 [n, size], contiguous.

        Raises ShapeMismatch, DtypeMismatch.
        """
        num_tokens = tokens.shape[0]
        wanted = (num_tokens, self._size)
        if cos.shape != wanted or sin.shape != wanted or tokens.dim() != 2 or tokens.shape[1] < self._width:
            raise ShapeMismatch(
                f"tokens [n, >= {self._width}] and cos, sin [n, {self._size}] are wanted, not "
                f"{tuple(tokens.shape)}, {tuple(cos.shape)}, {tuple(sin.shape)}"
            )
        if tokens.dtype is not self._dtype or cos.dtype is not torch.float32 or sin.dtype is not torch.float32:
            raise DtypeMismatch(f"{self._dtype}, cos and sin of fp32; not {tokens.dtype}, {cos.dtype}, {sin.dtype}")
        if tokens.stride(1) != 1 or not cos.is_contiguous() or not sin.is_contiguous():
            raise ShapeMismatch("tokens need a contiguous last dimension, and cos and sin contiguous rows")
        self._struct.cos, self._struct.sin = cos.data_ptr(), sin.data_ptr()
        self._struct.threads = torch.get_num_threads()
        self._calls.akv_turn_heads(self._struct, tokens.data_ptr(), tokens.stride(0), num_tokens)


def _bias_of(plan: LinearPlan | CodesPlan) -> Tensor | None:
    """fp32, 32 for each panel; None where there is none."""
    bias = plan.bias()
    if bias is None or not plan.gated:
        return None if bias is None else pad(bias, (0, -bias.shape[0] % _PANEL))
    half = _PANEL // 2
    halves = [pad(part, (0, -part.shape[0] % half)).view(-1, half) for part in bias.chunk(2)]
    return torch.cat(halves, dim=1).flatten()
