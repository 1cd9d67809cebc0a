"""The pages themselves: made lazily, copied, and carried between stores."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_kernels import (
    DtypeMismatch,
    LayerSpec,
    PageOutOfRange,
    PagesData,
    ShapeMismatch,
    StoreTooLarge,
)
from support.plain_backend import PlainBackend

LAYERS = [
    LayerSpec(2, 8, 8, torch.float32),
    LayerSpec(2, 8, 8, torch.float32, window=4),
    LayerSpec(1, 24, 16, torch.bfloat16),
]


def _random_pages(count: int, page_size: int, seed: int = 0) -> PagesData:
    generator = torch.Generator().manual_seed(seed)

    def tensors(name: str) -> list[torch.Tensor]:
        shapes = [(count, page_size, spec.kv_heads, getattr(spec, name)) for spec in LAYERS]
        return [
            torch.randn(shape, generator=generator).to(spec.dtype) for shape, spec in zip(shapes, LAYERS, strict=True)
        ]

    return PagesData(keys=tensors("key_size"), values=tensors("value_size"))


def _equal(left: PagesData, right: PagesData) -> bool:
    pairs = zip([*left.keys, *left.values], [*right.keys, *right.values], strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_store_takes_no_memory_before_its_pages_are_written(backend):
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system lacks")
    layers = [LayerSpec(8, 128, 128, torch.bfloat16)] * 32
    gc.collect()
    before = _resident_bytes()
    store = backend.make_store(layers, 2048, 16, "cpu")
    assert store.num_bytes == 4 << 30
    assert _resident_bytes() - before < 16 << 20
    assert not any(tensor.any() for tensor in store.export_pages([0, 2047]).keys)


def test_a_system_without_huge_pages_gives_others(backend, monkeypatch):
    refused = []

    class Plain(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            refused.append(advice)
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("agentkv_kernels.memory.mmap.mmap", Plain)
    store = backend.make_store(LAYERS, 8, 4, "cpu")
    given = _random_pages(2, 4)
    store.import_pages([5, 2], given)
    assert _equal(store.export_pages([5, 2]), given)
    assert bool(refused) == hasattr(mmap, "MADV_HUGEPAGE")


def test_a_store_beyond_all_memory_is_refused_by_name(backend):
    with pytest.raises(StoreTooLarge, match="fewer pages"):
        backend.make_store([LayerSpec(8, 128, 128, torch.float32)], 1 << 45, 16, "cpu")


def test_bytes_are_those_of_keys_and_values_over_all_layers(backend):
    store = backend.make_store(LAYERS, 5, 4, "cpu")
    assert store.page_bytes == 4 * (2 * 16 * 4 + 2 * 16 * 4 + 40 * 2)
    assert store.num_bytes == 5 * store.page_bytes
    assert store.layers == tuple(LAYERS)


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True), st.sampled_from([1, 4, 16]))
def test_pages_survive_the_way_through_stores_of_different_layouts(backend, page_ids, page_size):
    mine = backend.make_store(LAYERS, 7, page_size, "cpu")
    other = PlainBackend().make_store(LAYERS, 7, page_size, "cpu")
    pages = _random_pages(len(page_ids), page_size)
    mine.import_pages(page_ids, pages)
    other.import_pages(page_ids[::-1], mine.export_pages(page_ids))
    back = other.export_pages(page_ids[::-1])
    assert _equal(back, pages)
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in [*back.keys, *back.values])
    untouched = [page for page in range(7) if page not in page_ids]
    assert not any(tensor.any() for tensor in mine.export_pages(untouched).values)


def test_exported_pages_are_the_callers_own(backend):
    store = backend.make_store(LAYERS, 3, 1, "cpu")
    exported = store.export_pages([1])
    store.fill_slots([1], 5.0)
    assert not any(tensor.any() for tensor in exported.keys)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=8, unique_by=lambda pair: pair[1]))
def test_copied_pages_hold_what_their_sources_held_and_no_other_page_changes(backend, copies):
    store = backend.make_store(LAYERS, 8, 4, "cpu")
    pages = _random_pages(8, 4)
    store.import_pages(range(8), pages)
    backend.copy_pages(store, [src for src, _ in copies], [dst for _, dst in copies])
    source = list(range(8))
    for src, dst in copies:
        source[dst] = src
    expected = PagesData(keys=[k[source] for k in pages.keys], values=[v[source] for v in pages.values])
    assert _equal(store.export_pages(range(8)), expected)


def test_fill_slots_reaches_keys_and_values_of_every_layer_and_nothing_else(backend):
    store = backend.make_store(LAYERS, 2, 4, "cpu")
    store.fill_slots([1, 6], float("nan"))
    pages = store.export_pages([0, 1])
    for tensor in [*pages.keys, *pages.values]:
        poisoned = tensor.flatten(0, 1).isnan().flatten(1)
        assert poisoned.all(1).tolist() == poisoned.any(1).tolist() == [i in (1, 6) for i in range(8)]


@pytest.mark.parametrize("page_ids", [[-1], [3], [0, 7]])
def test_page_ids_the_store_does_not_have_are_refused_everywhere(backend, page_ids):
    store = backend.make_store(LAYERS, 3, 4, "cpu")
    for call in (
        lambda: store.export_pages(page_ids),
        lambda: store.import_pages(page_ids, _random_pages(len(page_ids), 4)),
        lambda: backend.copy_pages(store, page_ids, [0] * len(page_ids)),
        lambda: backend.copy_pages(store, [0] * len(page_ids), page_ids),
    ):
        with pytest.raises(PageOutOfRange, match="page ids are 0 to 2"):
            call()


def test_copy_pages_wants_one_destination_for_each_source(backend):
    with pytest.raises(ShapeMismatch, match="2 sources and 1 destinations"):
        backend.copy_pages(backend.make_store(LAYERS, 3, 4, "cpu"), [0, 1], [2])


def test_pages_that_do_not_fit_are_refused_before_anything_is_written(backend):
    store = backend.make_store(LAYERS, 3, 4, "cpu")
    good = _random_pages(1, 4)
    wrong_dtype = [*good.values[:-1], good.values[-1].float()]
    cases = [
        (PagesData(good.keys[:2], good.values), ShapeMismatch, "3 layers"),
        (_random_pages(2, 4), ShapeMismatch, "keys of layer 0"),
        (_random_pages(1, 8), ShapeMismatch, r"expected shape \[1, 4, 2, 8\]"),
        (PagesData(good.keys, wrong_dtype), DtypeMismatch, "values of layer 2"),
    ]
    for pages, error, message in cases:
        with pytest.raises(error, match=message):
            store.import_pages([1], pages)
    assert not any(tensor.any() for tensor in store.export_pages([1]).keys)


@pytest.mark.parametrize(
    "make",
    [
        lambda backend: LayerSpec(0, 8, 8, torch.float32),
        lambda backend: LayerSpec(1, 8, 0, torch.float32),
        lambda backend: LayerSpec(1, 8, 8, torch.float32, window=0),
        lambda backend: backend.make_store([], 3, 4, "cpu"),
        lambda backend: backend.make_store(LAYERS, 0, 4, "cpu"),
        lambda backend: backend.make_store(LAYERS, 3, 0, "cpu"),
        lambda backend: backend.make_store(LAYERS, 3, 4, "cpu").spec(3),
    ],
)
def test_layers_and_stores_of_nothing_are_plain_misuse(backend, make):
    with pytest.raises(ValueError, match=r".+"):
        make(backend)
