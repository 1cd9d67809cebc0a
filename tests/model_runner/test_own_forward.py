"""Models made of known layers are run by a forward of ours, which answers as theirs does; all others by their own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import GraniteConfig, GraniteForCausalLM, PreTrainedModel

from agentkv.model_runner import ModelRunner, PackedSequence, exactness_bound, open_runner
from agentkv.model_runner.products import Packed, Plain, Product, Weights, can_pack
from agentkv_kernels import BackendUnavailable, choose_backend, get_backend
from support.engines import random_prompt
from support.tiny_models import tiny_model

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((37, 5, 21))]


def opened(model: PreTrainedModel, folder: Path, **options: Any) -> ModelRunner:
    given = {"name": "a-model", "fingerprint": b"of it", "context_limit": 64, "page_size": 4, "num_pages": 40}
    return open_runner(model, verdicts=folder, **(given | options))


def logits(runner: ModelRunner, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[torch.Tensor]:
    """Of every token of every prompt: half of each in one step, the other half in the next, then none in a third."""
    tables = [list(range(1 + 10 * number, 11 + 10 * number)) for number in range(len(prompts))]
    halves = [len(prompt) // 2 for prompt in prompts]
    steps = [
        [
            PackedSequence(prompt[:half], 0, table, "all")
            for prompt, half, table in zip(prompts, halves, tables, strict=True)
        ],
        [
            PackedSequence(prompt[half:], half, table, "all")
            for prompt, half, table in zip(prompts, halves, tables, strict=True)
        ],
    ]
    parts = [runner.run(step).split([len(sequence.token_ids) for sequence in step]) for step in steps]
    nobody = runner.run([PackedSequence(prompts[0][:3], 0, tables[0], "none")])
    assert nobody.shape == (0, parts[0][0].shape[1])
    return [torch.cat(pair) for pair in zip(*parts, strict=True)]


def says(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return any(text in record.getMessage() for record in caplog.records)


def needed(backend: str) -> str:
    """The name of a backend that is here; the test is skipped where it is not."""
    try:
        get_backend(backend, "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return backend


@pytest.fixture
def runner_of(tmp_path: Path) -> Any:
    """Opens runners, and closes them at the end."""
    made: list[ModelRunner] = []

    def open_one(model: PreTrainedModel, **options: Any) -> ModelRunner:
        made.append(opened(model, tmp_path / str(len(made)), **options))
        return made[-1]

    yield open_one
    for runner in made:
        runner.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("backend", "weights"),
    [("cpu", "compiled for"), ("reference", "weights packed"), ("reference", "weights as they lie")],
    ids=["compiled", "packed", "as-they-lie"],
)
def test_it_gives_the_logits_of_the_model(
    kind: str,
    backend: str,
    weights: str,
    runner_of: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if weights == "weights packed" and not can_pack(torch.device("cpu"), torch.float32):
        pytest.skip("this torch has no oneDNN")
    if weights == "weights as they lie":
        monkeypatch.setattr("agentkv.model_runner.own_weights.can_pack", lambda *_: False)
    monkeypatch.setattr("agentkv.model_runner.own_weights._LEAST_PACKED", 0)  # Those of a tiny model, too.
    model = tiny_model(kind)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model, backend=needed(backend))
    assert says(caplog, f"is run by a forward of ours, {weights}")
    monkeypatch.setattr(type(model.model), "forward", None)  # Nobody calls it.
    for ours, theirs in zip(logits(runner), expected, strict=True):
        assert float((ours - theirs).abs().max()) <= exactness_bound(theirs)


def test_it_can_be_turned_off(
    runner_of: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTKV_OWN_FORWARD", "0")
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner_of(tiny_model("llama"))
    assert says(caplog, "is run by its own modules: AGENTKV_OWN_FORWARD is 0")


def scaled(model: Any) -> None:
    class Scaled(type(model.model.layers[1].mlp.down_proj)):  # type: ignore[misc]
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(rows)  # type: ignore[no-any-return]

    model.model.layers[1].mlp.down_proj.__class__ = Scaled


def hooked(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    former = model.model.layers[2].mlp.forward
    model.model.layers[2].mlp.forward = lambda rows: 3 * former(rows)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled, "a projection is a Scaled"),
        (hooked, "has hooks"),
        (replaced, "the forward of a LlamaMLP was replaced"),
    ],
)
def test_what_somebody_has_changed_is_run_as_he_changed_it(
    change: Callable[[Any], None], reason: str, runner_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    change(model)
    with torch.inference_mode():
        expected = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in PROMPTS]
    with caplog.at_level(logging.INFO, logger="agentkv"):
        runner = runner_of(model)
    (told,) = (each.getMessage() for each in caplog.records if "is run by its own modules: " in each.getMessage())
    assert reason in told
    for ours, theirs in zip(logits(runner), expected, strict=True):
        assert float((ours - theirs).abs().max()) <= exactness_bound(theirs)


def test_layers_that_scale_what_they_add_are_found_out_by_the_probe(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are made of the same parts; only their logits tell."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteConfig(vocab_size=256, num_hidden_layers=2, residual_multiplier=0.5, **sizes)
    model = GraniteForCausalLM(config).eval()
    with caplog.at_level(logging.INFO, logger="agentkv"):
        opened(model, tmp_path).close()
        opened(model, tmp_path).close()
    found = [record.getMessage() for record in caplog.records if "by its own modules" in record.getMessage()]
    assert len(found) == 2
    assert found[0] == found[1]
    assert "its own forward gives other logits, by" in found[0]
    (note,) = (json.loads(path.read_text()) for path in tmp_path.iterdir())
    assert note["against_own_forward"] in found[0]


def before_one_module(model: Any, call: Callable[..., None]) -> Any:
    return model.model.layers[0].mlp.register_forward_pre_hook(call)


def behind_one_module(model: Any, call: Callable[..., None]) -> Any:
    return model.model.layers[0].mlp.register_forward_hook(call)


def behind_every_module(model: Any, call: Callable[..., None]) -> Any:
    mlp = model.model.layers[0].mlp
    return register_module_forward_hook(lambda module, *given: call(module, *given) if module is mlp else None)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("hooked", [before_one_module, behind_one_module, behind_every_module])
def test_a_hook_that_is_set_while_it_runs_is_called(hooked: Callable[..., Any], backend: str, runner_of: Any) -> None:
    model: Any = tiny_model("llama")
    runner = runner_of(model, backend=needed(backend))
    before = logits(runner)
    calls: list[int] = []
    hook = hooked(model, lambda *_: calls.append(1))
    try:
        during = logits(runner)
    finally:
        hook.remove()
    assert len(calls) == 3
    logits(runner)
    assert len(calls) == 3
    for one, other in zip(before, during, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=exactness_bound(one))


def test_no_step_is_replayed_while_a_hook_is_set(runner_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Graphs:
        def __init__(self, *_: Any, **__: Any) -> None:
            return

        def run(self, *_: Any) -> None:
            asked.append(1)

    monkeypatch.setattr("agentkv.model_runner.runner.are_replayable", lambda *_: True)
    monkeypatch.setattr("agentkv.model_runner.runner.DecodeGraphs", Graphs)
    model: Any = tiny_model("llama")
    hook = behind_one_module(model, lambda *_: None)
    runner = runner_of(model)
    logits(runner)
    assert not asked
    hook.remove()
    logits(runner)
    assert len(asked) == 3


@torch.no_grad()
def in_place(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj.weight.neg_()


def loaded_again(model: Any) -> None:
    model.load_state_dict(tiny_model("llama", seed=1).state_dict())


def another_parameter(model: Any) -> None:
    norm = model.model.layers[0].input_layernorm
    norm.weight = nn.Parameter(2 * norm.weight, requires_grad=False)


def other_data(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.flip(0)


def another_module(model: Any) -> None:
    mlp = model.model.layers[2].mlp
    mlp.up_proj = nn.Sequential(mlp.up_proj, nn.Tanh())


@pytest.mark.parametrize("change", [in_place, loaded_again, another_parameter, other_data, another_module])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_change_of_weights_counts_from_the_next_step_on_and_is_told_once(
    change: Callable[[Any], None], backend: str, runner_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if backend not in (choose_backend("cpu").backend.name, "reference"):
        pytest.skip("no compiled kernels are here")
    model = tiny_model("llama")
    runner = runner_of(model, backend=backend)
    before = logits(runner)
    change(model)
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        after = logits(runner)
    assert caplog.text.count("weights of the LlamaForCausalLM were changed while it is served") == 1
    runner.close()
    for ours, prompt, former in zip(after, PROMPTS, before, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
        assert float((former - expected).abs().max()) > 0.1
        assert float((ours - expected).abs().max()) <= exactness_bound(expected)


def test_a_forward_that_is_replaced_while_it_runs_is_called_until_it_is_put_back(runner_of: Any) -> None:
    model: Any = tiny_model("llama")
    runner = runner_of(model)
    before = logits(runner)
    former = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda rows: -former(rows)
    assert float((logits(runner)[0] - before[0]).abs().max()) > 0.1
    del model.model.layers[0].mlp.forward
    torch.testing.assert_close(logits(runner)[0], before[0], rtol=0, atol=exactness_bound(before[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, 33])
def test_a_product_is_one_over_all_weights_that_read_the_same_rows(dtype: torch.dtype, num_rows: int) -> None:
    draw = torch.Generator().manual_seed(num_rows)
    sizes = (24, 8, 8)
    weights = tuple(torch.randn(size, 40, generator=draw).to(dtype) for size in sizes)
    bias = torch.randn(sizes[1], generator=draw).to(dtype)
    rows = torch.randn(num_rows, 40, generator=draw).to(dtype)
    exact = nn.functional.linear(rows.double(), torch.cat(weights).double())
    exact[:, 24:32] += bias.double()
    kinds: list[Callable[[Weights], Product]] = [Plain]
    if can_pack(torch.device("cpu"), dtype):
        kinds.append(Packed)
    for kind in kinds:
        product = kind(Weights(weights, (None, bias, None)))
        # Sums of 40 products of normal numbers: below 40, rounded once to bf16, or 40 times in fp32.
        torch.testing.assert_close(
            product(rows).double(), exact, rtol=0, atol=40 * 2**-8 if dtype == torch.bfloat16 else 40 * 40 * 2**-24
        )
