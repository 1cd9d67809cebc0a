"""The compiled kernels, on every instruction set of this machine, against attention's definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_kernels import CpuBackend, LayerSpec, LayerUnsupported, PageOutOfRange, SharedRun, get_backend, plan
from support.examples import examples
from support.naive_attention import dense_attention, naive_attention
from support.pages import PagedStep, paged_step

FP32, BF16 = torch.float32, torch.bfloat16
# fp32 as in test_attend, and powers of two within 1.7e-7, which is 3 roundings. bf16: probabilities are rounded once,
# by 2**-8 of them at most, and so is the result; values stay below 5.
BOUNDS = {FP32: (0.0, 1e-5), BF16: (2 * 2**-8, 5 * 2 * 2**-8)}
"""(relative, absolute), against what the pages hold"""
KINDS = [(FP32, None), (BF16, None), (BF16, torch.int8)]
KIND_NAMES = ["fp32", "bf16", "int8"]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.empty gives NaN, so that what a kernel leaves out is seen."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        made = empty(*shape, **options)
        return made.fill_(float("nan")) if made.dtype.is_floating_point else made

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(params=[1, 3])
def _threads(request: Any) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def assert_exact(step: PagedStep, **options: Any) -> None:
    dtype = step.query.dtype
    rtol, atol = BOUNDS[dtype]
    expected = step.expected_at_length(**options)
    torch.testing.assert_close(step.attend(**options).double(), expected, rtol=rtol, atol=atol)


def test_the_fast_definition_is_the_slow_one() -> None:
    draw = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(n, h, 8, generator=draw) for n, h in ((4, 6), (11, 2), (11, 2)))
    for options in ({}, {"window": 3}, {"softcap": 2.0}, {"sinks": torch.randn(6, generator=draw)}):
        both = [f(query, keys, values, scale=0.3, **options) for f in (dense_attention, naive_attention)]
        torch.testing.assert_close(*both, rtol=0, atol=1e-12)


@settings(deadline=None, max_examples=examples(60))
@given(
    lens=st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 5, 33, 70]), st.integers(0, 150)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    key_size=st.sampled_from([2, 8, 12, 24, 32, 64, 80, 96, 128, 192, 256]),
    value_size=st.sampled_from([6, 8, 12, 40, 64, 72, 96, 128, 256]),
    page_size=st.sampled_from([1, 3, 8, 16, 24, 32, 64]),
    dtype=st.sampled_from([FP32, BF16]),
    kv_dtype=st.sampled_from([None, None, torch.int8]),
    window=st.sampled_from([None, 1, 2, 16, 40, 2**40]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_step_equals_the_definition_with_nan_in_every_other_slot(
    cpu, lens, kv_heads, group, key_size, value_size, page_size, dtype, kv_dtype, window, softcap, with_sinks, seed
):
    step = paged_step(
        cpu,
        [q for q, _ in lens],
        [c for _, c in lens],
        spec=LayerSpec(kv_heads, key_size, value_size, dtype, kv_dtype=kv_dtype),
        num_heads=kv_heads * group,
        page_size=page_size,
        seed=seed,
    )
    sinks = torch.linspace(-1, 3, kv_heads * group) if with_sinks else None
    assert_exact(step, scale=key_size**-0.5, window=window, softcap=softcap, sinks=sinks)


@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("page_size", [1, 8, 16, 32])
@pytest.mark.parametrize("query_len", [1, 2, 18])
def test_every_length_around_the_edges_of_pages(cpu, page_size, query_len, dtype, kv_dtype):
    contexts = range(4 * page_size + 1)
    spec = LayerSpec(2, 64, 64, dtype, kv_dtype=kv_dtype)
    options: dict[str, Any] = {"spec": spec, "num_heads": 6, "page_size": page_size}
    assert_exact(paged_step(cpu, [query_len] * len(contexts), contexts, **options), scale=0.125)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize(("query_len", "context_len", "window"), [(1, 5000, None), (1, 5000, 900), (300, 1500, None)])
def test_keys_in_many_blocks_and_on_several_threads(cpu, query_len, context_len, window, dtype, kv_dtype):
    spec = LayerSpec(1, 64, 64, dtype, kv_dtype=kv_dtype)
    step = paged_step(cpu, [query_len, 1], [context_len, 40], spec=spec, num_heads=3, page_size=16)
    assert_exact(step, scale=0.125, window=window)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=KIND_NAMES)
def test_heads_taken_together_give_the_bits_that_each_gives_alone(cpu, dtype, kv_dtype):
    """Many sequences of one query are a unit of work each; of few, on several threads, each head is one."""
    lengths = [1, 15, 16, 17, 127, 128, 129, 130, 200, 255, 256, 300, 400, 17, 16, 1]
    spec = LayerSpec(4, 40, 24, dtype, kv_dtype=kv_dtype)
    step = paged_step(cpu, [1] * 16, [n - 1 for n in lengths], spec=spec, num_heads=12, page_size=16)
    together = step.attend()
    for i, length in enumerate(lengths):
        alone = plan([1], [length - 1], [step.page_tables[i]], page_size=16)
        assert torch.equal(step.attend(metadata=alone, query=step.query[i : i + 1]), together[i : i + 1])


def test_scores_that_grow_from_block_to_block_lose_nothing(cpu):
    """The running top rises in every block, so what was summed before is scaled down each time."""
    step = paged_step(cpu, [1, 40], [3000, 2000], spec=LayerSpec(1, 32, 32, FP32), num_heads=2, page_size=16)
    grown = [key * torch.linspace(0, 8, len(key))[:, None, None] for key in step.keys]
    for pages, key, value in zip(step.page_tables, grown, step.values, strict=True):
        slots = torch.tensor([pages[i // 16] * 16 + i % 16 for i in range(len(key))])
        step.backend.store_kv(step.store, 0, key, value, slots)
    parts = zip(step.query.split([1, 40]), grown, step.values, strict=True)
    expected = torch.cat([dense_attention(*part, scale=1.0) for part in parts])
    # Scores reach 60, each rounded to 60 * 6e-8 * a few; so are the probabilities, and values stay below 5.
    torch.testing.assert_close(step.attend(scale=1.0).double(), expected, rtol=0, atol=2e-4)


def test_padding_writes_to_the_null_page_and_nothing_reads_it(cpu):
    step = paged_step(cpu, [1, 3], [20, 9], spec=LayerSpec(2, 64, 64, BF16), num_heads=4, page_size=16)
    before = step.attend()
    nan = torch.full((5, 2, 64), float("nan"), dtype=BF16)
    cpu.store_kv(step.store, 0, nan, nan, torch.tensor([0, 0, 3, 15, 0]))
    assert torch.equal(step.attend(), before)


TREES: dict[str, tuple[list[list[int]], list[tuple[tuple[int, ...], int, int]]]] = {
    # Pages of each sequence by letters of their own, and the edges of the tree.
    "one level": ([[1, 2, 10], [1, 2, 11, 12], [1, 2, 13]], [((0, 1, 2), 0, 2)]),
    "two levels": ([[1, 2, 3, 10], [1, 2, 3, 11], [1, 12, 13]], [((0, 1, 2), 0, 1), ((0, 1), 1, 2)]),
    "three levels": (
        [[1, 2, 3, 10], [1, 2, 3, 11], [1, 2, 12], [1, 13], [14, 15]],
        [((0, 1, 2, 3), 0, 1), ((0, 1, 2), 1, 1), ((0, 1), 2, 1)],
    ),
    "two trees": ([[1, 2, 10], [1, 2, 11], [3, 12], [3, 13, 14]], [((0, 1), 0, 2), ((2, 3), 0, 1)]),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=KIND_NAMES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("options", [{}, {"window": 21}, {"softcap": 5.0}, {"sinks": True}], ids=str)
@pytest.mark.parametrize("page_size", [8, 16])
def test_sequences_that_read_shared_pages_together_answer_as_they_do_apart(
    cpu, tree, dtype, kv_dtype, options, page_size
):
    tables, edges = TREES[tree]
    spec, draw = LayerSpec(2, 64, 48, dtype, kv_dtype=kv_dtype), torch.Generator().manual_seed(1)
    store = cpu.make_store([spec], 16, page_size, "cpu")
    store.fill_slots(range(16 * page_size), float("nan"))
    # The last page of each is partly filled, and some sequences compute more than one token.
    seq_lens = [len(table) * page_size - 1 - i % 3 for i, table in enumerate(tables)]
    query_lens = [1 if i % 2 else 3 for i in range(len(tables))]
    contexts = [seq - query for seq, query in zip(seq_lens, query_lens, strict=True)]
    for table, length in zip(tables, seq_lens, strict=True):
        slots = torch.tensor([table[i // page_size] * page_size + i % page_size for i in range(length)])
        key, value = (torch.randn(length, 2, size, generator=draw).to(dtype) for size in (64, 48))
        cpu.store_kv(store, 0, key, value, slots)
    runs = [SharedRun(*edge) for edge in edges]
    apart = plan(query_lens, contexts, tables, page_size=page_size)
    together = plan(query_lens, contexts, tables, page_size=page_size, shared=runs)
    query = torch.randn(sum(query_lens), 6, 64, generator=draw).to(dtype)
    if options.get("sinks"):
        options = {"sinks": torch.linspace(-1, 3, 6)}
    one, other = (cpu.attend(store, 0, query, metadata, scale=0.125, **options) for metadata in (apart, together))
    rtol, atol = BOUNDS[dtype]
    torch.testing.assert_close(other, one, rtol=rtol, atol=atol)
    reference = get_backend("reference")
    mirror = reference.make_store([spec], 16, page_size, "cpu")
    mirror.import_pages(range(16), store.export_pages(range(16)))
    expected = reference.attend(mirror, 0, query, together, scale=0.125, **options)
    torch.testing.assert_close(other, expected, rtol=rtol, atol=2 * atol)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("page_size", [8, 16])
def test_a_long_shared_run_that_threads_part_among_them_loses_no_key(cpu, page_size, window):
    shared, own = 1600 // page_size, 48 // page_size
    tables = [[*range(1, shared + 1), *range(shared + 1 + i * own, shared + 1 + (i + 1) * own)] for i in range(3)]
    num_pages = shared + 3 * own + 1
    store, draw = cpu.make_store([LayerSpec(2, 32, 32, FP32)], num_pages, page_size, "cpu"), torch.Generator()
    key, value = (torch.randn(num_pages * page_size, 2, 32, generator=draw) for _ in range(2))
    cpu.store_kv(store, 0, key, value, torch.arange(num_pages * page_size))
    lengths, run = ([1, 2, 1], [1645, 1640, 1601]), SharedRun((0, 1, 2), 0, shared)
    apart, together = (plan(*lengths, tables, page_size=page_size, shared=runs) for runs in ([], [run]))
    query = torch.randn(4, 6, 32, generator=draw)
    one, other = (cpu.attend(store, 0, query, step, scale=0.2, window=window) for step in (apart, together))
    torch.testing.assert_close(other, one, rtol=0, atol=BOUNDS[FP32][1])


def test_shared_pages_are_read_once_and_own_pages_once_for_each(cpu):
    shared, own, count = 128, 4, 16
    tables = [[*range(1, shared + 1), *range(shared + 1 + i * own, shared + 1 + (i + 1) * own)] for i in range(count)]
    store = cpu.make_store([LayerSpec(3, 64, 64, BF16)], shared + own * count + 1, 16, "cpu")
    lengths = [1] * count, [(shared + own) * 16 - 1] * count
    apart = plan(*lengths, tables, page_size=16)
    together = plan(*lengths, tables, page_size=16, shared=[SharedRun(tuple(range(count)), 0, shared)])
    read = [cpu.keys_read(store, 0, metadata, num_heads=9) for metadata in (apart, together)]
    assert read == [count * (shared + own) * 16, (shared + count * own) * 16]


def test_a_sliding_layer_reads_its_window_however_long_the_context(cpu):
    store = cpu.make_store([LayerSpec(1, 64, 64, BF16)], 300, 16, "cpu")
    metadata = plan([1], [4000], [list(range(1, 252))], page_size=16)
    assert cpu.keys_read(store, 0, metadata, num_heads=1, window=100) == 100


@pytest.mark.parametrize("window", [2**31, 2**32 - 3996, 2**32 + 5])
def test_a_window_that_32_bits_cannot_hold_hides_nothing(cpu, window):
    store = cpu.make_store([LayerSpec(1, 64, 64, BF16)], 300, 16, "cpu")
    metadata = plan([1], [4000], [list(range(1, 252))], page_size=16)
    assert cpu.keys_read(store, 0, metadata, num_heads=1, window=window) == 4001


@pytest.mark.parametrize("slot", [-1, 48, 2**40])
def test_a_slot_that_the_store_does_not_have_is_refused_before_anything_is_written(cpu, slot):
    store = cpu.make_store([LayerSpec(1, 8, 8, FP32)], 3, 16, "cpu")
    new = torch.ones(2, 1, 8)
    with pytest.raises(PageOutOfRange, match="slots are 0 to 47"):
        cpu.store_kv(store, 0, new, new, torch.tensor([4, slot]))
    with pytest.raises(PageOutOfRange, match="slots are 0 to 47"):
        store.fill_slots([4, slot], 1.0)
    assert not store.export_pages([0]).keys[0].any()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (LayerSpec(2, 21, 24, FP32), r"keys of 21 elements per head \(even numbers up to 512 are wanted\)"),
        (LayerSpec(2, 24, 15, FP32), "values of 15 elements"),
        (LayerSpec(2, 576, 512, FP32), "keys of 576 elements"),
        (LayerSpec(2, 64, 64, torch.float16, kv_dtype=torch.int8), r"torch\.float16, which is not among"),
        (LayerSpec(2, 64, 64, torch.float16), r"torch\.float16, which is not among torch\.float32, torch\.bfloat16"),
    ],
)
def test_a_layer_that_the_kernels_are_not_made_for_is_refused_with_the_reason(cpu, spec, why):
    layers = [LayerSpec(2, 64, 64, FP32), spec]
    with pytest.raises(LayerUnsupported, match=f"the cpu backend is not made for layer 1, which has {why}"):
        cpu.make_store(layers, 3, 16, "cpu")


def test_the_backend_says_what_it_runs_on(cpu):
    assert isinstance(get_backend("cpu"), CpuBackend)
    assert f"compiled for {cpu.instruction_set}, which was asked for" in cpu.description


@pytest.mark.parametrize("query_len", [1, 30])
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_over_pages_of_int8_what_is_no_number_stays_none(cpu, what, query_len):
    """Numbers of 16 bits have no NaN: scales carry it."""
    spec = LayerSpec(1, 32, 32, BF16, kv_dtype=torch.int8)
    step = paged_step(cpu, [query_len], [40 - query_len], spec=spec, num_heads=2, page_size=16)
    query = step.query.clone()
    assert step.attend(query=query).isfinite().all()
    if what == "query":
        query[0, 1, 3] = float("nan")
    else:
        key, value = (torch.randn(1, 1, 32).to(BF16) for _ in range(2))
        (key if what == "key" else value)[0, 0, 5] = float("nan")
        cpu.store_kv(step.store, 0, key, value, torch.tensor([step.page_tables[0][0] * 16 + 3]))
    answer = step.attend(query=query)
    hit = answer[0, 1] if what == "query" else answer
    assert hit.isnan().all()
    if what == "query":
        assert answer[0, 0].isfinite().all()


def test_over_pages_of_int8_sizes_far_from_one_lose_nothing(cpu):
    """What 16 bits stand for follows the largest query, and the largest probability times its value's scale."""
    spec = LayerSpec(1, 32, 32, BF16, kv_dtype=torch.int8)
    step = paged_step(cpu, [1], [300], spec=spec, num_heads=3, page_size=16)
    small = step.attend()
    for factor in (2.0**-20, 2.0**60):
        by_queries = step.attend(query=step.query * factor, scale=0.3 / factor)
        torch.testing.assert_close(by_queries, small, rtol=0, atol=0)
