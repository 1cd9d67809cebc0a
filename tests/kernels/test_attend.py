"""Attention over pages against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv_kernels import LayerSpec, LayerUnsupported, ReferenceBackend, gather_plan, plan
from support.examples import examples
from support.pages import PagedStep, paged_step

# fp32 rounds at 6e-8; a softmax over at most 100 scores of size up to 30 keeps that within 30 * 6e-8 * a few.
FP32 = 1e-5
DENSE = LayerSpec(2, 16, 16, torch.float32)

lengths = st.lists(st.tuples(st.sampled_from([1, 1, 1, 2, 3, 17, 33]), st.integers(0, 60)), min_size=1, max_size=6)


def _sinks(heads: int) -> torch.Tensor:
    return torch.linspace(-1, 3, heads)


@settings(deadline=None, max_examples=examples(60))
@given(
    lens=lengths,
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3]),
    key_size=st.sampled_from([8, 24, 64, 96]),
    value_size=st.sampled_from([8, 40, 96]),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 2, 7, 16, 40, 1000]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    with_sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_any_step_equals_the_definition_with_nan_in_every_other_slot(
    backend, lens, kv_heads, group, key_size, value_size, page_size, window, softcap, with_sinks, seed
):
    step = paged_step(
        backend,
        [q for q, _ in lens],
        [c for _, c in lens],
        spec=LayerSpec(kv_heads, key_size, value_size, torch.float32),
        num_heads=kv_heads * group,
        page_size=page_size,
        seed=seed,
    )
    options = {"window": window, "softcap": softcap, "sinks": _sinks(kv_heads * group) if with_sinks else None}
    torch.testing.assert_close(step.attend(**options).double(), step.expected(**options), rtol=0, atol=FP32)


@settings(deadline=None, max_examples=examples(20))
@given(lens=lengths, window=st.sampled_from([None, 5]), seed=st.integers(0, 2**16))
def test_a_step_split_at_every_limit_of_memory_equals_the_whole(lens, window, seed):
    step = paged_step(
        ReferenceBackend(),
        [q for q, _ in lens],
        [c for _, c in lens],
        spec=DENSE,
        num_heads=4,
        page_size=4,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_plan, "GROUP_BYTES", 1)
        patch.setattr(gather_plan, "PADDING_BYTES", 0)
        patch.setattr(gather_plan, "SCORE_BYTES", 1)
        torch.testing.assert_close(step.attend(window=window).double(), step.expected(window=window), rtol=0, atol=FP32)


@pytest.mark.parametrize("window", [None, 5])
def test_a_decode_step_in_several_groups_answers_every_sequence(monkeypatch, window):
    monkeypatch.setattr(gather_plan, "PADDING_BYTES", 0)
    step = paged_step(ReferenceBackend(), [1] * 5, [3, 60, 0, 25, 61], spec=DENSE, num_heads=4, page_size=4)
    torch.testing.assert_close(step.attend(window=window).double(), step.expected(window=window), rtol=0, atol=FP32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 9])
def test_low_precision_stays_within_the_rounding_of_its_own_inputs(backend, dtype, window):
    spec = LayerSpec(3, 64, 64, dtype)
    try:
        backend.make_store([spec], 2, 16, "cpu")
    except LayerUnsupported as error:
        pytest.skip(str(error))  # `open_store` takes the reference backend then, which is another case of this test.
    step = paged_step(
        backend,
        [1, 20, 1, 40],
        [50, 30, 0, 0],
        spec=spec,
        num_heads=9,
        page_size=16,
    )
    out = step.attend(scale=0.125, window=window)
    assert out.dtype == dtype
    # Scores, probabilities and result are each rounded once to dtype. Scores stay below 8, where one rounding moves
    # them, and so every probability's logarithm, by 4 eps at most; values stay below 5.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), step.expected(scale=0.125, window=window), rtol=2 * eps, atol=5 * 4 * eps)


@pytest.mark.parametrize("window", [None, 6])
def test_a_sequence_in_a_batch_gets_the_answer_it_gets_alone(backend, window):
    query_lens, context_lens = [1, 1, 30, 1, 5], [0, 75, 11, 40, 60]
    step = paged_step(backend, query_lens, context_lens, spec=DENSE, num_heads=4, page_size=4)
    together = step.attend(window=window).split(query_lens)
    for i, part in enumerate(step.query.split(query_lens)):
        alone = plan([query_lens[i]], [context_lens[i]], [step.page_tables[i]], page_size=4)
        torch.testing.assert_close(
            step.attend(metadata=alone, query=part, window=window), together[i], rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("chunk", [1, 3, 4, 16, 37])
def test_a_prompt_in_chunks_gets_the_answer_of_the_prompt_at_once(backend, chunk, window):
    whole = paged_step(backend, [37], [0], spec=DENSE, num_heads=4, page_size=4)
    parts = []
    for start in range(0, 37, chunk):
        query = whole.query[start : start + chunk]
        metadata = plan([len(query)], [start], whole.page_tables, page_size=4)
        parts.append(whole.attend(metadata=metadata, query=query, window=window))
    torch.testing.assert_close(torch.cat(parts), whole.attend(window=window), rtol=0, atol=1e-6)


def test_infinity_in_the_free_slots_is_harmless_too(backend):
    options = {"spec": DENSE, "num_heads": 4, "page_size": 4}
    step = paged_step(backend, [1, 6, 1], [9, 3, 30], **options, poison=float("inf"))
    torch.testing.assert_close(step.attend().double(), step.expected(), rtol=0, atol=FP32)


def test_a_sliding_layer_relies_on_no_page_that_lies_wholly_before_its_window(backend):
    step = paged_step(backend, [1, 8], [60, 60], spec=DENSE, num_heads=4, page_size=4)
    expected = step.expected(window=8)
    # The first query at position 60 sees keys from 53 on, which lie in page 13.
    dead = [page * 4 + offset for pages in step.page_tables for page in pages[:13] for offset in range(4)]
    step.store.fill_slots(dead, float("nan"))
    torch.testing.assert_close(step.attend(window=8).double(), expected, rtol=0, atol=FP32)


def test_results_stay_valid_when_later_calls_reuse_the_buffers(backend):
    step = paged_step(backend, [1, 1], [9, 30], spec=DENSE, num_heads=4, page_size=4)
    first = step.attend()
    kept = first.clone()
    step.attend(query=step.query * 3)
    assert torch.equal(first, kept)


def test_answers_are_the_same_inside_and_outside_inference_mode(backend):
    step = paged_step(backend, [1, 5], [9, 30], spec=DENSE, num_heads=4, page_size=4)
    with torch.inference_mode():
        inside = step.attend()
        step.backend.copy_pages(step.store, [1], [1])
    assert torch.equal(step.attend(query=step.query.clone().requires_grad_()), inside)


def test_a_store_made_in_inference_mode_can_be_written_outside_of_it(backend):
    with torch.inference_mode():
        step = paged_step(backend, [1], [3], spec=DENSE, num_heads=4, page_size=4)
        step.attend()
    step.store.fill_slots([0], 1.0)
    step.attend(query=torch.zeros(1, 4, 16))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_keys_and_values_may_come_as_views_of_a_larger_tensor(backend, kv_heads):
    store = backend.make_store([LayerSpec(kv_heads, 8, 8, torch.float32)], 3, 4, "cpu")
    packed = torch.randn(3, 2 * kv_heads * 8)
    key, value = (half.view(3, kv_heads, 8) for half in packed.chunk(2, dim=1))
    backend.store_kv(store, 0, key, value, torch.tensor([5, 6, 9]))
    pages = store.export_pages([1, 2])
    assert torch.equal(pages.keys[0].view(8, kv_heads, 8)[[1, 2, 5]], key)
    assert torch.equal(pages.values[0].view(8, kv_heads, 8)[[1, 2, 5]], value)


def test_a_whole_step_reads_as_its_sequences_whatever_their_order(backend):
    order = [3, 0, 2, 1]
    query_lens, context_lens = [1, 9, 1, 1], [50, 2, 0, 21]
    step: PagedStep = paged_step(backend, query_lens, context_lens, spec=DENSE, num_heads=4, page_size=4)
    parts = step.query.split(query_lens)
    shuffled = plan(
        [query_lens[i] for i in order],
        [context_lens[i] for i in order],
        [step.page_tables[i] for i in order],
        page_size=4,
    )
    out = step.attend(metadata=shuffled, query=torch.cat([parts[i] for i in order]))
    expected = step.attend().split(query_lens)
    torch.testing.assert_close(out, torch.cat([expected[i] for i in order]), rtol=0, atol=1e-6)
