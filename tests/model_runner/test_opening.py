"""Opening a runner: what cannot be is told as a wrong option, and leaves the model as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from agentkv.errors import ConfigError
from agentkv.model_runner import open_runner
from agentkv.model_runner.attention import AttentionSwitch
from agentkv.model_runner.layers import discover_layers
from support.tiny_models import tiny_model


def test_a_pool_that_no_machine_has_room_for_is_a_wrong_option_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="num_pages= or memory="):
        open_runner(
            model,
            name="llama",
            fingerprint=b"",
            verdicts=tmp_path,
            context_limit=64,
            page_size=16,
            num_pages=2**45,
        )
    assert model.config._attn_implementation == before


def test_learning_what_the_layers_look_like_reads_no_weight_of_a_linear_layer() -> None:
    """They are mapped from disk: reading them would cost a start more than all the rest of opening."""
    model = tiny_model("llama")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # Nothing can be computed with a weight that is only a shape.
            module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
    switch = AttentionSwitch(model)
    try:
        layers = discover_layers(model)
    finally:
        switch.restore()
    assert [(spec.kv_heads, spec.key_size) for spec in layers.specs] == [(2, 12)] * 3
