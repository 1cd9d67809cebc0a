"""Each row of a batch gets the token it would get alone, and a row that fails, fails alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentkv.sampling import (
    BrokenLogits,
    GrammarDeadEnd,
    SamplingState,
    process_logits,
    prompt_logprobs,
    sample,
)
from agentkv.sampling_params import SamplingParams
from support.examples import examples

VOCAB = 31


class Allow:
    """A mask of the given ids; None allows all."""

    def __init__(self, ids: Sequence[int] | None) -> None:
        self.ids = ids
        self.asked: list[list[int]] = []

    def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
        self.asked.append(list(output_token_ids))
        if self.ids is None:
            return None
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[list(self.ids)] = True
        return mask


def logits_of(seed: int, rows: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 5),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logprobs=st.sampled_from([None, None, 0, 4]),
)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=5)
requests = st.tuples(params_of_any_kind, ids, ids, st.sampled_from([None, None, (3, 4, 9)]))


def make_state(request: tuple[SamplingParams, list[int], list[int], tuple[int, ...] | None]) -> SamplingState:
    params, prompt, output, allowed = request
    return SamplingState(params, prompt, output, mask=None if allowed is None else Allow(allowed))


@given(batch=st.lists(requests, min_size=1, max_size=8), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=examples(200))
def test_a_row_gets_the_token_and_logprobs_that_it_gets_alone(
    batch: list[tuple[SamplingParams, list[int], list[int], tuple[int, ...] | None]], dtype: torch.dtype
) -> None:
    logits = logits_of(11, len(batch), dtype).round(decimals=1)
    together = sample(logits, [make_state(request) for request in batch])
    assert together.failures == {}
    for row, request in enumerate(batch):
        alone = sample(logits[row : row + 1], [make_state(request)])
        assert (together.token_ids[row], together.logprobs[row]) == (alone.token_ids[0], alone.logprobs[0])


@given(request=requests, seed=st.integers(0, 99))
def test_a_drawn_token_is_one_that_the_filters_left(
    request: tuple[SamplingParams, list[int], list[int], tuple[int, ...] | None], seed: int
) -> None:
    state = make_state(request)
    scores = process_logits(logits_of(seed), [state])[0]
    (token_id,) = sample(logits_of(seed), [state]).token_ids
    assert token_id is not None
    assert scores[token_id] > -math.inf
    if state.params.greedy:
        assert token_id == scores.argmax().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [-math.inf, -math.inf, -5.0, -5.0]], dtype=dtype)
    plain = SamplingState(SamplingParams())
    counted = SamplingState(SamplingParams(logprobs=1))
    assert sample(logits, [plain, plain]).token_ids == [1, 2]
    assert sample(logits, [counted, counted]).token_ids == [1, 2]


def probability_of_a_worse_fit(counts: Tensor, probs: Tensor) -> float:
    """Pearson's chi-square; outcomes expected less than 5 times share one bin, as its validity asks."""
    assert counts[probs == 0].sum() == 0
    expected = probs.double() * counts.sum()
    likely = expected >= 5
    counts = torch.cat([counts[likely], counts[~likely].sum().reshape(1)]).double()
    expected = torch.cat([expected[likely], expected[~likely].sum().reshape(1)])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    assert freedom >= 3
    return float(torch.special.gammaincc(freedom / 2, ((counts - expected) ** 2 / expected).sum() / 2))


DRAWS = 4096


def draw_by_seed(params: SamplingParams, logits: Tensor) -> Sequence[int | None]:
    states = [SamplingState(params, seed=seed) for seed in range(DRAWS)]
    return sample(logits.expand(DRAWS, VOCAB), states).token_ids


def draw_by_position(params: SamplingParams, logits: Tensor) -> Sequence[int | None]:
    state, drawn = SamplingState(params, seed=77), []
    for _ in range(DRAWS):
        (token_id,) = sample(logits, [state]).token_ids
        assert token_id is not None
        state.append(token_id)
        drawn.append(token_id)
    return drawn


def draw_by_choice(params: SamplingParams, logits: Tensor) -> Sequence[int | None]:
    states = [SamplingState(params, choice=choice, seed=5) for choice in range(DRAWS)]
    return sample(logits.expand(DRAWS, VOCAB), states).token_ids


@pytest.mark.parametrize("drawn", [draw_by_seed, draw_by_position, draw_by_choice])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=8),
        SamplingParams(temperature=2.0, top_p=0.9),
    ],
    ids=["softmax", "top_k", "top_p"],
)
def test_draws_are_distributed_as_the_processed_scores(
    params: SamplingParams, drawn: Callable[[SamplingParams, Tensor], Sequence[int | None]]
) -> None:
    """Nine fixed experiments: that a right sampler fails any of them has a chance below 1 in 1,000."""
    logits = logits_of(5)
    probs = process_logits(logits, [SamplingState(params)])[0].softmax(-1)
    counts = torch.bincount(torch.tensor(drawn(params, logits)), minlength=VOCAB)
    assert probability_of_a_worse_fit(counts, probs) > 1e-4


def test_the_fit_can_tell_a_wrong_distribution() -> None:
    logits = logits_of(5)
    counts = torch.bincount(torch.tensor(draw_by_seed(SamplingParams(temperature=1.1), logits)), minlength=VOCAB)
    assert probability_of_a_worse_fit(counts, logits[0].softmax(-1)) < 1e-4


def answer(state: SamplingState, length: int) -> list[int]:
    """What the state draws from logits that depend on the position alone."""
    drawn = []
    for _ in range(length):
        (token_id,) = sample(logits_of(len(state.output_token_ids)), [state]).token_ids
        assert token_id is not None
        state.append(token_id)
        drawn.append(token_id)
    return drawn


@given(seed=st.integers(-(2**63), 2**64 - 1), cut=st.integers(0, 12))
def test_a_seeded_answer_goes_on_the_same_after_its_state_is_remade_from_ids(seed: int, cut: int) -> None:
    params = SamplingParams(temperature=1.5, seed=seed, repetition_penalty=1.2, frequency_penalty=0.3)
    whole = answer(SamplingState(params, [1, 2]), 12)
    assert answer(SamplingState(params, [1, 2], whole[:cut]), 12 - cut) == whole[cut:]


def test_an_unseeded_state_goes_on_the_same_when_it_is_given_its_seed_again() -> None:
    params = SamplingParams(temperature=1.5)
    first = SamplingState(params)
    whole = answer(first, 12)
    assert answer(SamplingState(params, (), whole[:5], seed=first.seed), 7) == whole[5:]


def test_unseeded_states_and_the_choices_of_one_seed_draw_differently() -> None:
    params = SamplingParams(temperature=5.0)
    assert answer(SamplingState(params), 16) != answer(SamplingState(params), 16)
    assert answer(SamplingState(params, seed=1), 16) != answer(SamplingState(params, seed=1, choice=1), 16)


@given(seeds=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=6), place=st.integers(0, 5))
def test_a_seeded_draw_does_not_depend_on_batch_order_or_threads(seeds: list[int], place: int) -> None:
    params = SamplingParams(temperature=1.2, top_p=0.95)
    logits = logits_of(3, len(seeds))
    expected = sample(logits, [SamplingState(params, seed=seed) for seed in seeds]).token_ids
    order = sorted(range(len(seeds)), key=lambda row: (row + place) % len(seeds))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shuffled = sample(logits[order], [SamplingState(params, seed=seeds[row]) for row in order]).token_ids
    finally:
        torch.set_num_threads(threads)
    assert [expected[row] for row in order] == shuffled


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-52], ids=["lowest", "highest"])
def test_the_extreme_uniform_numbers_draw_tokens_that_can_come(number: float) -> None:
    class Extreme(SamplingState):
        def uniform(self) -> float:
            return number

    for seed in range(100):
        logits = logits_of(seed)
        logits[0, :4] = logits[0, VOCAB // 2 :] = -math.inf
        (token_id,) = sample(logits, [Extreme(SamplingParams(temperature=1.0))]).token_ids
        assert token_id is not None
        assert 4 <= token_id < VOCAB // 2


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 8))
def test_uniform_numbers_lie_in_the_half_open_interval(seed: int, choice: int) -> None:
    state = SamplingState(SamplingParams(), seed=seed, choice=choice)
    assert 0.0 <= state.uniform() <= 1 - 2.0**-52
    assert state.uniform() == state.uniform()


GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, logprobs=2, seed=4)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, SamplingParams(repetition_penalty=1.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([math.nan] + [0.0] * (VOCAB - 1), "NaN"),
        ([0.0] * (VOCAB - 1) + [math.nan], "NaN"),
        ([math.inf] + [0.0] * (VOCAB - 1), r"\+inf"),
        ([-math.inf] * VOCAB, "only -inf"),
    ],
    ids=["first NaN", "last NaN", "inf", "nothing"],
)
def test_a_row_of_broken_logits_fails_alone(
    row: list[float], found: str, dtype: torch.dtype, params: SamplingParams
) -> None:
    logits = logits_of(8, 3, dtype)
    states = [SamplingState(params, [1]), SamplingState(params, [1]), SamplingState(params, [1])]
    healthy = sample(logits, states)
    logits[1] = torch.tensor(row)
    sampled = sample(logits, states)
    assert list(sampled.failures) == [1]
    assert (sampled.token_ids[1], sampled.logprobs[1]) == (None, None)
    for other in (0, 2):
        assert sampled.token_ids[other] == healthy.token_ids[other]
        assert sampled.logprobs[other] == healthy.logprobs[other]
    with pytest.raises(BrokenLogits, match=found):
        raise sampled.failures[1]


def test_scores_that_overflow_fail_their_row_alone() -> None:
    logits = torch.full((2, VOCAB), 3e38)
    sampled = sample(logits, [SamplingState(SamplingParams(temperature=1e-5)), SamplingState(GREEDY)])
    assert sampled.token_ids == [None, 0]
    with pytest.raises(BrokenLogits, match="overflow"):
        raise sampled.failures[0]


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_a_mask_allows_only_its_tokens_and_sees_the_output(params: SamplingParams) -> None:
    mask = Allow([4, 6])
    state = SamplingState(params, [1], [7, 8], mask=mask)
    assert sample(logits_of(2), [state]).token_ids[0] in (4, 6)
    assert mask.asked == [[7, 8]]


def test_a_mask_of_none_changes_nothing() -> None:
    free, masked = SamplingState(DRAWN), SamplingState(DRAWN, mask=Allow(None))
    assert sample(logits_of(2), [free]) == sample(logits_of(2), [masked])


def test_a_dead_end_of_the_grammar_ends_that_request_only() -> None:
    logits = logits_of(2, 3)
    logits[1, 4] = -math.inf
    states = [SamplingState(DRAWN), SamplingState(DRAWN, mask=Allow([4])), SamplingState(GREEDY)]
    sampled = sample(logits, states)
    assert list(sampled.failures) == [1]
    assert sampled.token_ids[0] is not None
    assert sampled.token_ids[2] is not None
    with pytest.raises(GrammarDeadEnd, match="the mask allows 1 of 31"):
        raise sampled.failures[1]


def test_whatever_a_mask_raises_ends_that_request_only() -> None:
    class Failing:
        def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
            raise RuntimeError("lost")

    class Short:
        def allowed(self, output_token_ids: Sequence[int]) -> Tensor | None:
            return torch.ones(3, dtype=torch.bool)

    masks = [Failing(), Short(), None]
    sampled = sample(logits_of(2, 3), [SamplingState(GREEDY, mask=mask) for mask in masks])
    assert sampled.token_ids[:2] == [None, None]
    assert sampled.token_ids[2] is not None
    assert isinstance(sampled.failures[0], RuntimeError)
    assert isinstance(sampled.failures[1], ValueError)


@given(seed=st.integers(0, 99), top=st.integers(0, VOCAB + 2), params=st.sampled_from([GREEDY, DRAWN]))
def test_logprobs_are_the_raw_log_softmax_with_the_likeliest_first(seed: int, top: int, params: SamplingParams) -> None:
    logits = logits_of(seed, 1, torch.bfloat16).round()  # whole numbers: many are equal
    counted = SamplingParams(temperature=params.temperature, logprobs=top, frequency_penalty=1.0, top_k=3, seed=seed)
    sampled = sample(logits, [SamplingState(counted, (), [1, 1])])
    report, table = sampled.logprobs[0], logits.float().log_softmax(-1)[0].tolist()
    assert report is not None
    assert report.token_id == sampled.token_ids[0]
    assert report.logprob == table[report.token_id]
    assert report.rank == 1 + sum(value > report.logprob for value in table)
    ranking = sorted(enumerate(table), key=lambda entry: (-entry[1], entry[0]))
    assert report.top == tuple(ranking[:top])


def test_logprobs_are_given_only_where_they_are_asked_for() -> None:
    states = [SamplingState(GREEDY), SamplingState(SamplingParams(logprobs=0))]
    sampled = sample(logits_of(1, 2), states)
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1] is not None
    assert sampled.logprobs[1].top == ()


def test_prompt_logprobs_equal_those_of_sampling_across_blocks() -> None:
    rows = 600
    logits = logits_of(4, rows)
    sampled = sample(logits, [SamplingState(SamplingParams(logprobs=3))] * rows)
    tokens = [token_id for token_id in sampled.token_ids if token_id is not None]
    assert prompt_logprobs(logits, tokens, 3) == sampled.logprobs
    assert prompt_logprobs(logits[:0], [], 3) == []


def test_prompt_logprobs_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="2 tokens need logits"):
        prompt_logprobs(logits_of(1), [1, 2], 0)
    with pytest.raises(ValueError, match="top must be 0 or more"):
        prompt_logprobs(logits_of(1), [1], -1)


def test_an_empty_batch_is_no_work() -> None:
    sampled = sample(torch.zeros(0, VOCAB), [])
    assert (sampled.token_ids, sampled.logprobs, sampled.failures) == ([], [], {})
