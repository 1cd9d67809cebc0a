"""Compiled products, norms and RoPE: what float64 gives, up to their roundings, and always the same bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from agentkv_kernels import DtypeMismatch, ShapeMismatch
from agentkv_kernels.cpu.linear import HeadsPlan, Linear, LinearPlan, RMSNorm

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = (FP32, BF16)
SIZES = ((48, 70), (33, 31), (64, 32), (1, 1), (7, 100))
"""Inputs and outputs: odd ones, whole and broken panels, and less than one."""
EPS = 1e-5


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(seed: int, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(cpu, *weights: Tensor, biases: tuple[Tensor | None, ...] | None = None, gated: bool = False) -> Linear:
    (linear,) = cpu.make_linears([LinearPlan(weights, biases or (None,) * len(weights), gated)]).linears
    return linear


def multiplied(linear: Linear, rows: Tensor, **how) -> Tensor:
    return linear(rows, torch.full((rows.shape[0], linear.out), 7.0, dtype=rows.dtype), **how)


def of_sum(rows: Tensor, weight: Tensor) -> Tensor:
    """How far a sum of products in fp32 may be off: each addition rounds once, and the bias is one more."""
    return (rows.shape[1] + 2) * 2**-24 * (rows.double().abs() @ weight.double().abs().T + 4)


def once(dtype: torch.dtype) -> float:
    """What one rounding to the dtype may cost, as a part of the number."""
    return 2**-24 if dtype == FP32 else 2**-8


def within(result: Tensor, exact: Tensor, bound: Tensor) -> None:
    off = (result.double() - exact).abs() - bound
    assert bool((off <= 0).all()), f"{float(off.max())} beyond the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_product_is_that_of_float64(cpu, dtype, inputs, outputs):
    weights = draw(1, outputs, inputs, dtype=dtype), draw(2, 5, inputs, dtype=dtype)
    bias = draw(3, 5, dtype=dtype)
    linear, whole = made(cpu, *weights, biases=(None, bias)), torch.cat(weights)
    for num_rows in (1, 2, 5, 13, 40):
        rows, before = draw(num_rows, num_rows, inputs, dtype=dtype), draw(9, num_rows, outputs + 5, dtype=dtype)
        exact = rows.double() @ whole.double().T
        exact[:, outputs:] += bias.double()
        bound = of_sum(rows, whole) + once(dtype) * exact.abs()
        within(multiplied(linear, rows), exact, bound)
        added = linear(rows, before.clone(), add=True)
        within(added, before.double() + exact, 1.01 * bound + once(dtype) * (before.double() + exact).abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_norm_is_applied_to_the_rows_before_they_are_multiplied(cpu, dtype, inputs, outputs):
    weight, scale, rows = draw(1, outputs, inputs, dtype=dtype), draw(2, inputs, dtype=dtype), draw(3, 9, inputs)
    rows = (rows * EPS**0.5).to(dtype)  # So small that eps counts.
    kept = rows.clone()
    result = multiplied(made(cpu, weight), rows, norm=RMSNorm(scale, EPS))
    normed = functional.rms_norm(rows.double(), (inputs,), scale.double(), EPS)
    exact = normed @ weight.double().T
    # Each normed element is rounded twice; in fp32 the mean and its root move it by some roundings more.
    moved = (2 if dtype == BF16 else inputs + 4) * 1.01 * once(dtype) * (normed.abs() @ weight.double().abs().T)
    within(result, exact, of_sum(normed, weight) + moved + once(dtype) * exact.abs())
    assert torch.equal(rows, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_gates_are_silu_of_the_first_half_times_the_second(cpu, dtype, inputs, outputs):
    weights = draw(1, outputs, inputs, dtype=dtype), draw(2, outputs, inputs, dtype=dtype)
    bias, rows = draw(3, outputs, dtype=dtype), draw(4, 13, inputs, dtype=dtype)
    linear = made(cpu, *weights, biases=(bias, None), gated=True)
    assert linear.out == outputs
    gate = rows.double() @ weights[0].double().T + bias.double()
    other, opened = rows.double() @ weights[1].double().T, functional.silu(gate)
    pairs = zip(weights, (gate, other), strict=True)
    # No slope of silu is above 1.1; it costs 8 roundings in fp32 itself, and bf16 rounds behind it as before it.
    off = [of_sum(rows, weight) + once(dtype) * exact.abs() for weight, exact in pairs]
    of_gate = 1.1 * off[0] + (8 * 2**-24 + once(dtype)) * opened.abs()
    bound = of_gate * other.abs() + opened.abs() * off[1] + of_gate * off[1]
    within(multiplied(linear, rows), opened * other, 1.01 * bound + once(dtype) * (opened * other).abs())


def test_gates_of_any_size_are_numbers(cpu):
    """A gate of -3e38 lets nothing through and one of 3e38 everything; neither is NaN, as e^x would make it."""
    gates = torch.tensor([-3.4e38, -3e38, -1e38, -1e30, -200, -90, -87, -60, -1, -0.0, 1, 60, 90, 1e30, 1e38, 3e38])
    linear = made(cpu, torch.eye(16), torch.zeros(16, 16), biases=(None, torch.ones(16)), gated=True)
    for row in (gates, gates.flip(0)):
        result, exact = multiplied(linear, row[None])[0].double(), functional.silu(row.double())
        # One rounding of an exponent is a change of e^-x by as much of itself; below -87 it is no more than 2e-36.
        within(result, exact, (row.double().abs().clamp(max=87) + 8) * 2**-24 * exact.abs() + 2e-36)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_on_any_number_of_threads(cpu, dtype, kind, threads):
    weights = draw(1, 150, 66, dtype=dtype), draw(2, 150, 66, dtype=dtype)
    linear, norm = made(cpu, *weights, gated=kind == "gated"), RMSNorm(draw(3, 66), EPS)
    rows = draw(4, 43, 66, dtype=dtype)
    together = multiplied(linear, rows, norm=norm)
    torch.set_num_threads(1)
    apart = [multiplied(linear, part, norm=norm) for size in (1, 6, 43) for part in rows.split(size)]
    assert torch.equal(torch.cat(apart), together.repeat(3, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_results_may_lie_anywhere_and_nothing_beside_them_is_written(cpu, dtype):
    linear = made(cpu, draw(1, 37, 24, dtype=dtype))
    for num_rows in (1, 3, 14):
        wide, target = draw(2, num_rows, 31, dtype=dtype), draw(3, num_rows, 53, dtype=dtype)
        before, expected = target.clone(), multiplied(linear, wide[:, 3:27].contiguous())
        linear(wide[:, 3:27], target[:, 5:42])
        assert torch.equal(target[:, 5:42], expected)
        target[:, 5:42] = before[:, 5:42]
        assert torch.equal(target, before)
        # One row that stands for many has a step of 0; rows of 4 KiB are moved apart first.
        same = wide[:1, 3:27].expand(num_rows, 24)
        assert torch.equal(multiplied(linear, same), expected[:1].expand(num_rows, 37))
        apart = draw(4, num_rows, 2048, dtype=dtype)
        apart[:, :24] = wide[:, 3:27]
        assert torch.equal(multiplied(linear, apart[:, :24]), expected)
    assert multiplied(linear, draw(5, 0, 24, dtype=dtype)).shape == (0, 37)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row_and_in_its_output(cpu, dtype, wrong):
    weight, rows = draw(1, 40, 25, dtype=dtype), draw(2, 15, 25, dtype=dtype)
    expected = multiplied(made(cpu, weight), rows)
    weight[33, 24], rows[7, 3] = wrong, wrong
    result = multiplied(made(cpu, weight), rows)
    assert not bool(result[7].isfinite().any())
    assert not bool(result[:, 33].isfinite().any())
    others = [row for row in range(15) if row != 7]
    columns = [column for column in range(40) if column != 33]
    assert torch.equal(result[others][:, columns], expected[others][:, columns])
    norm = RMSNorm(draw(3, 25), EPS)
    weight[33, 24] = 1
    result, rows[7, 3] = multiplied(made(cpu, weight), rows, norm=norm), 1
    assert torch.equal(result[others], multiplied(made(cpu, weight), rows, norm=norm)[others])


def test_weights_are_laid_down_by_the_first_product_and_read_no_more(cpu):
    # Of any strides: a transposed one, and one whose rows lie apart.
    weights = draw(1, 24, 40).T, draw(2, 30, 64)[::2, :24]
    linear, rows = made(cpu, *weights), draw(3, 4, 24)
    weights[0].mul_(2)
    expected = rows.double() @ torch.cat(weights).double().T
    first = multiplied(linear, rows)
    within(first, expected, of_sum(rows, torch.cat(weights)))
    for weight in weights:
        weight.zero_()
    assert torch.equal(multiplied(linear, rows), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("size", [16, 22])
def test_heads_are_normed_and_turned_in_place(cpu, dtype, normed, size, threads):
    tokens, angles = draw(1, 19, 5 * size + 3, dtype=dtype), 3 * draw(2, 19, size)
    before, cos, sin = tokens.clone(), angles.cos(), angles.sin()
    scales = draw(3, size, dtype=dtype), draw(4, size, dtype=dtype)
    norms = [RMSNorm(scale, EPS) if normed else None for scale in scales]
    turn = cpu.make_turn(
        HeadsPlan(num_query_heads=3, num_heads=5, size=size, dtype=dtype, query_norm=norms[0], key_norm=norms[1])
    )
    turn(tokens, cos, sin)
    heads = before[:, : 5 * size].double().view(19, 5, size)
    if normed:
        by_scale = [functional.rms_norm(heads, (size,), scale.double(), EPS) for scale in scales]
        heads = torch.cat((by_scale[0][:, :3], by_scale[1][:, 3:]), dim=1)
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    exact = heads * cos.double()[:, None] + turned * sin.double()[:, None]
    # A normed head is rounded twice before it is turned, in fp32 `size` times more; then the result once.
    roundings = (2 if dtype == BF16 else size + 6) if normed else 0
    sizes = heads.abs() * cos.double()[:, None].abs() + turned.abs() * sin.double()[:, None].abs()
    bound = (1.01 * roundings * once(dtype) + 3 * 2**-24) * sizes + 1.01 * once(dtype) * exact.abs()
    within(tokens[:, : 5 * size].view(19, 5, size), exact, bound)
    assert torch.equal(tokens[:, 5 * size :], before[:, 5 * size :])
    alone = before.clone()
    for token in range(19):
        turn(alone[token : token + 1], cos[token : token + 1], sin[token : token + 1])
    assert torch.equal(alone, tokens)


@pytest.mark.parametrize(
    ("weights", "biases", "gated", "error"),
    [
        ((draw(1, 4, 8), draw(2, 4, 6)), (None, None), False, ShapeMismatch),
        ((draw(1, 4, 8), draw(2, 5, 8)), (None, None), True, ShapeMismatch),
        ((draw(1, 4, 8),), (None,), True, ShapeMismatch),
        ((draw(1, 4, 8),), (draw(2, 5),), False, ShapeMismatch),
        ((draw(1, 4, 8),), (), False, ShapeMismatch),
        ((draw(1, 0, 8),), (None,), False, ShapeMismatch),
        ((), (), False, ShapeMismatch),
        ((draw(1, 4, 8), draw(2, 4, 8, dtype=BF16)), (None, None), False, DtypeMismatch),
        ((draw(1, 4, 8, dtype=torch.float16),), (None,), False, DtypeMismatch),
    ],
)
def test_weights_that_make_no_product_are_refused(weights, biases, gated, error):
    with pytest.raises(error, match=r"these are|have"):
        LinearPlan(weights, biases, gated)


def test_what_does_not_fit_is_refused_before_anything_is_written(cpu):
    linear, gates = made(cpu, draw(1, 6, 8)), made(cpu, draw(1, 6, 8), draw(2, 6, 8), gated=True)
    rows, out = draw(3, 4, 8), torch.zeros(4, 6)
    for wrong in (rows[:, :7], rows[0], draw(3, 4, 9), draw(3, 3, 8)):
        with pytest.raises(ShapeMismatch, match=r"\[n, 8\] to \[n, 6\]"):
            linear(wrong, out)
    with pytest.raises(ShapeMismatch, match="norm over 6 elements"):
        linear(rows, out, norm=RMSNorm(draw(1, 6), EPS))
    with pytest.raises(ShapeMismatch, match="the last has to be 1"):
        linear(draw(3, 8, 4).T, out)
    with pytest.raises(ShapeMismatch, match="the last has to be 1"):
        linear(rows, torch.zeros(6, 4).T)
    with pytest.raises(DtypeMismatch, match="a product in"):
        linear(rows.bfloat16(), out)
    with pytest.raises(DtypeMismatch, match="a product in"):
        linear(rows, out.double())
    with pytest.raises(ValueError, match="gated is written"):
        gates(rows, out, add=True)
    assert not out.any()


def test_heads_that_the_kernels_are_not_made_for_are_refused(cpu):
    for query_heads, heads, size in ((3, 2, 16), (1, 2, 15), (1, 2, 514)):
        with pytest.raises(ShapeMismatch, match="even sizes up to 512"):
            cpu.make_turn(HeadsPlan(num_query_heads=query_heads, num_heads=heads, size=size, dtype=FP32))
    with pytest.raises(DtypeMismatch):
        cpu.make_turn(HeadsPlan(num_query_heads=1, num_heads=2, size=16, dtype=torch.float16))
    with pytest.raises(ShapeMismatch, match="a norm over heads"):
        cpu.make_turn(
            HeadsPlan(num_query_heads=1, num_heads=2, size=16, dtype=FP32, query_norm=RMSNorm(draw(1, 8), EPS))
        )
    turn = cpu.make_turn(HeadsPlan(num_query_heads=1, num_heads=2, size=16, dtype=FP32))
    tokens, angles = draw(1, 3, 32), draw(2, 3, 16)
    # RoPE over a part of each head has fewer cosines than it has elements.
    part = angles[:, :8]
    for given in ((tokens, part, part), (tokens[:, :31], angles, angles), (tokens[:2], angles, angles)):
        with pytest.raises(ShapeMismatch, match="are wanted, not"):
            turn(*given)
    with pytest.raises(ShapeMismatch, match="contiguous"):
        turn(tokens, angles, draw(2, 16, 3).T)
    with pytest.raises(DtypeMismatch):
        turn(tokens.bfloat16(), angles, angles)
