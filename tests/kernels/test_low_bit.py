"""Products with weights of 8 and 4 bits are those of the weights that the codes stand for, by every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from agentkv_kernels import BackendUnavailable
from agentkv_kernels.cpu import CpuBackend
from agentkv_kernels.cpu.interface import INSTRUCTION_SETS
from agentkv_kernels.cpu.linear import CodesPlan, Linear, RMSNorm
from agentkv_kernels.errors import DtypeMismatch, ShapeMismatch

GROUP = 32


def kernels(instruction_set: str) -> CpuBackend:
    try:
        return CpuBackend(instruction_set)
    except BackendUnavailable as error:
        pytest.skip(str(error))


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def codes(seed: int, bits: int, out: int, inputs: int, *, bias: bool, gated: bool = False) -> CodesPlan:
    """Random codes over their whole range, with scales and middles of either sign."""
    draw = torch.Generator().manual_seed(seed)
    least, most = (-127, 128) if bits == 8 else (-8, 8)
    drawn = torch.randint(least, most, (out, inputs), generator=draw, dtype=torch.int8)
    groups = (out,) if bits == 8 else (out, inputs // GROUP)
    middle = None if bits == 8 else normal(seed + 1, *groups)
    return CodesPlan(drawn, normal(seed + 2, *groups), middle, normal(seed + 3, out) if bias else None, gated)


def meant(plan: CodesPlan) -> Tensor:
    """The weight in fp64."""
    size = plan.codes.shape[1] if plan.middle is None else GROUP
    groups = plan.codes.double().view(plan.out, -1, size)
    weight = groups * plan.scale.double().view(plan.out, -1, 1)
    if plan.middle is not None:
        weight = weight + plan.middle.double()[..., None]
    return weight.flatten(1)


def product(linear: Linear, rows: Tensor, norm: RMSNorm | None = None) -> Tensor:
    """Into memory that holds NaN."""
    return linear(rows, torch.full((rows.shape[0], linear.out), torch.nan, dtype=torch.bfloat16), norm=norm)


def near(ours: Tensor, exact: Tensor) -> None:
    # Sums are fp32 of exact products, and are rounded to bf16 once; where a gate is, thrice.
    assert float((ours.double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max())


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("out", "inputs"), [(70, 64), (31, 96), (32, 256)])
def test_it_is_the_product_with_what_the_codes_stand_for(
    instruction_set: str, bits: int, out: int, inputs: int
) -> None:
    plan = codes(bits, bits, out, inputs, bias=True)
    (linear,) = kernels(instruction_set).make_linears([plan]).linears
    weight, norm_weight = meant(plan), normal(5, inputs)
    norm, bias = RMSNorm(norm_weight, 1e-5), plan.bias_of_outputs
    assert bias is not None
    for count in (1, 2, 5, 6, 7, 20):
        rows = normal(count, count, inputs)
        near(product(linear, rows), rows.double() @ weight.T + bias.double())
        # A model in bf16 rounds before the norm's weight and behind it.
        normed = rms_norm(rows.float(), (inputs,), eps=1e-5).to(torch.bfloat16) * norm_weight
        near(product(linear, rows, norm), normed.double() @ weight.T + bias.double())
        added = normal(9, count, out)
        near(
            linear(rows, added.clone(), add=True),
            added.double() + rows.double() @ weight.T + bias.double(),
        )


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("bits", [8, 4])
def test_one_half_gates_the_other(instruction_set: str, bits: int) -> None:
    plan = codes(bits, bits, 2 * 40, 64, bias=False, gated=True)
    (linear,) = kernels(instruction_set).make_linears([plan]).linears
    rows = normal(1, 9, 64) / 64
    gate, other = (rows.double() @ meant(plan).T).chunk(2, dim=-1)
    near(product(linear, rows), silu(gate) * other)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_gives_the_same_bits_alone_and_beside_others(instruction_set: str, bits: int) -> None:
    (linear,) = kernels(instruction_set).make_linears([codes(1, bits, 70, 96, bias=True)]).linears
    rows = normal(2, 13, 96)
    together = product(linear, rows)
    alone = torch.cat([product(linear, row[None]) for row in rows])
    assert torch.equal(together, alone)
    assert len(set(map(tuple, together.tolist()))) == 13


def test_codes_that_do_not_fit_together_are_refused() -> None:
    drawn = torch.ones(6, 64, dtype=torch.int8)
    for scale, middle, bias in (
        (normal(1, 5), None, None),
        (normal(1, 6, 2), None, None),
        (normal(1, 6, 2), normal(2, 6, 1), None),
        (normal(1, 6), None, normal(3, 5)),
    ):
        with pytest.raises(ShapeMismatch):
            CodesPlan(drawn, scale, middle, bias)
    with pytest.raises(ShapeMismatch, match="groups of 32"):
        CodesPlan(drawn[:, :40], normal(1, 6, 2), normal(2, 6, 2), None)
    with pytest.raises(ShapeMismatch, match="two equal halves"):
        CodesPlan(drawn[:5], normal(1, 5), None, None, gated=True)
    with pytest.raises(DtypeMismatch):
        CodesPlan(drawn, normal(1, 6).float(), None, None)
    with pytest.raises(DtypeMismatch):
        CodesPlan(drawn.short(), normal(1, 6), None, None)
