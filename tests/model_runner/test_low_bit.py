"""Weights of 8 and 4 bits: codes, products, what a GGUF's groups become, and an engine over them."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from agentkv import ConfigError, Runtime
from agentkv.model_runner import PackedSequence, open_runner
from agentkv.model_runner.low_bit import GROUP, Bits, lies_on_4_bits, low_bit_product, to_4_bits, to_8_bits
from agentkv.model_runner.products import Packed, Weights
from support.engines import random_prompt
from support.tiny_models import tiny_model

BITS: tuple[Bits, ...] = ("int8", "int4")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def codes_of(weight: Tensor, bits: Bits) -> Any:
    return to_8_bits(weight) if bits == "int8" else to_4_bits(weight)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_rows", [1, 5, 6, 40])
def test_a_product_is_that_of_the_weights_its_codes_stand_for(bits: Bits, packed: bool, num_rows: int) -> None:
    weights, bias, rows = (normal(1, 64, 96), normal(2, 16, 96)), normal(3, 16), normal(num_rows, num_rows, 96)
    product = low_bit_product(Weights(weights, (None, bias)), bits, packed=packed)
    exact = rows.double() @ codes_of(torch.cat(weights), bits).weight().double().T
    exact[:, 64:] += bias.double()
    # 96 products of normal numbers, of which each factor is rounded to bf16 once, and so is their sum.
    bound = 2 * 2**-8 * (rows.double().abs() @ torch.cat(weights).double().abs().T).max() + 2**-8 * exact.abs().max()
    torch.testing.assert_close(product(rows).double(), exact, rtol=0, atol=float(bound))
    assert float((product(rows) - rows @ torch.cat(weights).T).abs().max()) > 0, "it was not of few bits"


@pytest.mark.parametrize(("bits", "steps"), [("int8", 254), ("int4", 15)])
def test_a_weight_moves_by_half_a_step_at_most(bits: Bits, steps: int) -> None:
    weight = normal(0, 48, 2 * GROUP)
    groups = weight.float().view(48, -1, GROUP) if bits == "int4" else weight.float().view(48, 1, -1)
    width = groups.abs().amax(-1) * 2 if bits == "int8" else groups.amax(-1) - groups.amin(-1)
    moved = (codes_of(weight, bits).weight().float() - weight.float()).view(groups.shape).abs().amax(-1)
    # And by what rounding scale, offset and weight to bf16 costs at the ends of the grid.
    assert bool((moved <= width / steps / 2 + 4 * 2**-9 * groups.abs().amax(-1)).all())


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1])
def test_groups_of_4_bits_pass_through_without_another_rounding(kind: GGMLQuantizationType) -> None:
    """From a file's bytes to bf16 weights, as `convert` stores them, and back to the file's own codes."""
    blocks = quants.quantize(normal(7, 80, 4 * GROUP).float().numpy(), kind)
    stored = torch.from_numpy(quants.dequantize(blocks, kind)).to(torch.bfloat16)
    header = 2 if kind == GGMLQuantizationType.Q4_0 else 4
    halves = blocks.reshape(80, 4, header + GROUP // 2)[..., header:]
    theirs = np.concatenate((halves & 15, halves >> 4), axis=-1).reshape(80, -1).astype(np.int64)
    found, theirs = to_4_bits(stored), torch.from_numpy(theirs).view(80, 4, GROUP)
    ours = (found.codes.long() + 8).view(80, 4, GROUP)
    # The steps of a group may be counted from either end, where Q4_0's step is negative.
    assert bool(((ours == theirs).all(-1) | (ours == 15 - theirs).all(-1)).all())
    assert lies_on_4_bits(stored)
    # bf16 has rounded each value, the two that place the grid, scale, offset, and the weight that comes of them.
    away = (found.weight().float() - stored.float()).abs().view(80, 4, GROUP).amax(-1)
    assert bool((away <= 6 * 2**-9 * stored.float().abs().view(80, 4, GROUP).amax(-1)).all())
    assert float((away / found.scale.float().abs()).max()) < 0.25, "rounded again, a weight moves by up to half a step"
    assert not lies_on_4_bits(normal(8, 80, 4 * GROUP))


def test_a_weight_without_whole_groups_keeps_its_own_product() -> None:
    weight, rows = normal(1, 24, 40), normal(2, 3, 40)
    for bits in BITS:
        product = low_bit_product(Weights((weight,), (None,)), bits, packed=True)
        assert torch.equal(product(rows), Packed(Weights((weight,), (None,)))(rows))


async def ask(runtime: Runtime, prompt: tuple[int, ...], **options: Any) -> Any:
    return await runtime.generate(list(prompt), max_tokens=8, logprobs=2, **options)


def agree(cold: Any, warm: Any) -> bool:
    """The same tokens, up to one where the cold run's two likeliest were within what bf16 can tell apart.

    Cold and warm multiply in batches of other sizes, so sums are made in another order, and rounded to 8 bits after.
    """
    for ours, theirs in zip(cold.logprobs, warm.logprobs, strict=True):
        if ours.token_id != theirs.token_id:
            return bool(ours.top[0][1] - ours.top[1][1] < 0.1)
    return True


@pytest.mark.parametrize("bits", BITS)
async def test_an_engine_over_few_bits_answers_warm_as_it_does_cold(
    bits: Bits, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    prompt = random_prompt(1, 37)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        async with Runtime(model, weights=bits, page_size=4, num_pages=64, context_limit=128, strict=True) as runtime:
            cold, first = await ask(runtime, prompt, cache=False), await ask(runtime, prompt)
            warm = await ask(runtime, prompt)
            longer = prompt + tuple(cold.token_ids)
            cold_longer, warm_longer = await ask(runtime, longer, cache=False), await ask(runtime, longer)
    assert warm.usage.cached_tokens == 36
    assert warm_longer.usage.cached_tokens >= 36
    assert agree(cold, first)
    assert agree(cold, warm)
    assert agree(cold_longer, warm_longer)
    assert any(f"weights {bits} for few rows" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("bits", BITS)
def test_steps_of_one_row_and_of_many_compute_one_model(bits: Bits, tmp_path: Path) -> None:
    """Which is not that of the weights before they were rounded."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    prompt, table = random_prompt(3, 12), list(range(1, 5))
    given: Any = {"name": "m", "verdicts": tmp_path, "context_limit": 64, "page_size": 4, "num_pages": 9}
    runners = [open_runner(copy.deepcopy(model), fingerprint=b"1", **given, weights=each) for each in (bits, None)]
    many, unrounded = (runner.run([PackedSequence(prompt, 0, table, "all")]).float() for runner in runners)
    one = torch.cat([runners[0].run([PackedSequence([token], i, table)]) for i, token in enumerate(prompt)]).float()
    for runner in runners:
        runner.close()
    scale = many.abs().max()
    assert float((many - one).abs().max() / scale) < 0.03, "further apart than bf16 arithmetic"
    if bits == "int4":
        assert float((many - unrounded).abs().max() / scale) > 0.06


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        ("llama", torch.float32, "weights='int4' multiplies bfloat16, and the model is float32: give dtype='bfloat16'"),
        ("gpt2", torch.bfloat16, "weights='int4' is for models whose layers agentkv runs by a forward of its own"),
    ],
)
async def test_where_there_are_no_such_products_it_says_so(kind: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await Runtime(tiny_model(kind).to(dtype), weights="int4", context_limit=64).start()


def test_the_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    from agentkv.models import fingerprint

    model = tiny_model("llama")
    assert len({fingerprint(model, weights=bits) for bits in (None, *BITS)}) == 3
