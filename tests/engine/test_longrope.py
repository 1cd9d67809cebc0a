"""RoPE that looks at the longest position of a batch is held to one regime, on both sides of its threshold.

The oracle computes the rotation by itself, from the formulas of the paper (Ding et al., 2024, section 3.3 and the
scaling of section 3.4), with the one or the other set of factors whatever the length, and generates without a cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentkv.model_runner import exactness_bound, rope_regime
from support.engines import model_driver, random_prompt
from support.tiny_models import LONGROPE_THRESHOLD, tiny_model

Tokens = tuple[int, ...]
LONG_LIMIT = 8 * LONGROPE_THRESHOLD


def held_rotation(config: Any, factors: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """cos and sin [batch, tokens, head size] with one set of factors for every length."""
    parameters = config.rope_parameters
    size = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2) / size
    frequencies = 1.0 / (torch.tensor(parameters[factors]) * parameters["rope_theta"] ** exponents)
    scale = math.sqrt(1 + math.log(parameters["factor"]) / math.log(LONGROPE_THRESHOLD))

    def rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    return rotation


@functools.cache
def cold_run(factors: str, prompt: Tokens, num_tokens: int) -> tuple[Tokens, Tensor]:
    """The greedy answer, and the logits of all positions of prompt and answer."""
    model = tiny_model("phi3_longrope")
    model.model.rotary_emb.forward = held_rotation(model.config, factors)
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
            token_ids.append(int(logits[-1].argmax()))
        return tuple(token_ids[len(prompt) :]), model(torch.tensor([token_ids]), use_cache=False).logits[0]


def check(driver: Any, call: int, factors: str, prompt: Tokens, num_tokens: int) -> None:
    answer, logits = cold_run(factors, prompt, num_tokens)
    assert len(set(answer)) >= min(6, num_tokens // 3)
    assert driver.replies[call, 0].token_ids == answer
    whole = (*prompt, *answer)
    rows = [(prefix, row) for prefix, row in driver.runner.rows if whole[: len(prefix)] == prefix]
    assert len(rows) >= num_tokens
    for prefix, row in rows:
        expected = logits[len(prefix) - 1]
        assert float((row - expected).abs().max()) <= exactness_bound(expected)


@pytest.mark.parametrize(("limit", "factors"), [(LONGROPE_THRESHOLD, "short_factor"), (LONG_LIMIT, "long_factor")])
def test_alone_cold_and_warm_a_short_text_has_the_frequencies_of_the_limit(
    limit: int, factors: str, verdicts: Path
) -> None:
    prompt = random_prompt(30, 38)
    with model_driver(tiny_model("phi3_longrope"), verdicts, context_limit=limit) as driver:
        for _ in range(2):
            call = driver.add(prompt, max_tokens=24)
            driver.run()
            check(driver, call, factors, prompt, 24)
        assert driver.replies[call, 0].usage.cached_tokens == len(prompt) - 1


def test_a_text_that_grows_over_the_threshold_keeps_the_frequencies_it_began_with(verdicts: Path) -> None:
    prompt = random_prompt(31, LONGROPE_THRESHOLD - 6)
    with model_driver(tiny_model("phi3_longrope"), verdicts, context_limit=LONG_LIMIT) as driver:
        call = driver.add(prompt, max_tokens=24)
        driver.run()
        check(driver, call, "long_factor", prompt, 24)


@pytest.mark.parametrize("budget", [16, 1024])
def test_packed_beside_a_longer_sequence_a_short_one_answers_as_alone(budget: int, verdicts: Path) -> None:
    short, long = random_prompt(32, 20), random_prompt(33, LONGROPE_THRESHOLD + 26)
    with model_driver(
        tiny_model("phi3_longrope"), verdicts, context_limit=LONG_LIMIT, max_num_batched_tokens=budget, max_num_seqs=4
    ) as driver:
        calls = [driver.add(prompt, max_tokens=12) for prompt in (short, long)]
        driver.run()
        assert max(len(batch) for batch in driver.runner.batches) == 2
        for call, prompt in zip(calls, (short, long), strict=True):
            check(driver, call, "long_factor", prompt, 12)


def test_the_two_regimes_are_two_models() -> None:
    """Else what one runtime caches could be taken by the other: the choice belongs to the fingerprint."""
    model = tiny_model("phi3_longrope")
    assert rope_regime(model, LONGROPE_THRESHOLD) != rope_regime(model, LONGROPE_THRESHOLD + 1)
    prompt = random_prompt(30, 38)
    assert cold_run("short_factor", prompt, 24)[0] != cold_run("long_factor", prompt, 24)[0]
