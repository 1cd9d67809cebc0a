"""What cannot be served exactly is refused with the reason, and given back untouched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from agentkv.errors import ConfigError, ModelUnsupported
from agentkv.model_runner import ModelRunner, open_runner, opening
from agentkv.model_runner.quirks import REFUSED_MODEL_TYPES
from agentkv_kernels import ReferenceBackend
from support.engines import random_prompt
from support.tiny_models import REFUSED, SERVED, tiny_config, tiny_model

REASONS = {
    "llama4": "layers of kind chunked_attention",
    "qwen2_moe_window": "gives other logits over pages .* masks or positions carry more than causality",
    "phimoe_window": "gives other logits over pages .* masks or positions carry more than causality",
    "mamba": "keeps a recurrent state, which pages cannot hold",
    "qwen3_next": "keeps a recurrent state, which pages cannot hold",
    "t5": "has an encoder",
    "falcon_alibi": "does not use transformers' attention interface",
}


def opened(model: PreTrainedModel, folder: Path, **options: Any) -> ModelRunner:
    """A runner of a model that nobody has judged before."""
    given: dict[str, Any] = {
        "name": "tiny",
        "fingerprint": b"sixteen bytes ok",
        "context_limit": 128,
        "page_size": 4,
        "num_pages": 33,
    }
    return open_runner(model, verdicts=folder, **(given | options))


def state(model: PreTrainedModel) -> dict[str, Any]:
    """All that switching a model could leave behind."""
    return {
        "implementation": [
            module.config._attn_implementation for module in model.modules() if isinstance(module, PreTrainedModel)
        ],
        "own attributes": [(name, set(vars(module))) for name, module in model.named_modules()],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "hooks": sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()),
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
        "weights": [parameter.sum().item() for parameter in model.parameters()],
    }


def answer(model: PreTrainedModel) -> Tensor:
    inputs = torch.tensor([random_prompt(1, 20)])
    extra = {"decoder_input_ids": inputs} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        logits: Tensor = model(inputs, **extra).logits
    return logits


def test_each_kind_that_must_be_refused_has_a_reason_here() -> None:
    assert REASONS.keys() == REFUSED.keys()


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_it_is_refused_with_its_reason_each_time_and_left_as_it_was(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    before, logits = state(model), answer(model)
    for _ in range(2):
        with pytest.raises(ModelUnsupported, match=REASONS[kind]) as refused:
            opened(model, tmp_path, name="my-model")
        assert str(refused.value).startswith("my-model ")
        assert state(model) == before
        assert torch.equal(answer(model), logits)
    assert list(tmp_path.iterdir()) == [], "a refusal is not kept as a verdict"


@pytest.mark.parametrize("kind", ["qwen2_moe_window", "phimoe_window"])
def test_the_same_model_without_its_window_is_served(kind: str, tmp_path: Path) -> None:
    """So it is the window that the probe caught, and nothing else about the architecture."""
    plain: dict[str, Any] = {"sliding_window": None}
    if kind == "qwen2_moe_window":
        plain |= {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}
    opened(tiny_model(kind, **plain), tmp_path).close()


def test_an_attention_keyword_that_nobody_here_knows_is_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward, head_bias=torch.ones(4))
    before = state(model)
    with pytest.raises(ModelUnsupported, match="its attention function head_bias, which is unknown here"):
        opened(model, tmp_path)
    assert state(model) == before


def test_attention_that_also_looks_forward_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ModelUnsupported, match="attends to later tokens too"):
        opened(model, tmp_path)


def test_a_second_runner_of_one_model_object_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first = opened(model, tmp_path)
    during = state(model)
    with pytest.raises(ModelUnsupported, match="serves another Runtime already; close that one first"):
        opened(model, tmp_path)
    assert state(model) == during, "the first goes on undisturbed"
    first.close()
    opened(model, tmp_path).close()


def test_a_backend_that_nobody_registered_is_named_with_the_known_ones(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = state(model)
    with pytest.raises(ConfigError, match=r"no backend is named 'tensor-cores'; known are .*reference"):
        opened(model, tmp_path, backend="tensor-cores")
    assert state(model) == before


@pytest.mark.parametrize("kind", ["llama", "phi3_longrope"])
def test_a_pool_that_cannot_be_made_leaves_the_model_as_it_was(kind: str, tmp_path: Path) -> None:
    model = tiny_model(kind)
    before = state(model)
    with pytest.raises(ConfigError, match="at least two pages"):
        opened(model, tmp_path, num_pages=None, memory=100)
    assert state(model) == before
    opened(model, tmp_path).close()
    assert state(model) == before


# -- the probe can fail -------------------------------------------------------------------------------------


class RestartedPositions(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Counts positions by itself, from 0 in each forward, whatever it is told."""

    def forward(self, *arguments: Any, position_ids: Any = None, **options: Any) -> Any:
        return super().forward(*arguments, **options)


class MeanOfTheBatch(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Adds to each embedding the mean of all tokens that stand in the batch."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        embedded = self.get_input_embeddings()(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.mean(dim=1, keepdim=True), **options)


@pytest.mark.parametrize("model_class", [RestartedPositions, MeanOfTheBatch])
def test_a_model_whose_tokens_know_more_than_their_own_positions_is_refused(
    model_class: type[PreTrainedModel], tmp_path: Path
) -> None:
    model = model_class(tiny_config("llama"))
    model.load_state_dict(tiny_model("llama").state_dict())
    with pytest.raises(ModelUnsupported, match="masks or positions carry more"):
        opened(model.train(False), tmp_path)


def test_a_mask_that_hides_more_than_it_tells_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ordinary: Any = vars(modeling_llama)["create_causal_mask"]

    def hiding(**arguments: Any) -> Any:
        return ordinary(**arguments, and_mask_function=lambda batch, head, query, key: key != 3)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", hiding)
    with pytest.raises(ModelUnsupported, match="masks or positions carry more"):
        opened(tiny_model("llama"), tmp_path)


def wider_window(options: dict[str, Any]) -> None:
    if options["window"] is not None:
        options["window"] += 1


def no_softcap(options: dict[str, Any]) -> None:
    options["softcap"] = None


def no_sinks(options: dict[str, Any]) -> None:
    options["sinks"] = None


def other_scale(options: dict[str, Any]) -> None:
    options["scale"] *= 1.01


@pytest.mark.parametrize(
    ("kind", "break_it"),
    [
        *((kind, other_scale) for kind in sorted(SERVED)),
        *((kind, wider_window) for kind in ("qwen2_window", "mistral", "gemma2", "gemma3", "gpt_oss")),
        ("gemma2", no_softcap),
        ("gpt_oss", no_sinks),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_probe_sees_every_option_of_attention(
    kind: str, break_it: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = ReferenceBackend.attend

    def broken(self: ReferenceBackend, *arguments: Any, **options: Any) -> Tensor:
        break_it(options)
        return attend(self, *arguments, **options)

    monkeypatch.setattr(ReferenceBackend, "attend", broken)
    with pytest.raises(ModelUnsupported, match="gives other logits"):
        opened(tiny_model(kind), tmp_path)


def test_pages_of_int8_make_the_probe_neither_blind_nor_stricter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale that is off by 1 % moves logits less than int8 does, and is found; the model as it is passes."""
    opened(tiny_model("mistral"), tmp_path / "right", kv_dtype=torch.int8).close()
    attend = ReferenceBackend.attend

    def broken(self: ReferenceBackend, *arguments: Any, **options: Any) -> Tensor:
        other_scale(options)
        return attend(self, *arguments, **options)

    monkeypatch.setattr(ReferenceBackend, "attend", broken)
    with pytest.raises(ModelUnsupported, match="gives other logits"):
        opened(tiny_model("mistral"), tmp_path / "wrong", kv_dtype=torch.int8)


def test_a_verdict_is_kept_for_this_very_model_and_what_cannot_be_kept_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[PreTrainedModel] = []
    judge: Any = vars(opening)["probe"]

    def counted(model: PreTrainedModel, *rest: Any) -> Any:
        judged.append(model)
        return judge(model, *rest)

    monkeypatch.setattr(opening, "probe", counted)
    for _ in range(2):
        opened(tiny_model("llama"), tmp_path / "kept").close()
    assert len(judged) == 1
    opened(tiny_model("llama", seed=1), tmp_path / "kept", fingerprint=b"of another model").close()
    assert len(judged) == 2
    (tmp_path / "a file").write_text("where a folder was wanted")
    for _ in range(2):
        opened(tiny_model("llama"), tmp_path / "a file").close()
    assert len(judged) == 4


def test_a_line_in_the_file_of_quirks_refuses_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REFUSED_MODEL_TYPES, "llama", "only for this test")
    with pytest.raises(ModelUnsupported, match="only for this test"):
        opened(tiny_model("llama"), tmp_path)
