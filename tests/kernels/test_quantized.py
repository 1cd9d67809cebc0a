"""Pages of int8: what is kept of a key, the same bits in every backend, and answers that are those of what is kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_kernels import (
    Backend,
    DtypeMismatch,
    KVDtypeUnsupported,
    LayerSpec,
    PagesData,
    ShapeMismatch,
    bytes_per_page,
    get_backend,
    plan,
)
from agentkv_kernels.quantized import quantize
from support.examples import examples
from support.pages import kept, paged_step
from support.plain_backend import PlainBackend, SlotMajorStore

INT8 = torch.int8
LAYERS = [
    LayerSpec(2, 8, 12, torch.float32, kv_dtype=INT8),
    LayerSpec(1, 24, 16, torch.bfloat16),
    LayerSpec(3, 6, 8, torch.bfloat16, kv_dtype=INT8),
]


@pytest.fixture(scope="module")
def quantizing(backend: Backend) -> Backend:
    """Each backend that keeps int8; the others refuse it by name, which a test of its own looks at."""
    try:
        backend.make_store(LAYERS, 2, 4, "cpu")
    except KVDtypeUnsupported as refusal:
        pytest.skip(str(refusal))
    return backend


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, in rows of very different size: no row is like another, and some are far from 1."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-12, 12, (*shape[:-1], 1), generator=generator)
    return torch.randn(shape, generator=generator) * size


def write(backend: Backend, store, layer: int, slots: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec = store.layers[layer]
    key, value = (
        drawn(len(slots), spec.kv_heads, size, seed=seed + i).to(spec.dtype)
        for i, size in enumerate((spec.key_size, spec.value_size))
    )
    backend.store_kv(store, layer, key, value, torch.tensor(slots))
    return key, value


def parts(pages: PagesData) -> list[torch.Tensor]:
    """As bits, so that NaN equals NaN."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return [part.view(integers[part.dtype.itemsize]) for part in (*pages.keys, *pages.values, *pages.scales)]


def assert_same_bits(left: PagesData, right: PagesData) -> None:
    for one, other in zip(parts(left), parts(right), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_no_element_is_off_by_more_than_half_a_step_and_the_largest_is_127_of_them(numbers):
    vector = torch.tensor(numbers)
    whole, scale = quantize(vector, INT8)
    assert (whole.dtype, scale.dtype, scale.shape) == (INT8, torch.bfloat16, ())
    most = float(vector.abs().max())
    if most < 1e-30:  # Scales of less have few bits, or none.
        assert float((whole.double() * scale.double() - vector.double()).abs().max()) <= 1e-30
        return
    # The scale is rounded by 2**-9 of itself: the largest is then 127 of them, give or take a quarter.
    assert float((whole.double() * scale.double() - vector.double()).abs().max()) <= 0.5001 * float(scale)
    assert int(whole.abs().max()) in (126, 127)


def test_halves_are_rounded_to_even():
    whole, scale = quantize(torch.tensor([127.0, 0.5, 1.5, -2.5, 63.5]), INT8)
    assert float(scale) == 1
    assert whole.tolist() == [127, 0, 2, -2, 64]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_spoils_its_own_vector_and_no_other(broken):
    whole, scales = quantize(torch.tensor([[1.0, broken], [1.0, 2.0], [0.0, 0.0]]), INT8)
    assert (whole * scales.float()[:, None]).isnan().any(1).tolist() == [True, False, False]
    assert whole[2].tolist() == [0, 0]


def test_a_token_takes_one_byte_an_element_and_two_for_each_scale():
    exact, small = (LayerSpec(3, 64, 64, torch.bfloat16, kv_dtype=kv_dtype) for kv_dtype in (None, INT8))
    assert (exact.token_bytes, small.token_bytes) == (3 * 256, 3 * 132)
    assert bytes_per_page([small] * 30, 16) == 30 * 16 * 3 * 132


@settings(deadline=None, max_examples=examples(20))
@given(
    slots=st.lists(st.integers(0, 95), min_size=1, max_size=20, unique=True),
    page_size=st.sampled_from([1, 4, 16, 24]),
    seed=st.integers(0, 2**16),
)
def test_every_backend_keeps_the_same_bits_however_tokens_are_batched(quantizing, slots, page_size, seed):
    plain = PlainBackend()
    mine, other = (each.make_store(LAYERS, 96 // page_size, page_size, "cpu") for each in (quantizing, plain))
    for layer in range(len(LAYERS)):
        key, value = write(quantizing, mine, layer, slots, seed)
        for i, slot in enumerate(slots):
            plain.store_kv(other, layer, key[i : i + 1], value[i : i + 1], torch.tensor([slot]))
    every = range(mine.num_pages)
    assert_same_bits(mine.export_pages(every), other.export_pages(every))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_with_their_scales_come_back_bit_by_bit_through_stores_of_other_layouts(quantizing, page_size):
    stores = [each.make_store(LAYERS, 6, page_size, "cpu") for each in (quantizing, PlainBackend(), quantizing)]
    for layer in range(len(LAYERS)):
        write(quantizing, stores[0], layer, list(range(6 * page_size)), seed=layer)
    stores[0].fill_slots([0, 2 * page_size], float("nan"))
    first = stores[0].export_pages([2, 5, 0])
    stores[1].import_pages([1, 3, 4], first)
    stores[2].import_pages([5, 2, 1], stores[1].export_pages([1, 3, 4]))
    again = stores[2].export_pages([5, 2, 1])
    assert_same_bits(again, first)
    assert [scales.shape for scales in again.scales] == [(3, page_size, 2, 2), (3, page_size, 3, 2)]
    assert all(scales.is_contiguous() and scales.dtype == torch.bfloat16 for scales in again.scales)
    assert not any(scales.any() for scales in stores[2].export_pages([0, 3, 4]).scales)


def test_a_copied_page_takes_its_scales_along(quantizing):
    store = quantizing.make_store(LAYERS, 4, 4, "cpu")
    for layer in range(len(LAYERS)):
        write(quantizing, store, layer, list(range(16)), seed=layer)
    before = store.export_pages([1, 2, 3])
    quantizing.copy_pages(store, [1], [0])
    quantizing.copy_pages(store, [2, 3], [3, 2])
    assert_same_bits(store.export_pages([0, 3, 2]), before)


def test_filled_slots_have_scales_and_no_other_slot_changes(quantizing):
    store = quantizing.make_store(LAYERS, 2, 4, "cpu")
    store.fill_slots([1, 6], float("nan"))
    for scales in store.export_pages([0, 1]).scales:
        poisoned = scales.flatten(0, 1).isnan().flatten(1)
        assert poisoned.all(1).tolist() == poisoned.any(1).tolist() == [i in (1, 6) for i in range(8)]
    store.fill_slots([1], 63.5)
    assert all((scales[0, 1] == 0.5).all() for scales in store.export_pages([0]).scales)


def test_pages_whose_scales_do_not_fit_are_refused_before_anything_is_written(quantizing):
    store = quantizing.make_store(LAYERS, 3, 4, "cpu")
    other = PlainBackend().make_store(LAYERS, 3, 4, "cpu")
    other.fill_slots(range(12), 1.0)
    good = other.export_pages([1])
    exact = PlainBackend().make_store(
        [LayerSpec(s.kv_heads, s.key_size, s.value_size, s.dtype) for s in LAYERS], 3, 4, "cpu"
    )
    wide, short = [each.float() for each in good.scales], [each[:, :3] for each in good.scales]
    for pages, error, message in [
        (PagesData(good.keys, good.values), ShapeMismatch, "2 quantized layers, the pages have scales of 0"),
        (PagesData(good.keys, good.values, wide), DtypeMismatch, r"scales of layer 0: .*bfloat16, got torch\.float32"),
        (PagesData(good.keys, good.values, short), ShapeMismatch, r"scales of layer 0: expected shape \[1, 4, 2, 2\]"),
        (exact.export_pages([1]), ShapeMismatch, "scales of 0"),
    ]:
        with pytest.raises(error, match=message):
            store.import_pages([1], pages)
    assert not any(part.any() for part in parts(store.export_pages([1])))


def test_a_backend_that_cannot_keep_int8_says_so_and_what_to_do():
    class ExactStore(SlotMajorStore):
        kv_dtypes = ()

    with pytest.raises(KVDtypeUnsupported, match=r"layer 0 wants pages of torch\.int8.*leave kv_dtype out, or take"):
        ExactStore(LAYERS, 3, 4)


def test_no_other_dtype_can_be_asked_for():
    with pytest.raises(
        ValueError, match=r"kv_dtype is torch\.int8 or torch\.float8_e4m3fn, or None .*, got torch\.int16"
    ):
        LayerSpec(1, 8, 8, torch.float32, kv_dtype=torch.int16)


@settings(deadline=None, max_examples=examples(20))
@given(
    lens=st.lists(st.tuples(st.sampled_from([1, 1, 2, 17]), st.integers(0, 40)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    key_size=st.sampled_from([8, 24, 64]),
    value_size=st.sampled_from([8, 40]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 7, 40]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    poison=st.sampled_from([float("nan"), float("inf")]),
    seed=st.integers(0, 2**16),
)
def test_any_step_equals_the_definition_over_what_is_kept_with_nan_in_every_other_slot(
    quantizing, lens, kv_heads, group, key_size, value_size, page_size, window, softcap, with_sinks, poison, seed
):
    step = paged_step(
        quantizing,
        [q for q, _ in lens],
        [c for _, c in lens],
        spec=LayerSpec(kv_heads, key_size, value_size, torch.float32, kv_dtype=INT8),
        num_heads=kv_heads * group,
        page_size=page_size,
        seed=seed,
        poison=poison,
    )
    sinks = torch.linspace(-1, 3, kv_heads * group) if with_sinks else None
    options = {"window": window, "softcap": softcap, "sinks": sinks}
    # Whole numbers are exact and scales have 8 bits, so what is rounded, and how often, is what it is without them.
    expected = step.expected_at_length(**options)
    torch.testing.assert_close(step.attend(**options).double(), expected, rtol=0, atol=1e-5)


def test_in_bf16_it_stays_within_the_rounding_of_its_own_inputs(quantizing):
    spec = LayerSpec(3, 64, 64, torch.bfloat16, kv_dtype=INT8)
    step = paged_step(quantizing, [1, 20, 1, 40], [50, 30, 0, 0], spec=spec, num_heads=9, page_size=16)
    out = step.attend(scale=0.125)
    assert out.dtype == torch.bfloat16
    # As in test_attend: scores, probabilities and result are each rounded once.
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out.double(), step.expected_at_length(scale=0.125), rtol=2 * eps, atol=5 * 4 * eps)


def test_rounding_moves_answers_by_less_than_its_steps(quantizing):
    """Against keys and values as they were: each is off by 1 / 254 of its vector's largest element at most."""
    spec = LayerSpec(2, 64, 64, torch.float32, kv_dtype=INT8)
    step = paged_step(quantizing, [1, 9], [60, 31], spec=spec, num_heads=4, page_size=16)
    exact = paged_step(
        get_backend("reference"), [1, 9], [60, 31], spec=LayerSpec(2, 64, 64, torch.float32), num_heads=4, page_size=16
    )
    moved = (step.attend(scale=0.125) - exact.attend(scale=0.125)).abs().max()
    # Values are at most 4.5, so a step is 0.036; scores are sums of 64 such errors of either sign, times 0.125.
    assert 0 < float(moved) < 0.036
    assert not torch.equal(kept(exact.keys[0], spec), exact.keys[0])


def test_a_prompt_in_chunks_keeps_the_pages_of_the_prompt_at_once(quantizing):
    spec = LayerSpec(2, 16, 16, torch.float32, kv_dtype=INT8)
    key, value = drawn(37, 2, 16), drawn(37, 2, 16, seed=1)
    stores = [quantizing.make_store([spec], 11, 4, "cpu") for _ in range(2)]
    for store, chunk in zip(stores, (37, 5), strict=True):
        for start in range(0, 37, chunk):
            end = min(start + chunk, 37)
            metadata = plan([end - start], [start], [list(range(1, 11))], page_size=4)
            quantizing.store_kv(store, 0, key[start:end], value[start:end], metadata.slot_mapping)
    assert_same_bits(*(store.export_pages(range(11)) for store in stores))
