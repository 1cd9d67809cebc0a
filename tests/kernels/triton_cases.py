"""The triton backend against attention's definition, in Triton's interpreter.

`test_triton.py` runs this file in a process of its own: the interpreter is chosen by TRITON_INTERPRET as triton is
imported, for all of a process. To run it by hand:

    TRITON_INTERPRET=1 python -m pytest tests/kernels/triton_cases.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from agentkv_kernels import (
    AttentionMetadata,
    KVDtypeUnsupported,
    KVStore,
    LayerSpec,
    LayerUnsupported,
    PageOutOfRange,
    PagesData,
    ReferenceBackend,
    ShapeMismatch,
    SharedRun,
    get_backend,
    plan,
)
from agentkv_kernels.quantized import LARGEST
from agentkv_kernels.triton.backend import TritonBackend
from support.pages import PagedStep, kept, paged_step
from support.plain_backend import PlainBackend

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
# fp32 as in test_attend. Below it scores stay fp32; probabilities are rounded once and so is the result, each by eps at
# most, for the interpreter cuts off what the device rounds; values stay below 5.
BOUNDS = {FP32: (0.0, 1e-5), **{dtype: (2 * eps, 5 * eps) for dtype, eps in ((BF16, 2**-7), (FP16, 2**-10))}}
"""(relative, absolute)"""

WHOLE = TritonBackend(CPU, programs=1)
"""No sequence's keys are parted."""
PARTED = TritonBackend(CPU, programs=64, least_keys=16)
"""Keys are parted every 16, and the parts merged."""


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, so that what a kernel leaves out is seen."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(float("nan")) if made.dtype.is_floating_point else made

    monkeypatch.setattr(torch, "empty", poisoned)


def assert_exact(step: PagedStep, **options: Any) -> None:
    rtol, atol = BOUNDS[step.query.dtype]
    out = step.attend(**options)
    assert out.dtype == step.query.dtype
    torch.testing.assert_close(out.double(), step.expected_at_length(**options), rtol=rtol, atol=atol)


def _shown(value: object) -> str:
    """A parameter's part of a test's name."""
    return {id(WHOLE): "whole", id(PARTED): "parted"}.get(id(value), str(value))


def _spec(dtype: torch.dtype = FP32, kv_heads: int = 2, key_size: int = 32, value_size: int = 32) -> LayerSpec:
    return LayerSpec(kv_heads, key_size, value_size, dtype)


@pytest.mark.parametrize(
    ("page_size", "query_len", "contexts"),
    [
        (1, 1, range(5)),
        (4, 1, range(17)),
        (4, 3, (0, 1, 2, 3, 5, 14)),
        (3, 2, (0, 1, 2, 11)),
        (16, 1, (15, 16, 63)),
        (16, 18, (0, 13, 14, 15)),
    ],
)
def test_every_length_around_the_edges_of_pages(page_size: int, query_len: int, contexts: Sequence[int]) -> None:
    lens = [query_len] * len(contexts), contexts
    assert_exact(paged_step(WHOLE, *lens, spec=_spec(kv_heads=1), num_heads=2, page_size=page_size))


@pytest.mark.parametrize(
    ("kv_heads", "group", "key_size", "value_size"),
    [(3, 3, 32, 48), (2, 1, 8, 40), (1, 4, 80, 96), (1, 2, 192, 128), (1, 20, 16, 16), (1, 70, 16, 8)],
)
def test_any_heads_and_sizes(kv_heads: int, group: int, key_size: int, value_size: int) -> None:
    spec = _spec(FP32, kv_heads, key_size, value_size)
    step = paged_step(PARTED, [1, 5], [20, 9], spec=spec, num_heads=kv_heads * group, page_size=4)
    assert_exact(step, scale=key_size**-0.5)


@pytest.mark.parametrize(
    ("backend", "window", "options"),
    [
        (WHOLE, 1, {}),
        (WHOLE, 5, {"softcap": 2.0}),
        (WHOLE, 17, {"sinks": True}),
        (WHOLE, 2**40, {}),
        (WHOLE, None, {"softcap": 30.0, "sinks": True}),
        (PARTED, 40, {"softcap": 30.0, "sinks": True}),
        (PARTED, None, {"softcap": 2.0}),
        (PARTED, 17, {}),
    ],
    ids=_shown,
)
def test_windows_softcaps_and_sinks(backend: TritonBackend, window: int | None, options: dict[str, Any]) -> None:
    options = {**options, "window": window}
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-1, 3, 2)
    step = paged_step(backend, [1, 7, 1], [45, 30, 0], spec=_spec(kv_heads=1), num_heads=2, page_size=4)
    assert_exact(step, **options)


@pytest.mark.parametrize(
    ("backend", "dtype", "window"),
    [(WHOLE, BF16, None), (WHOLE, FP16, 9), (PARTED, BF16, 9), (PARTED, FP16, None)],
    ids=_shown,
)
def test_low_precision_stays_within_its_own_rounding(
    backend: TritonBackend, dtype: torch.dtype, window: int | None
) -> None:
    step = paged_step(backend, [1, 20], [50, 30], spec=_spec(dtype, 1), num_heads=3, page_size=16)
    assert_exact(step, scale=32**-0.5, window=window)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(FP32, INT8), (BF16, INT8), (FP32, FP8), (FP16, FP8)], ids=str)
def test_pages_of_a_byte_an_element_hold_the_bits_that_the_reference_keeps(
    dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Keys of powers of ten, ties, vectors of zeros and what is not finite, into views of wider tensors."""
    spec = LayerSpec(2, 24, 40, dtype, kv_dtype=kv_dtype)
    draw, largest = torch.Generator().manual_seed(5), LARGEST[kv_dtype]
    sizes = 10.0 ** torch.randint(-4, 4, (8, 2, 1), generator=draw)
    key, value = (torch.randn(8, 2, 2 * size, generator=draw) * sizes for size in (24, 40))
    ties = torch.tensor([0.5, 1.5, -2.5, 17, 19, 2**-7, 3 * 2**-10, -(2**-10), 1.5 * 2**-9, 0.015, -0.0])
    key[1] = value[0] = 0.0
    for vectors in (key, value):
        vectors[2, :, :22:2], vectors[2, :, 22] = ties, largest
        # Its scale is rounded down, so that the quotient is beyond the largest number.
        vectors[3, 0, 0] = 1.0039 * 2 * vectors[3].abs().max()
        vectors[4, 1, 2], vectors[5, 0, 4], vectors[6, 1, 6] = float("nan"), float("inf"), -float("inf")
    key, value = (each.to(dtype)[..., ::2] for each in (key, value))
    stored = []
    for backend in (WHOLE, ReferenceBackend()):
        store = backend.make_store([spec], 5, 4, "cpu")
        backend.store_kv(store, 0, key, value, torch.arange(17, 9, -1))
        stored.append(store.export_pages(range(5)))
    mine, theirs = stored
    assert torch.equal(mine.keys[0].view(torch.uint8), theirs.keys[0].view(torch.uint8))
    assert torch.equal(mine.values[0].view(torch.uint8), theirs.values[0].view(torch.uint8))
    # A scale of NaN has many bits.
    torch.testing.assert_close(mine.scales[0], theirs.scales[0], rtol=0, atol=0, equal_nan=True)
    assert len(mine.keys[0].view(torch.uint8).unique()) > 100


@pytest.mark.parametrize(
    ("backend", "dtype", "kv_dtype", "options"),
    [
        (WHOLE, FP32, INT8, {"window": 9, "softcap": 2.0}),
        (PARTED, BF16, INT8, {"sinks": True}),
        (PARTED, FP32, FP8, {"window": 17}),
        (WHOLE, BF16, FP8, {}),
    ],
    ids=_shown,
)
def test_answers_are_those_of_what_is_kept_with_nan_in_every_other_slot(
    backend: TritonBackend, dtype: torch.dtype, kv_dtype: torch.dtype, options: dict[str, Any]
) -> None:
    spec = LayerSpec(1, 24, 40, dtype, kv_dtype=kv_dtype)
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 3, 2)}
    assert_exact(paged_step(backend, [1, 5], [29, 13], spec=spec, num_heads=2, page_size=8), **options)


@pytest.mark.parametrize("kv_dtype", [INT8, FP8], ids=str)
def test_small_values_in_fp16_are_not_lost_below_what_it_holds(kv_dtype: torch.dtype) -> None:
    spec = LayerSpec(1, 16, 16, FP16, kv_dtype=kv_dtype)
    step = paged_step(WHOLE, [1], [20], spec=spec, num_heads=2, page_size=16)
    small = (torch.rand(21, 1, 16, generator=torch.Generator().manual_seed(1)) * 1e-4 + 5e-5).to(FP16)
    slots = torch.tensor([step.page_tables[0][i // 16] * 16 + i % 16 for i in range(21)])
    WHOLE.store_kv(step.store, 0, step.keys[0].to(FP16), small, slots)
    expected = kept(small, spec).mean(0).expand(2, 16)[None]
    # With keys of no weight every token counts alike: probabilities of 1 / 21, times scales of 1.2e-6 or less.
    out = step.attend(scale=0.0)
    torch.testing.assert_close(out.float(), expected, rtol=4 * 2**-10, atol=0)


def test_fp8_is_refused_by_devices_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    old = TritonBackend(CPU)
    monkeypatch.setattr(old, "_capability", (8, 6))
    fp8, int8 = (LayerSpec(1, 16, 16, BF16, kv_dtype=kv_dtype) for kv_dtype in (FP8, INT8))
    with pytest.raises(KVDtypeUnsupported, match=r"layer 1 .*float8_e4m3fn.* 8\.9 and higher, and cpu has 8\.6; take"):
        old.make_store([int8, fp8], 3, 4, "cpu")
    assert old.make_store([int8], 3, 4, "cpu").num_pages == 3


def test_a_long_chunk_in_tiles_of_many_tokens() -> None:
    assert_exact(paged_step(WHOLE, [40], [20], spec=_spec(kv_heads=1), num_heads=2, page_size=16), window=30)


def test_scores_that_grow_from_block_to_block_lose_nothing() -> None:
    for backend in (WHOLE, PARTED):
        step = paged_step(backend, [1, 3], [70, 30], spec=_spec(kv_heads=1), num_heads=2, page_size=16)
        for i, (pages, key) in enumerate(zip(step.page_tables, step.keys, strict=True)):
            key *= torch.linspace(0, 8, len(key))[:, None, None]
            slots = torch.tensor([pages[i // 16] * 16 + i % 16 for i in range(len(key))])
            backend.store_kv(step.store, 0, key, step.values[i], slots)
        # Scores reach 60, each rounded to 60 * 6e-8 * a few; so are the probabilities, and values stay below 5.
        expected = step.expected_at_length(scale=1.0)
        torch.testing.assert_close(step.attend(scale=1.0).double(), expected, rtol=0, atol=2e-4)


def test_a_sliding_layer_relies_on_no_page_that_lies_wholly_before_its_window() -> None:
    step = paged_step(PARTED, [1, 8], [60, 60], spec=_spec(), num_heads=4, page_size=4)
    expected = step.expected(window=8)
    dead = [page * 4 + offset for pages in step.page_tables for page in pages[:13] for offset in range(4)]
    step.store.fill_slots(dead, float("nan"))
    torch.testing.assert_close(step.attend(window=8).double(), expected, rtol=0, atol=BOUNDS[FP32][1])


def test_padding_writes_to_the_null_page_and_nothing_reads_it() -> None:
    step = paged_step(WHOLE, [1, 3], [20, 9], spec=_spec(BF16), num_heads=4, page_size=16)
    before = step.attend()
    nan = torch.full((5, 2, 32), float("nan"), dtype=BF16)
    WHOLE.store_kv(step.store, 0, nan, nan, torch.tensor([0, 0, 3, 15, 0]))
    assert torch.equal(step.attend(), before)


def test_queries_keys_and_values_may_be_views_of_larger_tensors() -> None:
    step = paged_step(WHOLE, [1, 2], [3, 5], spec=_spec(), num_heads=4, page_size=4)
    wide = torch.randn(3, 8, 32)
    wide[:, 1:5] = step.query
    turned = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (wide[:, 1:5], turned):
        assert torch.equal(step.attend(query=query), step.attend())
    key, value = torch.randn(3, 32, 2).transpose(1, 2), torch.randn(3, 2, 64)[..., ::2]
    WHOLE.store_kv(step.store, 0, key, value, torch.tensor([5, 6, 9]))
    pages = step.store.export_pages([1, 2])
    assert torch.equal(pages.keys[0].view(8, 2, 32)[[1, 2, 5]], key)
    assert torch.equal(pages.values[0].view(8, 2, 32)[[1, 2, 5]], value)


TREES: dict[str, tuple[list[list[int]], list[tuple[tuple[int, ...], int, int]]]] = {
    # Pages of each sequence, and the edges of the tree.
    "one level": ([[1, 2, 3, 10], [1, 2, 3, 11, 12], [13]], [((0, 1), 0, 3)]),
    "two levels": ([[1, 2, 3, 10], [1, 2, 3, 11], [1, 12, 13]], [((0, 1, 2), 0, 1), ((0, 1), 1, 2)]),
    "three levels": (
        [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12], [1, 13], [14, 15]],
        [((0, 1, 2, 3), 0, 1), ((0, 1, 2), 1, 1), ((0, 1), 2, 1)],
    ),
    "two trees": ([[1, 2, 10], [1, 2, 11], [3, 12], [3, 13, 14]], [((0, 1), 0, 2), ((2, 3), 0, 1)]),
}


def _steps_over(
    tree: str, backend: TritonBackend, spec: LayerSpec, page_size: int
) -> tuple[KVStore, AttentionMetadata, AttentionMetadata]:
    """A store with random pages and NaN behind them, and a step over it apart and together."""
    tables, edges = TREES[tree]
    store, draw = backend.make_store([spec], 16, page_size, "cpu"), torch.Generator().manual_seed(1)
    store.fill_slots(range(16 * page_size), float("nan"))
    # The last page of each is partly filled, and some sequences compute more than one token.
    seq_lens = [len(table) * page_size - 1 - i % 2 for i, table in enumerate(tables)]
    query_lens = [1 if i % 2 else 2 for i in range(len(tables))]
    contexts = [seq - query for seq, query in zip(seq_lens, query_lens, strict=True)]
    for table, length in zip(tables, seq_lens, strict=True):
        slots = torch.tensor([table[i // page_size] * page_size + i % page_size for i in range(length)])
        sizes = (spec.key_size, spec.value_size)
        key, value = (torch.randn(length, spec.kv_heads, size, generator=draw).to(spec.dtype) for size in sizes)
        backend.store_kv(store, 0, key, value, slots)
    apart, together = (
        plan(query_lens, contexts, tables, page_size=page_size, shared=runs)
        for runs in ([], [SharedRun(*edge) for edge in edges])
    )
    return store, apart, together


@pytest.mark.parametrize(
    ("tree", "backend", "dtype", "options"),
    [
        *((tree, WHOLE, FP32, {}) for tree in ("one level", "three levels", "two trees")),
        ("two levels", WHOLE, FP32, {"window": 9}),
        ("three levels", WHOLE, FP32, {"softcap": 5.0, "window": 21}),
        ("three levels", WHOLE, BF16, {"sinks": True}),
        ("three levels", PARTED, FP32, {"window": 9}),
        ("two levels", PARTED, BF16, {"sinks": True}),
    ],
    ids=_shown,
)
def test_sequences_that_read_shared_pages_together_answer_as_they_do_apart(
    tree: str, backend: TritonBackend, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    spec, draw = _spec(dtype, 1, value_size=24), torch.Generator().manual_seed(2)
    store, apart, together = _steps_over(tree, backend, spec, 8)
    query = torch.randn(apart.num_tokens, 3, 32, generator=draw).to(dtype)
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 3, 3)}
    reference = ReferenceBackend()
    mirror = reference.make_store([spec], 16, 8, "cpu")
    mirror.import_pages(range(16), store.export_pages(range(16)))
    expected = reference.attend(mirror, 0, query, apart, scale=0.2, **options)
    rtol, atol = BOUNDS[dtype]
    # Parts of runs come in every way that parts of sequences do, which the tests above have seen.
    for step in (apart, together) if backend is WHOLE else (together,):
        out = backend.attend(store, 0, query, step, scale=0.2, **options)
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)


def test_more_tokens_over_a_shared_run_than_one_program_takes() -> None:
    tables = [[1, 2, 3 + i] for i in range(5)]
    store, draw = WHOLE.make_store([_spec(kv_heads=1)], 12, 4, "cpu"), torch.Generator().manual_seed(3)
    key, value = (torch.randn(48, 1, 32, generator=draw) for _ in range(2))
    WHOLE.store_kv(store, 0, key, value, torch.arange(48))
    lens = [3] * 5, [8] * 5
    query = torch.randn(15, 4, 32, generator=draw)
    # 15 tokens of 4 heads are two tiles of up to 8; with a window of 3 only some tokens of either see the run.
    for window in (None, 3):
        apart, together = (plan(*lens, tables, page_size=4, shared=s) for s in ([], [SharedRun(tuple(range(5)), 0, 2)]))
        one, other = (WHOLE.attend(store, 0, query, step, scale=0.2, window=window) for step in (apart, together))
        torch.testing.assert_close(other, one, rtol=0, atol=BOUNDS[FP32][1])


def test_shared_pages_are_read_once_and_own_pages_once_for_each() -> None:
    shared, own, count = 128, 4, 16
    tables = [[*range(1, shared + 1), *range(shared + 1 + i * own, shared + 1 + (i + 1) * own)] for i in range(count)]
    store = WHOLE.make_store([_spec(BF16, 3, 64, 64)], shared + own * count + 1, 16, "cpu")
    lengths = [1] * count, [(shared + own) * 16 - 1] * count
    apart = plan(*lengths, tables, page_size=16)
    together = plan(*lengths, tables, page_size=16, shared=[SharedRun(tuple(range(count)), 0, shared)])
    read = [WHOLE.keys_read(store, 0, metadata, num_heads=9) for metadata in (apart, together)]
    assert read == [count * (shared + own) * 16, (shared + count * own) * 16]
    sliding = plan([1], [4000], [list(range(1, 252))], page_size=16)
    wide = WHOLE.make_store([_spec()], 300, 16, "cpu")
    assert WHOLE.keys_read(wide, 0, sliding, num_heads=2, window=100) == 100


LAYERS = [
    _spec(FP32, 2, 8, 8),
    _spec(BF16, 1, 24, 16),
    LayerSpec(3, 6, 10, BF16, kv_dtype=INT8),
    _spec(FP16, 3, 5, 7),
    LayerSpec(1, 9, 8, FP32, kv_dtype=FP8),
]


def _random_pages(count: int, page_size: int) -> PagesData:
    keys, values = (
        [(40 * torch.randn(count, page_size, spec.kv_heads, size)).to(spec.stored_dtype) for spec, size in pairs]
        for pairs in ([(spec, spec.key_size) for spec in LAYERS], [(spec, spec.value_size) for spec in LAYERS])
    )
    scaled = [spec for spec in LAYERS if spec.is_quantized]
    return PagesData(keys, values, [torch.randn(count, page_size, spec.kv_heads, 2).to(BF16) for spec in scaled])


def _parts(pages: PagesData) -> list[torch.Tensor]:
    """As bytes: torch compares no fp8."""
    return [part.view(torch.uint8) for part in (*pages.keys, *pages.values, *pages.scales)]


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [([2], [4]), ([1, 2, 3], [4, 5, 6]), ([1, 1, 3], [4, 5, 0]), ([1, 2, 3], [2, 3, 1]), ([], [])],
)
def test_pages_are_copied_and_carried_over_whole(sources: list[int], destinations: list[int]) -> None:
    store, pages = WHOLE.make_store(LAYERS, 7, 4, "cpu"), _random_pages(7, 4)
    assert not any(tensor.any() for tensor in store.export_pages(range(7)).keys)
    plain = PlainBackend().make_store(LAYERS, 7, 4, "cpu")
    plain.import_pages(range(7), pages)
    store.import_pages(range(7), plain.export_pages(range(7)))
    WHOLE.copy_pages(store, sources, destinations)
    came_from = list(range(7))
    for source, destination in zip(sources, destinations, strict=True):
        came_from[destination] = source
    copied = store.export_pages(range(7))
    for before, after in zip(_parts(pages), _parts(copied), strict=True):
        assert torch.equal(after, before[came_from])


def test_what_does_not_fit_is_refused() -> None:
    step = paged_step(WHOLE, [1], [3], spec=_spec(), num_heads=4, page_size=4)
    with pytest.raises(PageOutOfRange, match="page tables hold"):
        step.attend(metadata=plan([1], [3], [[99]], page_size=4))
    with pytest.raises(ShapeMismatch, match=r"planned for pages of 8, the store has pages of 4"):
        step.attend(metadata=plan([1], [3], [[1]], page_size=8))
    with pytest.raises(TypeError, match="a store that it made"):
        WHOLE.copy_pages(PlainBackend().make_store([_spec()], 3, 4, "cpu"), [1], [2])


def test_a_layer_that_the_kernels_are_not_made_for_is_refused_with_the_reason() -> None:
    why = r"the triton backend is not made for layer 1, which has keys of 576 elements per head \(up to 256"
    with pytest.raises(LayerUnsupported, match=why):
        WHOLE.make_store([_spec(), _spec(FP32, 2, 576, 512)], 3, 4, "cpu")


def test_in_the_interpreter_the_backend_is_had_by_name_on_a_cpu() -> None:
    assert isinstance(get_backend("triton", "cpu"), TritonBackend)
