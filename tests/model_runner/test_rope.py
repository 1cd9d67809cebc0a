"""RoPE that depends on the batch: what is held, for whom, and that it is given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from agentkv.errors import ModelUnsupported
from agentkv.model_runner import freeze_rope, rope_regime
from agentkv.model_runner.attention import handling
from support.tiny_models import LONGROPE_THRESHOLD, tiny_model

DYNAMIC = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": LONGROPE_THRESHOLD,
}


def rotation(rotary: Any, length: int) -> torch.Tensor:
    cos, _ = rotary(torch.zeros(1, length, 1), torch.arange(length)[None])
    return torch.as_tensor(cos)


def test_within_our_forward_every_length_has_the_frequencies_of_the_limit_and_outside_its_own() -> None:
    model = tiny_model("phi3_longrope")
    rotary = model.model.rotary_emb
    own = {length: rotation(rotary, length) for length in (8, 2 * LONGROPE_THRESHOLD)}
    frozen = freeze_rope(model, 2 * LONGROPE_THRESHOLD)
    with handling(lambda call: call.query):
        held = {length: rotation(rotary, length) for length in own}
    assert torch.equal(held[8], held[2 * LONGROPE_THRESHOLD][:, :8])
    for length, expected in own.items():
        assert torch.equal(rotation(rotary, length), expected)
    frozen.restore()
    assert "forward" not in vars(rotary)


@pytest.mark.parametrize("limit", [LONGROPE_THRESHOLD, 3 * LONGROPE_THRESHOLD])
def test_dynamic_frequencies_are_those_of_a_text_as_long_as_the_limit(limit: int) -> None:
    model = tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=4 * LONGROPE_THRESHOLD)
    expected = rotation(model.model.rotary_emb, limit)
    other = tiny_model("llama", rope_parameters=DYNAMIC, max_position_embeddings=4 * LONGROPE_THRESHOLD)
    freeze_rope(other, limit)
    with handling(lambda call: call.query):
        held = rotation(other.model.rotary_emb, 8)
    torch.testing.assert_close(held, expected[:, :8])


def test_a_forward_that_the_owner_had_put_on_the_module_comes_back() -> None:
    model = tiny_model("phi3_longrope")
    rotary = model.model.rotary_emb
    rotary.forward = owners = copy.copy(rotary.forward)
    frozen = freeze_rope(model, LONGROPE_THRESHOLD)
    assert rotary.forward is not owners
    frozen.restore()
    frozen.restore()
    assert vars(rotary)["forward"] is owners


def test_a_kind_that_cannot_be_held_is_refused_and_what_was_held_before_it_is_given_back() -> None:
    first, second = tiny_model("phi3_longrope"), tiny_model("phi3_longrope")
    second.model.rotary_emb.rope_type = "dynamic of tomorrow"
    first.model.add_module("another", second.model.rotary_emb)
    with pytest.raises(ModelUnsupported, match="'dynamic of tomorrow', which depends on the batch and cannot be held"):
        freeze_rope(first, 2 * LONGROPE_THRESHOLD)
    assert not any("forward" in vars(module) for module in first.modules())


def test_a_model_whose_rope_does_not_look_at_the_batch_has_no_regime_and_nothing_replaced() -> None:
    model: nn.Module = tiny_model("llama")
    assert rope_regime(tiny_model("llama"), 64) == ""
    freeze_rope(tiny_model("llama"), 64)
    assert not any("forward" in vars(module) for module in model.modules())
