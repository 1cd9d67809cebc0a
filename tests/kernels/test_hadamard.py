"""Queries and keys rotated for pages of few bits: scores stay, nothing stands out, and the bits are always the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentkv_kernels import CpuBackend, DtypeMismatch, Hadamard, ShapeMismatch
from agentkv_kernels.hadamard import Factors

FP32, BF16, FP64 = torch.float32, torch.bfloat16, torch.float64
SIZES = (2, 6, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 320, 512)
"""Blocks of 2 to 512, alone and several, shorter and longer than a vector, and lines that no vector fills."""


def draw(seed: int, *shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exactly(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return Hadamard(query.shape[-1], FP64)(query.double(), key.double())


@pytest.mark.parametrize("size", [1, 3, *SIZES])
def test_scores_of_both_rotated_are_those_of_the_originals(size: int) -> None:
    query, key = draw(0, 3, 4, size, dtype=FP64), draw(1, 3, 2, size, dtype=FP64)
    turned_query, turned_key = Hadamard(size, FP64)(query, key)
    scores = torch.einsum("nhd,nkd->nhk", turned_query, turned_key)
    torch.testing.assert_close(scores, torch.einsum("nhd,nkd->nhk", query, key), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_no_element_that_stands_out_does_so_any_more_and_none_that_did_not_begins_to(size: int) -> None:
    block = Factors.of(size).block
    spikes, level = torch.eye(size).unsqueeze(0), torch.ones(1, 1, size)
    for kind, vectors, spread in (("one element", spikes, 1.0), ("all alike", level, 2.0**0.5)):
        _, keys = Hadamard(size, FP32)(vectors, vectors)
        within = keys.view(-1, size // block, block)
        # The most there is beside the root of the mean square over a block: 1 where all are of one size.
        most, mean = within.abs().amax(-1), within.square().mean(-1).sqrt()
        assert float((most - spread * mean).max()) <= 1e-6 * float(most.max()), kind


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("size", SIZES)
def test_compiled_it_is_what_torch_computes_and_equal_vectors_get_equal_bits(
    cpu: CpuBackend, size: int, dtype: torch.dtype
) -> None:
    # Heads as a model hands them over: of a wider tensor, keys with their tokens innermost but one.
    query = draw(2, 21, 5, size + 2, dtype=dtype)[:, :, :size]
    key = draw(3, 3, 21, size, dtype=dtype).transpose(0, 1)
    rotate = cpu.make_hadamard(size, dtype)
    rotated = rotate(query, key)
    for found, exact in zip(rotated, exactly(query, key), strict=True):
        assert (found.dtype, found.shape) == (dtype, exact.shape)
        rounding = 2**-8 * exact.abs() if dtype == BF16 else 0
        assert bool(((found.double() - exact).abs() <= rounding + 2e-6 * exact.abs().max()).all())
    for token in (0, 20):
        alone = rotate(query[token : token + 1].contiguous(), key[token : token + 1])
        assert all(torch.equal(one[0], many[token]) for one, many in zip(alone, rotated, strict=True))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    again = rotate(query, key)
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(rotated, again, strict=True))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_instruction_set_has_the_same_bits(cpu: CpuBackend, dtype: torch.dtype) -> None:
    for size in SIZES:
        query, key = draw(8, 4, 3, size, dtype=dtype), draw(9, 4, 1, size, dtype=dtype)
        here, plain = (each.make_hadamard(size, dtype)(query, key) for each in (cpu, CpuBackend("plain")))
        assert all(torch.equal(one, other) for one, other in zip(here, plain, strict=True))


def test_what_is_rotated_stays_as_it_was_and_no_tokens_at_all_are_taken(cpu: CpuBackend) -> None:
    query, key = draw(4, 2, 3, 16), draw(5, 2, 1, 16)
    kept = query.clone(), key.clone()
    cpu.make_hadamard(16, FP32)(query, key)
    assert torch.equal(query, kept[0])
    assert torch.equal(key, kept[1])
    assert [part.shape for part in cpu.make_hadamard(16, FP32)(query[:0], key[:0])] == [(0, 3, 16), (0, 1, 16)]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_vector_with_no_number_in_it_is_all_nan_and_its_neighbours_are_not(cpu: CpuBackend, broken: float) -> None:
    query, key = draw(6, 2, 2, 64, dtype=BF16), draw(7, 2, 1, 64, dtype=BF16)
    key[0, 0, 5] = broken
    for rotate in (cpu.make_hadamard(64, BF16), Hadamard(64, BF16)):
        turned_query, turned_key = rotate(query, key)
        assert not bool(turned_key[0].isfinite().any())
        assert bool(turned_key[1].isfinite().all())
        assert bool(turned_query.isfinite().all())


def test_other_heads_than_it_was_made_for_are_refused(cpu: CpuBackend) -> None:
    for rotate in (cpu.make_hadamard(16, FP32), Hadamard(16, FP32)):
        for query, key in (
            ((2, 3, 8), (2, 1, 16)),
            ((2, 3, 16), (2, 1, 8)),
            ((2, 3, 16), (3, 1, 16)),
            ((3, 16), (3, 16)),
        ):
            with pytest.raises(ShapeMismatch, match="heads of 16"):
                rotate(torch.zeros(query), torch.zeros(key))
        with pytest.raises(DtypeMismatch, match="float32"):
            rotate(torch.zeros(2, 3, 16, dtype=BF16), torch.zeros(2, 1, 16))


def test_what_the_kernels_are_not_made_for_is_refused_before_anything_is_rotated(cpu: CpuBackend) -> None:
    for size in (0, -2, 514, 1024):
        with pytest.raises(ShapeMismatch, match="1 to 512"):
            cpu.make_hadamard(size, FP32)
    with pytest.raises(DtypeMismatch, match="float16"):
        cpu.make_hadamard(16, torch.float16)
