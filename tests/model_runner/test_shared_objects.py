"""What a model object shares with others, or is changed in while it is served, changes no answer in silence."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from agentkv import Runtime
from agentkv.errors import ModelError, ModelUnsupported
from agentkv.models.claims import Claims
from support.engines import random_prompt
from support.tiny_models import greedy, tiny_config, tiny_model

OPTIONS: dict[str, Any] = {"num_pages": 65, "page_size": 4, "context_limit": 128}
PROMPT = list(random_prompt(3, 30))


async def test_two_models_with_one_config_object_are_not_served_at_once() -> None:
    config = tiny_config("llama")
    one, other = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config).eval()
    expected = greedy(other, PROMPT, 8)
    async with Runtime(one, **OPTIONS):
        with pytest.raises(ModelUnsupported, match="shares its config object with a model that serves another Runtime"):
            await Runtime(other, **OPTIONS).start()
    assert config._attn_implementation == "sdpa"
    async with Runtime(other, **OPTIONS) as runtime:
        assert list((await runtime.generate(PROMPT, max_tokens=8)).token_ids) == expected
    assert greedy(other, PROMPT, 8) == expected


async def test_two_models_with_equal_configs_of_their_own_are() -> None:
    models = [tiny_model("llama"), tiny_model("llama", seed=1)]
    assert models[0].config.to_dict() == models[1].config.to_dict()
    expected = [greedy(model, PROMPT, 4) for model in models]
    async with Runtime(models[0], **OPTIONS) as first, Runtime(models[1], **OPTIONS) as second:
        answers = [await runtime.generate(PROMPT, max_tokens=4) for runtime in (first, second)]
    assert [list(answer.token_ids) for answer in answers] == expected


async def test_attention_set_anew_on_a_served_model_fails_its_calls_and_caches_nothing() -> None:
    model = tiny_model("llama")
    async with Runtime(model, **OPTIONS) as runtime:
        ours = model.config._attn_implementation
        model.config._attn_implementation = "sdpa"
        with pytest.raises(ModelError, match=r"0 of 3 layers .* another attention implementation was set"):
            await runtime.generate(PROMPT, max_tokens=4)
        assert runtime.report().to_dict()["pages"]["cached"] == 0
        model.config._attn_implementation_internal = ours
        answer = await runtime.generate(PROMPT, max_tokens=4)
        runtime.check()
    assert list(answer.token_ids) == greedy(model, PROMPT, 4)


async def test_a_start_that_was_given_up_does_not_undo_what_the_next_one_did() -> None:
    model = tiny_model("llama").train()
    expected = greedy(copy.deepcopy(model).eval(), PROMPT, 8)
    first = Runtime(model, **OPTIONS)
    opening = asyncio.create_task(first.start())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    while True:
        runtime = Runtime(model, **OPTIONS)
        try:
            await runtime.start()
            break
        except ModelUnsupported:
            await asyncio.sleep(0)
    assert list((await runtime.generate(PROMPT, max_tokens=8)).token_ids) == expected
    await runtime.close()
    await first.close()
    assert model.training


def test_a_claim_is_all_or_nothing_by_identity_and_ends_with_its_object() -> None:
    class Thing:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    claims, a, b, c = Claims(), Thing(), Thing(), Thing()
    assert claims.take([a, b]) is None
    assert claims.take([c, b]) is b
    assert claims.take([c]) is None
    claims.give_back([a, b])
    assert claims.take([b]) is None
    claims.give_back([b])
    claims.give_back([b])
    assert claims.take([b, a]) is None
