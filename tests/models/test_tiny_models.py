"""The tiny models can prove something: their text varies, and what is special about each has an effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.tiny_models import LONGROPE_THRESHOLD, REFUSED, SERVED, VOCAB_SIZE, WINDOW, greedy, tiny_model

PROMPT_TOKENS = 40
SERVED_KINDS = sorted(SERVED)


def prompt(seed: int, length: int = PROMPT_TOKENS) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    output: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return output


def changed(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Differs by far more than rounding does: the bound that equality is tested with is 1e-4."""
    return bool((one - other).abs().max() > 1e-2)


@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_greedy_text_has_at_least_six_different_tokens_in_24(kind: str) -> None:
    model = tiny_model(kind)
    for seed in range(4):
        assert len(set(greedy(model, prompt(seed), 24))) >= 6


@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_one_token_far_back_changes_the_logits_at_the_end(kind: str) -> None:
    """With sliding layers alone, windows have to hand it on layer by layer: (layers - 1) x (window - 1)."""
    model, token_ids = tiny_model(kind), prompt(0)
    far_back = len(token_ids) - 2 * WINDOW
    other = [*token_ids[:far_back], (token_ids[far_back] + 1) % VOCAB_SIZE, *token_ids[far_back + 1 :]]
    assert changed(logits(model, token_ids)[-1], logits(model, other)[-1])


@pytest.mark.parametrize("kind", SERVED_KINDS)
def test_a_token_changes_nothing_before_it(kind: str) -> None:
    model, token_ids = tiny_model(kind), prompt(1)
    other = [*token_ids[:20], (token_ids[20] + 1) % VOCAB_SIZE, *token_ids[21:]]
    torch.testing.assert_close(logits(model, token_ids)[:20], logits(model, other)[:20])


@pytest.mark.parametrize("kind", sorted(SERVED | REFUSED))
def test_equal_arguments_give_equal_weights_and_other_seeds_give_others(kind: str) -> None:
    state_before = torch.random.get_rng_state()
    first, again, other = (tiny_model(kind, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state_before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("qwen2_window", {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}),
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 4}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3", {"layer_types": ["full_attention"] * 6}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_windows_and_softcaps_have_an_effect(kind: str, without: dict[str, Any]) -> None:
    assert changed(logits(tiny_model(kind), prompt(2)), logits(tiny_model(kind, **without), prompt(2)))


def test_the_sinks_of_gpt_oss_have_an_effect() -> None:
    model = tiny_model("gpt_oss")
    with_sinks = logits(model, prompt(3))
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.fill_(-1e4)
    assert changed(with_sinks, logits(model, prompt(3)))


def test_longrope_changes_its_frequencies_when_the_longest_position_passes_the_threshold() -> None:
    model, token_ids = tiny_model("phi3_longrope"), prompt(4, LONGROPE_THRESHOLD + 8)
    short = logits(model, token_ids[:LONGROPE_THRESHOLD])
    beyond = logits(model, token_ids)[:LONGROPE_THRESHOLD]
    assert changed(short, beyond)


def test_deepseek_has_values_of_another_size_than_its_keys() -> None:
    config = tiny_model("deepseek_v3").config
    assert config.v_head_dim != config.qk_nope_head_dim + config.qk_rope_head_dim


def test_an_unknown_kind_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no tiny model 'llama9'.*llama.*qwen3"):
        tiny_model("llama9")
