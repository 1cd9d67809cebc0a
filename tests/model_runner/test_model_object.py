"""The owner of a model object goes on calling it while a Runtime serves it, and gets it back as it was."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentkv import ModelUnsupported, Reply, Runtime
from support.engines import cold, random_prompt
from support.runtimes import gated, serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 21))
OWNED = [
    (kind, implementation)
    for kind in ("llama", "gemma3", "phi3_longrope", "qwen2_window", "gpt2")
    for implementation in ("eager", "sdpa")
] + [("gpt_oss", "eager")]


async def ask(runtime: Runtime, num_tokens: int) -> tuple[int, ...]:
    reply = await runtime.generate(PROMPT, max_tokens=num_tokens)
    assert isinstance(reply, Reply)
    return reply.token_ids


def owned(kind: str, implementation: str) -> PreTrainedModel:
    model = tiny_model(kind)
    model.set_attn_implementation(implementation)
    return model


def everything(model: PreTrainedModel) -> dict[str, Tensor]:
    """What an owner may ask of a model: logits, a padded batch, generated text, a longer text."""
    batch = torch.tensor([PROMPT, PROMPT[::-1]])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    longer = torch.tensor([random_prompt(2, 90)])
    with torch.no_grad():
        return {
            "logits": model(batch[:1]).logits,
            "padded": model(batch, attention_mask=mask).logits,
            "longer": model(longer).logits,
            "text": model.generate(  # type: ignore[operator]
                batch, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
            ),
        }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("kind", "implementation"), OWNED)
async def test_it_answers_to_the_last_bit_as_before_while_it_is_served_and_after(
    kind: str, implementation: str
) -> None:
    model = owned(kind, implementation)
    before = everything(model)
    async with serving(model, context_limit=64) as runtime:
        assert same(await asyncio.to_thread(everything, model), before)
        assert await ask(runtime, 6) == cold(kind).answer(PROMPT, 6)
        assert same(everything(model), before)
    assert same(everything(model), before)
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
async def test_attention_weights_are_given_out_as_before(kind: str) -> None:
    model = owned(kind, "eager")
    before = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    async with serving(model):
        during = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    assert len(before) == len(during) > 0
    assert all(torch.equal(left, right) for left, right in zip(before, during, strict=True))


async def test_its_owner_calls_it_in_the_middle_of_a_step_of_ours() -> None:
    """From another thread while our own forward stands still inside the model, so the two cannot miss each other."""
    model = owned("gemma3", "sdpa")
    before = everything(model)
    async with serving(model) as runtime:
        inside, go_on = threading.Event(), threading.Event()
        layer = model.model.layers[1].self_attn
        ours = threading.get_ident()

        def hold(*_: Any) -> None:
            if threading.get_ident() != ours:
                inside.set()
                assert go_on.wait(60)

        hook = layer.register_forward_pre_hook(hold)
        answer = asyncio.create_task(ask(runtime, 3))
        await asyncio.to_thread(inside.wait, 60)
        during = everything(model)
        go_on.set()
        assert await answer == cold("gemma3").answer(PROMPT, 3)
        hook.remove()
    assert same(during, before)


@pytest.mark.parametrize("fails", [False, True])
async def test_mode_gradients_and_attributes_come_back_also_when_it_could_not_be_opened(fails: bool) -> None:
    model = tiny_model("phi3_longrope")
    model.train()
    model.model.layers[1].train(False)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    training = [module.training for module in model.modules()]
    gradients = [parameter.requires_grad for parameter in model.parameters()]
    attributes = [set(vars(module)) for module in model.modules()]
    configs = [module.config._attn_implementation for module in model.modules() if isinstance(module, PreTrainedModel)]
    if fails:
        model.model.layers[0].self_attn.is_causal = False
        attributes = [set(vars(module)) for module in model.modules()]
        with pytest.raises(ModelUnsupported, match="attends to later tokens too"):
            await Runtime(model, context_limit=64).start()
    else:
        async with serving(model, context_limit=64) as runtime:
            await runtime.generate(PROMPT, max_tokens=2)
    assert [module.training for module in model.modules()] == training
    assert [parameter.requires_grad for parameter in model.parameters()] == gradients
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert configs == [
        module.config._attn_implementation for module in model.modules() if isinstance(module, PreTrainedModel)
    ]


async def test_a_second_runtime_on_one_model_object_is_refused_and_leaves_the_first_alone() -> None:
    model = tiny_model("llama").train()
    async with serving(model) as runtime:
        with pytest.raises(ModelUnsupported, match="serves another Runtime already"):
            await Runtime(model, context_limit=64).start()
        assert await ask(runtime, 3) == cold("llama").answer(PROMPT, 3)
    assert model.training, "the refused one has not taken the mode of the first for the owner's"
    async with serving(model) as runtime:
        await runtime.generate(PROMPT, max_tokens=1)


async def test_a_model_given_back_after_its_engine_died_answers_as_before() -> None:
    model = tiny_model("llama")
    before = everything(model)
    with gated(model) as gate:
        runtime = Runtime(model, context_limit=64, page_size=4, num_pages=33)
        await runtime.start()
        gate.error = SystemExit("the engine's thread dies of this")
        with pytest.raises(Exception, match="the engine ended"):
            await runtime.generate(PROMPT)
        await runtime.close()
    assert same(everything(model), before)
