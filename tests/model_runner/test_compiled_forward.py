"""On CPUs known layers are run by compiled kernels: wherever these can, with their roundings, and a row as if alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.model_runner import ModelRunner, PackedSequence, exactness_bound, open_runner
from agentkv.model_runner.compiled_forward import CompiledForward
from agentkv_kernels import BackendUnavailable, StoreTooLarge, get_backend
from support.engines import random_prompt
from support.tiny_models import tiny_model

PROMPT = random_prompt(3, 40)
COMPILED = "is run by a forward of ours, compiled for"


class Opens(Protocol):
    def __call__(self, model: PreTrainedModel, **options: Any) -> ModelRunner: ...


@pytest.fixture(autouse=True)
def _kernels() -> None:
    try:
        get_backend("cpu", "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def runner_of(tmp_path: Path) -> Iterator[Opens]:
    """Opens runners, and closes them at the end."""
    made: list[ModelRunner] = []

    def open_one(model: PreTrainedModel, **options: Any) -> ModelRunner:
        given = {"name": "a-model", "fingerprint": b"of it", "context_limit": 64, "page_size": 4, "num_pages": 20}
        made.append(open_runner(model, verdicts=tmp_path / str(len(made)), **(given | {"backend": "cpu"} | options)))
        return made[-1]

    yield open_one
    for runner in made:
        runner.close()


def logits(runner: ModelRunner) -> Tensor:
    return runner.run([PackedSequence(PROMPT, 0, list(range(1, 11)), "all")])


def of_model(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    return found


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " | ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_runs_a_model_of_known_layers_and_the_log_says_so(
    dtype: torch.dtype, runner_of: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama").to(dtype)
    weights = [parameter.clone() for parameter in model.parameters()]
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model)
    assert COMPILED in said(caplog)
    assert logits(runner).dtype == dtype
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "dtype", "options", "instead"),
    [
        ("llama", torch.float32, {"backend": "reference"}, "is run by a forward of ours, weights"),
        ("llama", torch.bfloat16, {"backend": "reference", "weights": "int8"}, "forward of ours, weights int8"),
        ("gpt2", torch.float32, {}, "is run by its own modules"),
    ],
)
def test_it_is_not_chosen_for_what_it_does_not_do(
    kind: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    instead: str,
    runner_of: Opens,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner_of(tiny_model(kind).to(dtype), **options)
    assert instead in said(caplog)
    assert COMPILED not in said(caplog)


def test_heads_that_the_kernels_do_not_take_are_left_to_torch(
    runner_of: Opens, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", head_dim=514, num_hidden_layers=1)
    expected = of_model(model)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model)
    assert "is run by a forward of ours, weights" in said(caplog)
    assert float((logits(runner) - expected).abs().max()) <= exactness_bound(expected)


@pytest.mark.parametrize("why", ["little is available", "the system promises none"])
def test_without_memory_for_a_copy_the_weights_are_read_as_they_lie(
    why: str, runner_of: Opens, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> Tensor:
        raise StoreTooLarge("they cannot be had")

    model = tiny_model("llama")
    expected = of_model(model)
    if why == "little is available":
        size = sum(p.numel() for name, p in model.named_parameters() if "proj" in name or "head" in name) * 4
        monkeypatch.setattr("agentkv.model_runner.own_weights.available_memory", lambda: 4 * size - 1)
    else:
        monkeypatch.setattr("agentkv_kernels.cpu.linear.zeroed", refused)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model)
    assert "no memory for a copy of" in said(caplog)
    assert "weights as they lie" in said(caplog)
    assert float((logits(runner) - expected).abs().max()) <= exactness_bound(expected)


def test_other_activations_than_silu_are_the_models_own(runner_of: Opens, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama", hidden_act="gelu_pytorch_tanh")
    expected = of_model(model)
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model)
    assert COMPILED in said(caplog)
    assert float((logits(runner) - expected).abs().max()) <= exactness_bound(expected)
    assert float((of_model(tiny_model("llama")) - expected).abs().max()) > 100 * exactness_bound(expected)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_in_bf16_it_is_as_near_to_fp32_as_the_model_itself(kind: str, runner_of: Opens) -> None:
    model = tiny_model(kind).to(torch.bfloat16)
    of_its_own = of_model(model).float()
    runner = runner_of(model)
    ours = logits(runner).float()
    runner.close()
    exact = of_model(model.float())
    # Ours rounds where the model does, but once in RoPE, where the model rounds three times, and not at all between a
    # product and its bias. As many roundings, each its own draw, differ by some percent in the mean square over 10,000
    # logits; one rounding more in each layer shows.
    mine, its = ((found - exact).square().mean().sqrt() for found in (ours, of_its_own))
    assert float(its) > 0
    assert float(mine) <= 1.05 * float(its)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_logits_to_the_last_bit_alone_and_among_others(
    kind: str, dtype: torch.dtype, runner_of: Opens
) -> None:
    """What attention gives apart: its sums depend on how keys are parted."""
    runner = runner_of(tiny_model(kind).to(dtype))
    own = runner._own
    assert isinstance(own, CompiledForward)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.mul(1 + layer) + (key - value).repeat_interleave(query.shape[1] // key.shape[1], dim=1)

    tokens, positions = torch.tensor(PROMPT), torch.arange(len(PROMPT)) + 3
    with torch.inference_mode():
        together = own(tokens, positions, torch.arange(len(PROMPT)), attend)
        some = own(tokens, positions, torch.tensor([5, 39]), attend)
        alone = [own(tokens[i : i + 1], positions[i : i + 1], torch.tensor([0]), attend) for i in range(len(PROMPT))]
    assert together.dtype == dtype
    assert bool(together.isfinite().all())
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[[5, 39]], some)
