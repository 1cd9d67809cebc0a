"""Opening a runner: what cannot be is told as a wrong option, and leaves the model as it was."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from agentkv.errors import CapacityError, ConfigError
from agentkv.model_runner import ModelRunner, PackedSequence, exactness_bound, open_runner, probe
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


@pytest.mark.parametrize("where", ["_small_copy", "OwnForward"])
def test_a_check_of_the_model_that_finds_no_memory_says_so_and_nothing_about_the_model(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def take_too_much(*given: object) -> None:
        torch.empty(2**55, dtype=torch.uint8)

    def opened() -> ModelRunner:
        return open_runner(
            tiny_model("llama"),
            name="llama",
            fingerprint=b"",
            verdicts=tmp_path,
            context_limit=64,
            page_size=16,
            num_pages=4,
        )

    monkeypatch.setattr(sys.modules[probe.__module__], where, take_too_much)
    with pytest.raises(CapacityError, match=r"memory for a small copy of LlamaForCausalLM.* cannot be had"):
        opened()
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, logger="agentkv"):
        opened().close()
    assert "passed the probe" in caplog.text
    assert "run by its own modules" not in caplog.text


def test_a_model_that_the_kernels_are_not_made_for_is_served_by_the_backend_that_made_its_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", head_dim=514)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = open_runner(
            model, name="llama", fingerprint=b"", verdicts=tmp_path, context_limit=64, page_size=16, num_pages=4
        )
    try:
        assert runner.backend.name == "reference"
        assert "backend reference on cpu" in caplog.text
        assert not runner.shares_runs
        logits = runner.run([PackedSequence(range(1, 20), 0, [1, 2])])
    finally:
        runner.close()
    expected = model(torch.arange(1, 20)[None]).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=exactness_bound(expected))


def test_a_runner_that_cannot_be_made_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no graphs")

    model = tiny_model("llama")
    before = model.config._attn_implementation
    monkeypatch.setattr("agentkv.model_runner.opening.ModelRunner", failing)
    with pytest.raises(RuntimeError, match="no graphs"):
        open_runner(
            model, name="llama", fingerprint=b"", verdicts=tmp_path, context_limit=64, page_size=16, num_pages=4
        )
    assert model.config._attn_implementation == before
    AttentionSwitch(model).restore()  # Nobody holds it any more.


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
