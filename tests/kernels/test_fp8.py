"""Pages of fp8: as those of int8, with numbers of three bits, in the backends that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_kernels import Backend, KVDtypeUnsupported, KVStore, LayerSpec, PagesData, ReferenceBackend, get_backend
from agentkv_kernels.quantized import quantize
from support.pages import paged_step
from support.plain_backend import PlainBackend

FP8 = torch.float8_e4m3fn
LAYERS = [
    LayerSpec(2, 8, 12, torch.float32, kv_dtype=FP8),
    LayerSpec(1, 24, 16, torch.bfloat16, kv_dtype=torch.int8),
    LayerSpec(3, 6, 8, torch.bfloat16, kv_dtype=FP8),
]


def filled(backend: Backend, *, one_by_one: bool) -> KVStore:
    """A store of 6 pages of 4 slots, all written, from vectors of very different size."""
    store, draw = backend.make_store(LAYERS, 6, 4, "cpu"), torch.Generator().manual_seed(3)
    for layer, spec in enumerate(LAYERS):
        sizes = 10.0 ** torch.randint(-12, 12, (24, spec.kv_heads, 1), generator=draw)
        key, value = (
            (torch.randn(24, spec.kv_heads, size, generator=draw) * sizes).to(spec.dtype)
            for size in (spec.key_size, spec.value_size)
        )
        for slots in torch.arange(24).split(1 if one_by_one else 24):
            backend.store_kv(store, layer, key[slots], value[slots], slots)
    return store


def bits(pages: PagesData) -> list[torch.Tensor]:
    return [part.view(torch.uint8) for part in (*pages.keys, *pages.values, *pages.scales)]


def assert_same_bits(left: PagesData, right: PagesData) -> None:
    for one, other in zip(bits(left), bits(right), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9))
def test_no_element_is_off_by_more_than_a_sixteenth_of_itself_or_the_last_bit_of_its_scale(
    numbers: list[float],
) -> None:
    vector = torch.tensor(numbers)
    kept, scale = quantize(vector, FP8)
    assert (kept.dtype, scale.dtype, scale.shape) == (FP8, torch.bfloat16, ())
    if float(vector.abs().max()) < 1e-30:  # Scales of less have few bits, or none.
        return
    error = (kept.double() * scale.double() - vector.double()).abs()
    assert bool((error <= torch.maximum(vector.double().abs() / 16, scale.double() * 2**-10) * 1.0001).all())
    assert float(kept.float().abs().max()) in (448, 416)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_vector_and_no_other(broken: float) -> None:
    kept, scales = quantize(torch.tensor([[1.0, broken], [1.0, 2.0], [0.0, 0.0]]), FP8)
    assert (kept.float() * scales.float()[:, None]).isnan().any(1).tolist() == [True, False, False]
    assert kept[2].tolist() == [0, 0]


def test_pages_are_the_same_bits_in_every_layout_and_travel_with_their_scales() -> None:
    plain, reference = filled(PlainBackend(), one_by_one=True), filled(ReferenceBackend(), one_by_one=False)
    every = plain.export_pages(range(6))
    assert_same_bits(reference.export_pages(range(6)), every)
    assert [each.dtype for each in every.keys] == [FP8, torch.int8, FP8]
    other = ReferenceBackend().make_store(LAYERS, 6, 4, "cpu")
    other.import_pages([3, 1], reference.export_pages([2, 5]))
    ReferenceBackend().copy_pages(other, [3, 1], [1, 3])
    ReferenceBackend().copy_pages(other, [1], [4])
    assert_same_bits(other.export_pages([4, 3]), plain.export_pages([2, 5]))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"window": 7}),
        (torch.float32, {"softcap": 2.0, "sinks": True}),
        (torch.bfloat16, {}),
    ],
    ids=str,
)
def test_answers_are_those_of_what_is_kept_with_nan_in_every_other_slot(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    spec = LayerSpec(2, 32, 24, dtype, kv_dtype=FP8)
    step = paged_step(ReferenceBackend(), [1, 20, 1], [50, 13, 0], spec=spec, num_heads=4, page_size=8)
    if options.get("sinks"):
        options = {**options, "sinks": torch.linspace(-1, 3, 4)}
    # As in test_quantized: fp32 is exact, and bf16 rounds scores, probabilities and the result once each.
    eps = torch.finfo(torch.bfloat16).eps
    rtol, atol = (0.0, 1e-5) if dtype == torch.float32 else (2 * eps, 5 * 4 * eps)
    expected = step.expected_at_length(scale=32**-0.5, **options)
    torch.testing.assert_close(step.attend(scale=32**-0.5, **options).double(), expected, rtol=rtol, atol=atol)


def test_the_cpu_backend_keeps_no_fp8_and_says_what_it_keeps() -> None:
    try:
        cpu = get_backend("cpu")
    except Exception as error:
        pytest.skip(str(error))
    layers: Sequence[LayerSpec] = [LayerSpec(1, 8, 8, torch.float32), LAYERS[0]]
    with pytest.raises(
        KVDtypeUnsupported, match=r"layer 1 wants .*float8_e4m3fn.*keeps torch\.float32 or torch\.int8; leave kv_dtype"
    ):
        cpu.make_store(layers, 3, 4, "cpu")
