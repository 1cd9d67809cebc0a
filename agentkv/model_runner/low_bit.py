"""Weights of 8 or 4 bits on CPUs, by torch's own packed products, for steps of few rows.

    int8    a scale for each output: weight = code * scale, codes -127 to 127
    int4    for each output and 32 inputs in a row a scale and an offset: weight = code * scale + offset, codes 0 to 15

Groups of 4 bits as GGUF has them (Q4_0, Q4_1) are found again in the weights that were made of them: where all 32
values lie on a grid of 16 steps their codes are taken over as they are, and only scale and offset are rounded, to bf16,
which the weights were, too. Others are rounded to the grid between their least and their greatest value.

A product with many rows multiplies bf16 weights instead, made of the codes, so that both compute the same model. Scales
are bf16, and so is the model: torch's products are slow in any other dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .products import Packed, Plain, Product, Weights

__all__ = [
    "GROUP",
    "Bits",
    "Codes",
    "FewRows",
    "lies_on_4_bits",
    "low_bit_product",
    "rounds_head",
    "to_4_bits",
    "to_8_bits",
]

Bits = Literal["int8", "int4"]

GROUP = 32
_MOST_ROWS: dict[Bits, int] = {"int8": 1, "int4": 5}
"""Up to so many rows the low-bit product is not slower than the packed bf16 one (`Packed`); Zen 4, one thread, µs for a
weight [3072, 576]: bf16 275, 244, 316 with 1, 4, 8 rows; int8 296, 395, 640; int4 113, 187, 361."""
_BLOCK = 4096
"""Outputs that are rounded at a time, which bounds what that takes beside the codes."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in] as codes with a scale, and an offset or None, for each of in // group inputs."""

    codes: Tensor
    """int8 or uint8 [out, in]."""
    scale: Tensor
    """bf16 [out, in // group]."""
    offset: Tensor | None

    def weight(self) -> Tensor:
        """The bf16 weight that the codes stand for."""
        out, groups = self.scale.shape
        blocks = []
        for start in range(0, out, _BLOCK):
            here = slice(start, start + _BLOCK)
            values = self.codes[here].view(-1, groups, self.codes.shape[1] // groups).float()
            values *= self.scale[here].float()[..., None]
            if self.offset is not None:
                values += self.offset[here].float()[..., None]
            blocks.append(values.flatten(1).to(torch.bfloat16))
        return torch.cat(blocks)


def to_8_bits(weight: Tensor) -> Codes:
    """Round to the nearest of 255 steps that are symmetric about 0, by output."""
    scale = (weight.abs().amax(dim=1, keepdim=True).float() / 127).clamp_min(2.0**-100).to(torch.bfloat16)
    blocks = [
        (weight[start : start + _BLOCK].float() / scale[start : start + _BLOCK].float()).round_().clamp_(-127, 127)
        for start in range(0, weight.shape[0], _BLOCK)
    ]
    return Codes(torch.cat([block.to(torch.int8) for block in blocks]), scale, None)


def to_4_bits(weight: Tensor) -> Codes:
    """Codes of 4 bits in groups of 32 inputs, those that the weight was made of where it was made of such."""
    codes, scales, offsets = [], [], []
    for start in range(0, weight.shape[0], _BLOCK):
        grid = _Grid(weight[start : start + _BLOCK])
        codes.append(grid.codes().to(torch.uint8).flatten(1))
        scales.append(grid.step[..., 0].to(torch.bfloat16))
        offsets.append(grid.least[..., 0])
    scale = torch.cat(scales)
    # The kernel counts codes from -8, and its offset is that of code 0 in its count: a small number, of which
    # rounding to bf16 takes less than of the least value.
    middle = (torch.cat(offsets) + 8 * scale.float()).to(torch.bfloat16)
    return Codes(torch.cat(codes).view(torch.int8) - 8, scale, middle)


def lies_on_4_bits(weight: Tensor) -> bool:
    """Whether all groups of a weight hold 16 evenly spaced values, but for rounding to bf16. Looks at 512 outputs."""
    if weight.shape[1] % GROUP:
        return False
    return bool(_Grid(weight[:: max(1, weight.shape[0] // 512)]).fits.all())


def rounds_head(weight: Tensor, bits: Bits) -> bool:
    """Whether the projection to logits gets few bits, too: with 4, only where its file has it so.

    What chooses the token is the last to be rounded: files of 4 bits mostly keep 6 or 8 there.
    """
    return bits == "int8" or lies_on_4_bits(weight)


class _Grid:
    """For each group of 32 inputs the 16 steps that its values lie on, or that lie nearest."""

    def __init__(self, weight: Tensor) -> None:
        self._values = weight.float().view(weight.shape[0], -1, GROUP)
        values, magnitudes = self._values, self._values.abs()
        # A bf16 value is within 2**-9 of the one that was rounded to it, and so are the two that place the grid.
        self._allowed = magnitudes.amax(-1, keepdim=True) * 3 * 2.0**-9
        least, most = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
        # As Q4_1 has it: least and greatest value are codes 0 and 15.
        self.least, self.step = least, ((most - least) / 15).clamp_min(2.0**-100)
        self.fits = self._on_grid()
        if not bool(self.fits.all()):
            # As Q4_0 has it: the value farthest from 0 is code 0, and 0 is code 8; the step may be negative.
            extreme = values.gather(-1, magnitudes.argmax(-1, keepdim=True))
            between = self.least, self.step, self.fits
            self.step = torch.where(extreme == 0, torch.ones_like(extreme), -extreme / 8)
            self.least = -8 * self.step
            mine = self._on_grid() & ~between[2]
            self.least = torch.where(mine, self.least, between[0])
            self.step = torch.where(mine, self.step, between[1])
            self.fits = between[2] | mine

    def codes(self) -> Tensor:
        return ((self._values - self.least) / self.step).round_().clamp_(0, 15)

    def _on_grid(self) -> Tensor:
        """bool [out, groups, 1]"""
        away = (self.codes() * self.step + self.least - self._values).abs_()
        return (away <= self._allowed).all(-1, keepdim=True)


class FewRows:
    """The low-bit product up to some rows, and another one for more; without another one for all."""

    def __init__(self, multiply: Callable[[Tensor], Tensor], most_rows: int, rest: Product | None) -> None:
        self._multiply, self._most_rows, self._rest = multiply, most_rows, rest

    def __call__(self, rows: Tensor) -> Tensor:
        if self._rest is None or rows.shape[0] <= self._most_rows:
            return self._multiply(rows)
        return self._rest(rows)


def low_bit_product(weights: Weights, bits: Bits, *, packed: bool) -> Product:
    """A product of so many bits; with `packed` also one of packed bf16 weights, made of the codes, for many rows.

    A weight whose inputs make no whole groups keeps its bf16 product.
    """
    weight, bias = weights.joined(), weights.bias()
    if weight.shape[1] % GROUP or weight.shape[0] % 16:
        return Packed(weights) if packed else Plain(weights)
    codes = to_8_bits(weight) if bits == "int8" else to_4_bits(weight)
    product = _int8(codes) if bits == "int8" else _int4(codes)
    rest = Packed(Weights((codes.weight(),), (bias,))) if packed else None
    if bias is None:
        return FewRows(product, _MOST_ROWS[bits], rest)
    return FewRows(lambda rows: product(rows).add_(bias), _MOST_ROWS[bits], rest)


def _int8(codes: Codes) -> Callable[[Tensor], Tensor]:
    scale = codes.scale[:, 0].contiguous()
    return lambda rows: torch._weight_int8pack_mm(rows, codes.codes, scale)


def _int4(codes: Codes) -> Callable[[Tensor], Tensor]:
    assert codes.offset is not None
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes.codes + 8).to(torch.int32), 1)
    scales = torch.stack((codes.scale, codes.offset), dim=-1).transpose(0, 1).contiguous()

    def multiply(rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, GROUP, scales)
        return product

    return multiply
