"""Sampling parameters are checked where they are made, and say what they wanted and had."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from agentkv.sampling_params import SamplingParams

NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
INTEGERS = ["max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]


def test_the_defaults_are_greedy_and_change_nothing() -> None:
    params = SamplingParams()
    assert params.greedy
    assert not params.penalised
    assert (params.max_tokens, params.stop, params.logprobs) == (None, (), None)


def test_params_are_frozen_and_hashable() -> None:
    params = SamplingParams(stop="end")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=["end"]))


@pytest.mark.parametrize(("given", "kept"), [("ab", ("ab",)), (["a", "b", "a"], ("a", "b")), ((), ()), (None, ())])
def test_stop_is_one_string_or_several(given: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == kept


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -3.0, 1e6])
def test_a_number_out_of_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .* got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "0.5", None, [1.0]])
def test_what_is_no_number_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be a number"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, "1", 1.0, [1]])
def test_what_is_no_integer_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be an int"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "logprobs", "prompt_logprobs"])
def test_negative_counts_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be .*got -1"):
        SamplingParams(**{name: -1})


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_tokens": 0}, ValueError),
        ({"temperature": 1e-9}, ValueError),
        ({"repetition_penalty": 0.0}, ValueError),
        ({"seed": 2**64}, ValueError),
        ({"stop": ""}, ValueError),
        ({"stop": ["a", ""]}, ValueError),
        ({"stop": [1]}, TypeError),
        ({"stop": b"a"}, TypeError),
        ({"stop": {"a"}}, TypeError),
        ({"stop_token_ids": [-1]}, ValueError),
        ({"stop_token_ids": [True]}, TypeError),
        ({"stop_token_ids": 3}, TypeError),
        ({"ignore_eos": 1}, TypeError),
    ],
    ids=str,
)
def test_each_wrong_value_is_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logprobs": 0},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_allowed(options: dict[str, Any]) -> None:
    SamplingParams(**options)


def test_an_unknown_keyword_names_what_looks_like_it() -> None:
    with pytest.raises(TypeError, match="unknown sampling parameter 'temprature': did you mean temperature"):
        SamplingParams.from_kwargs(temprature=1.0)
    with pytest.raises(TypeError, match=r"known are .*min_p"):
        SamplingParams.from_kwargs(zzz=1)


def test_keywords_stand_over_defaults() -> None:
    defaults = SamplingParams(temperature=0.5, stop="x")
    params = SamplingParams.from_kwargs(defaults, stop=("y",), seed=3)
    assert params == SamplingParams(temperature=0.5, stop=("y",), seed=3)


@pytest.mark.parametrize("module", ["agentkv.sampling_params", "agentkv.logprobs", "agentkv.detokenizer"])
def test_torch_is_not_needed(module: str) -> None:
    check = f"import {module}, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    found_here = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=found_here)
    assert done.stdout.strip() == "[]", done.stderr
