"""Scores equal transformers' own logits processors bit for bit: alone, combined, and in a mixed batch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from agentkv.sampling import SamplingState, process_logits
from agentkv.sampling_params import SamplingParams
from support.examples import examples

VOCAB = 23


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    prompt: list[int]
    output: list[int]
    logits: Tensor

    def state(self) -> SamplingState:
        return SamplingState(self.params, self.prompt, self.output)


def transformers_scores(row: Row) -> Tensor:
    """What `generate` makes of the row: its processors in its order, OpenAI's formula between them."""
    params = row.params
    scores = row.logits.float().unsqueeze(0)
    ids = torch.tensor([row.prompt + row.output])
    if params.repetition_penalty != 1.0 and ids.numel():
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    count = torch.bincount(torch.tensor(row.output, dtype=torch.int64), minlength=VOCAB)[:VOCAB].float()
    scores = scores - (params.presence_penalty * (count > 0) + params.frequency_penalty * count)
    warpers = LogitsProcessorList()
    if not params.greedy:
        warpers.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            warpers.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            warpers.append(TopPLogitsWarper(params.top_p))
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(ids, scores)[0]


ALONE = {
    "temperature": st.just(1.0) | st.floats(0.05, 4.0),
    "top_k": st.integers(0, VOCAB + 2),
    "top_p": st.floats(0.0, 1.0),
    "min_p": st.floats(0.0, 1.0),
    "repetition_penalty": st.floats(0.5, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
}


@st.composite
def rows(draw: st.DrawFn, names: tuple[str, ...] = tuple(ALONE)) -> Row:
    """Logits with ties: whole and half numbers, and -inf where a model rules a token out."""
    options = {name: draw(ALONE[name] | st.just(getattr(SamplingParams(), name))) for name in names}
    options.setdefault("temperature", 1.0)
    few_values = st.sampled_from([-float("inf"), -2.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    any_values = st.floats(-30, 30, width=32)
    value = draw(st.sampled_from([few_values, any_values]))
    logits = torch.tensor(draw(st.lists(value, min_size=VOCAB, max_size=VOCAB)))
    logits[draw(st.integers(0, VOCAB - 1))] = draw(st.floats(-5, 5, width=32))
    # Ids past the vocabulary stand in prompts of models whose embedding is larger than their head.
    prompt = draw(st.lists(st.integers(0, VOCAB + 2), max_size=6))
    output = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return Row(SamplingParams(**options), prompt, output, logits.to(dtype))


def scores_together(batch: list[Row]) -> Tensor:
    dtype = torch.promote_types(batch[0].logits.dtype, batch[-1].logits.dtype)
    return process_logits(torch.stack([row.logits.to(dtype) for row in batch]), [row.state() for row in batch])


@pytest.mark.parametrize("name", ALONE)
@given(data=st.data())
def test_each_parameter_alone_equals_its_processor(name: str, data: st.DataObject) -> None:
    row = data.draw(rows((name,)))
    assert torch.equal(scores_together([row])[0], transformers_scores(row))


@given(row=rows())
@settings(max_examples=examples(300))
def test_all_parameters_combined_equal_the_chain_of_processors(row: Row) -> None:
    assert torch.equal(scores_together([row])[0], transformers_scores(row))


@given(batch=st.lists(rows(), min_size=2, max_size=6))
@settings(max_examples=examples(200))
def test_a_row_of_a_mixed_batch_gets_what_it_gets_alone(batch: list[Row]) -> None:
    logits = torch.stack([row.logits.float() for row in batch])
    together = process_logits(logits, [row.state() for row in batch])
    for row, scores in zip(batch, together, strict=True):
        assert torch.equal(scores, process_logits(row.logits.float().unsqueeze(0), [row.state()])[0])


@given(
    seed=st.integers(0, 2**32),
    spread=st.floats(0.0, 6.0),
    top_p=st.floats(0.0, 1.0) | st.floats(0.9, 1.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(200))
def test_top_p_over_a_large_vocabulary_equals_its_processor(
    seed: int, spread: float, top_p: float, dtype: torch.dtype
) -> None:
    """From flat rows, whose edge lies deep and among equals, to peaked ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 3000, generator=generator) * torch.tensor([[spread], [4.0]])).to(dtype)
    params = SamplingParams(temperature=1.0, top_p=top_p)
    scores = process_logits(logits, [SamplingState(params)] * 2)
    expected = TopPLogitsWarper(top_p)(None, logits.float()) if top_p < 1.0 else logits.float()
    assert torch.equal(scores, expected)


def test_top_p_on_the_very_edge_equals_its_processor() -> None:
    """Powers of two make the sums exact, so that top_p falls on them; and one step of fp32 on either side."""
    logits = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -5.0]]) * torch.tensor(2.0).log()
    for total in (0.5, 0.75, 0.875, 0.9375, 0.96875):
        for top_p in (total, total - 2.0**-24, total + 2.0**-24):
            params = SamplingParams(temperature=1.0, top_p=top_p)
            scores = process_logits(logits, [SamplingState(params)])
            assert torch.equal(scores, TopPLogitsWarper(top_p)(None, logits)), top_p


@pytest.mark.parametrize("vocab", [1000, 49152])
def test_rows_of_a_real_vocabulary_equal_the_chain_of_processors(vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(3, vocab, generator=generator) * 4).to(torch.bfloat16)  # thousands of ties
    params = [
        SamplingParams(temperature=0.7, top_k=50, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.3, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=500, min_p=0.001),
    ]
    together = process_logits(logits, [SamplingState(p) for p in params])
    for row, p in enumerate(params):
        warpers = LogitsProcessorList([TemperatureLogitsWarper(p.temperature)])
        warpers.extend([TopKLogitsWarper(p.top_k)] if p.top_k else [])
        warpers.extend([TopPLogitsWarper(p.top_p)] if p.top_p < 1 else [])
        warpers.append(MinPLogitsWarper(p.min_p))
        assert torch.equal(together[row], warpers(None, logits[row : row + 1].float())[0])


@given(seed=st.integers(0, 2**32), rank=st.integers(0, 40), steps=st.integers(-3, 3))
@settings(max_examples=examples(300))
def test_top_p_within_rounding_of_an_edge_equals_its_processor(seed: int, rank: int, steps: int) -> None:
    """The budget is a sum that fp32 sorting itself comes to, and a few of its steps beside it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 3000, generator=generator) * 6
    total = float(logits.sort().values.softmax(-1).cumsum(-1)[0, -1 - rank])
    top_p = min(1.0, max(0.0, 1 - total * (1 + steps * 2.0**-23)))
    scores = process_logits(logits, [SamplingState(SamplingParams(temperature=1.0, top_p=top_p))])
    expected = TopPLogitsWarper(top_p)(None, logits) if top_p < 1.0 else logits
    assert torch.equal(scores, expected)


def test_the_order_is_the_one_that_transformers_generate_builds() -> None:
    """This file's chain is written by hand; here it meets the list that `generate` itself makes."""
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.8, min_p=0.1, repetition_penalty=1.3)
    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    processors = LlamaForCausalLM(tiny)._get_logits_processor(
        config,
        input_ids_seq_length=1,
        encoder_input_ids=torch.zeros(1, 1, dtype=torch.int64),
        logits_processor=LogitsProcessorList(),
        device="cpu",
    )
    names = [type(processor).__name__ for processor in processors]
    assert names == [
        "RepetitionPenaltyLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]


def test_the_given_logits_are_not_changed() -> None:
    logits = torch.arange(8.0).unsqueeze(0)
    before = logits.clone()
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=2.0, frequency_penalty=1.0)
    process_logits(logits, [SamplingState(params, [1], [2])])
    assert torch.equal(logits, before)


def test_greedy_rows_are_penalised_and_not_filtered() -> None:
    logits = torch.tensor([[4.0, 2.0, -1.0]])
    scores = process_logits(logits, [SamplingState(SamplingParams(top_k=1, repetition_penalty=2.0), [0, 2])])
    assert scores.tolist() == [[2.0, 2.0, -2.0]]


def test_presence_and_frequency_count_the_output_and_not_the_prompt() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    scores = process_logits(torch.zeros(1, 4), [SamplingState(params, [0, 1, 1], [1, 2, 2])])
    assert scores.tolist() == [[0.0, -0.75, -1.0, 0.0]]


@given(row=rows(("repetition_penalty", "presence_penalty", "frequency_penalty")))
def test_a_state_made_from_ids_equals_one_that_was_advanced(row: Row) -> None:
    advanced = SamplingState(row.params, row.prompt)
    for token_id in row.output:
        advanced.append(token_id)
    logits = row.logits.unsqueeze(0)
    assert torch.equal(process_logits(logits, [advanced]), process_logits(logits, [row.state()]))


def test_logits_that_do_not_match_the_states_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 states need logits \[2, vocab\], got \[1, 4\]"):
        process_logits(torch.zeros(1, 4), [SamplingState(SamplingParams())] * 2)
