"""What a decode step asks of torch does not depend on how many sequences it has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from agentkv_kernels import Backend, LayerSpec, gather_plan, plan
from agentkv_kernels.gather_plan import LayerKind, split_decodes
from support.pages import paged_step

SPEC = LayerSpec(3, 64, 64, torch.bfloat16)
KIND = LayerKind(3, 9, SPEC.token_bytes, num_pages=10**6, page_size=16, window=None)


class Operations(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _operations(backend: Backend, num_seqs: int, window: int | None) -> tuple[int, int]:
    """Operations of the step's first layer, which plans, and of a later one."""
    contexts = [20 + i % 7 for i in range(num_seqs)]
    step = paged_step(backend, [1] * num_seqs, contexts, spec=SPEC, num_heads=9, page_size=16)
    with Operations() as first:
        step.attend(window=window)
    with Operations() as later:
        step.attend(window=window)
    return first.count, later.count


@pytest.mark.parametrize("window", [None, 10])
def test_a_decode_step_makes_as_many_calls_for_32_sequences_as_for_2(backend, window):
    assert _operations(backend, 32, window) == _operations(backend, 2, window)


def test_layers_after_the_first_reuse_its_plan(backend):
    first, later = _operations(backend, 8, None)
    assert later < first


@given(st.lists(st.integers(0, 8000), min_size=1, max_size=64))
def test_every_decode_sequence_is_in_exactly_one_group_and_padding_stays_bounded(contexts):
    metadata = plan([1] * len(contexts), contexts, [[0] * (c // 16 + 1) for c in contexts], page_size=16)
    groups = split_decodes(metadata, KIND)
    assert sorted(i for group in groups for i in group) == list(range(len(contexts)))
    page_bytes = KIND.token_bytes * 16
    for group in groups:
        pages = [contexts[i] // 16 + 1 for i in group]
        assert (len(group) * max(pages) - sum(pages)) * page_bytes <= gather_plan.PADDING_BYTES
        assert len(group) == 1 or len(group) * max(pages) * page_bytes <= gather_plan.GROUP_BYTES


def test_sequences_of_like_length_stay_in_one_group_in_the_order_of_the_step():
    contexts = [200 + i % 16 for i in range(64)]
    metadata = plan([1] * 64, contexts, [[0] * (c // 16 + 1) for c in contexts], page_size=16)
    assert split_decodes(metadata, KIND) == [list(range(64))]


@given(st.integers(1, 40), st.integers(0, 2000), st.integers(1, 300))
def test_a_sliding_layer_gathers_its_window_however_long_the_context(query_len, context_len, window):
    metadata = plan([query_len], [context_len], [[1] * ((query_len + context_len) // 16 + 1)], page_size=16)
    walk = gather_plan.gather_plan(metadata, replace(KIND, window=window))
    gathered = walk.whole_step.keys if walk.whole_step else walk.extend[0].keys
    # The window of the first query, the queries after it, and the rest of the first and last page.
    assert gathered <= window + query_len - 1 + 2 * 15


@given(st.integers(1, 300), st.integers(1, 200_000), st.sampled_from([None, 128, 4096]))
def test_blocks_of_a_prefill_keep_their_scores_within_the_bound(num_heads, keys, window):
    kind = LayerKind(num_heads, num_heads, 64, 10, 16, window)
    size = gather_plan._block_size(kind, keys)
    seen = keys if window is None else min(keys, window + size)
    assert size == 16 or 4 * size * num_heads * seen <= gather_plan.SCORE_BYTES
