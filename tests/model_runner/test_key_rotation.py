"""Keys of int8 are rotated on their way to the pages, so that a dimension that stands out makes no other one coarse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv.model_runner import ModelRunner, PackedSequence, open_runner
from agentkv_kernels import Hadamard, choose_backend
from support.engines import random_prompt
from support.tiny_models import tiny_model

BACKENDS = ["cpu", "reference"]
TIMES = 8.0


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu" and (reasons := choose_backend("cpu").passed_over):
        pytest.skip(reasons[0])
    return str(request.param)


def opened(model: PreTrainedModel, verdicts: Path, backend: str, kv_dtype: torch.dtype | None) -> ModelRunner:
    return open_runner(
        model,
        name="tiny",
        fingerprint=b"tiny",
        verdicts=verdicts,
        backend=backend,
        kv_dtype=kv_dtype,
        page_size=4,
        num_pages=31,
        context_limit=128,
    )


def logits_over(model: PreTrainedModel, verdicts: Path, backend: str, kv_dtype: torch.dtype | None) -> Tensor:
    """Of a prompt in chunks of 20 tokens, [tokens, vocab]."""
    runner = opened(model, verdicts, backend, kv_dtype)
    prompt = random_prompt(20, 100)
    chunks = [PackedSequence(prompt[at : at + 20], at, range(1, 31), "all") for at in range(0, 100, 20)]
    try:
        return torch.cat([runner.run([chunk]) for chunk in chunks])
    finally:
        runner.close()


def with_a_dimension_that_stands_out(model: Any) -> PreTrainedModel:
    """The same model, by the rules of algebra: of each head one pair of dimensions that RoPE turns together is so many
    times as large in keys, and as many times smaller in queries."""
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            size = attention.head_dim
            for projection, factor in ((attention.k_proj, TIMES), (attention.q_proj, 1 / TIMES)):
                heads = projection.weight.view(-1, size, projection.weight.shape[1])
                for dimension in (1, 1 + size // 2):
                    heads[:, dimension] *= factor
    return model


def off_by(model: PreTrainedModel, verdicts: Path, backend: str, kv_dtype: torch.dtype, exact: Tensor) -> float:
    """How far logits are off in the mean, as a part of the largest."""
    off = (logits_over(model, verdicts, backend, kv_dtype) - exact).abs().amax(-1)
    return float((off / exact.abs().amax(-1)).mean())


def test_a_dimension_that_stands_out_in_every_key_costs_little(tmp_path: Path, backend: str) -> None:
    def models() -> Any:
        return tiny_model("llama", head_dim=64)

    exact = logits_over(models(), tmp_path, backend, None)
    same = logits_over(with_a_dimension_that_stands_out(models()), tmp_path, backend, None)
    torch.testing.assert_close(same, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))
    plain = off_by(models(), tmp_path, backend, torch.int8, exact)
    standing_out = off_by(with_a_dimension_that_stands_out(models()), tmp_path, backend, torch.int8, exact)
    # 1.4 with the rotation, 2.7 without.
    assert 0 < plain < 0.1
    assert standing_out <= 1.8 * plain


def test_keys_of_int8_are_rotated_and_those_of_the_models_own_dtype_are_not(tmp_path: Path, backend: str) -> None:
    """A rotation of what is kept as it is would cost exactness, and buy nothing."""

    def first_keys(kv_dtype: torch.dtype | None) -> Tensor:
        runner = opened(tiny_model("llama"), tmp_path, backend, kv_dtype)
        try:
            runner.run([PackedSequence(random_prompt(21, 5), 0, [1, 2], "last")])
            pages = runner.store.export_pages([1, 2])
        finally:
            runner.close()
        scales = pages.scales[0][..., :1].float() if pages.scales else torch.ones(1)
        return (pages.keys[0].float() * scales).flatten(0, 1)[:5]

    keys, quantized = first_keys(None), first_keys(torch.int8)
    _, rotated = Hadamard(keys.shape[-1], torch.float32)(keys, keys)
    by_more_than_rounding = 0.01 * float(rotated.abs().max())
    torch.testing.assert_close(quantized, rotated, rtol=0, atol=by_more_than_rounding)
    assert float((quantized - keys).abs().max()) > 10 * by_more_than_rounding
