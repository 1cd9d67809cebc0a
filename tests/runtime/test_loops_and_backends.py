"""A runtime belongs to no event loop and to no one backend: several of each at once, and one after another."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agentkv import ConfigError, Reply, Runtime, Stream
from agentkv_kernels import backend, register_backend
from support.engines import cold, random_prompt
from support.plain_backend import PlainBackend
from support.runtimes import gated, idle_and_sound, serving
from support.tiny_models import tiny_model

OPTIONS: dict[str, Any] = {"page_size": 4, "num_pages": 65, "context_limit": 128, "strict": True}
BASE = random_prompt(1, 14)


@pytest.fixture(scope="module", autouse=True)
def plain_backend() -> Iterator[None]:
    register_backend("plain in turns", lambda device: PlainBackend())
    yield
    # There is no public way back, and no need of one but here.
    backend._factories.pop("plain in turns")


def prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    """Some of each other's beginnings."""
    return [(*BASE[: 3 + (5 * number + seed) % 11], number, seed) for number in range(count)]


async def check_answers(runtime: Runtime, asked: list[tuple[int, ...]], kind: str = "llama") -> None:
    replies = await asyncio.gather(*(runtime.generate(prompt, max_tokens=5) for prompt in asked))
    for prompt, reply in zip(asked, replies, strict=True):
        assert isinstance(reply, Reply)
        assert reply.token_ids == cold(kind).answer(prompt, 5)


def test_three_event_loops_in_three_threads_at_once_and_each_is_answered_on_its_own() -> None:
    for seed in range(3):  # The oracle is one object, and asked by one thread only.
        for prompt in prompts(6, seed):
            cold("llama").answer(prompt, 5)
    runtime = Runtime(tiny_model("llama"), max_queue=2, **OPTIONS)
    together, failures = threading.Barrier(3), []

    def run(seed: int) -> None:
        async def main() -> None:
            thread = threading.get_ident()
            await check_answers(runtime, prompts(6, seed))
            async with runtime.stream(BASE, max_tokens=9) as stream:
                async for _ in stream:
                    assert threading.get_ident() == thread
            leaving = asyncio.create_task(runtime.generate(BASE, max_tokens=100))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])

        together.wait()
        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    idle_and_sound(runtime)
    asyncio.run(runtime.close())


def test_updates_for_a_loop_that_is_gone_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    with gated(model) as gate:
        runtime = Runtime(model, **OPTIONS)
        kept: list[Stream] = []

        async def leave() -> None:
            await runtime.start()
            gate.close()
            kept.append(await runtime.stream(BASE, max_tokens=4).__aenter__())
            await asyncio.to_thread(gate.arrived.wait, 60)

        asyncio.run(leave())
        with caplog.at_level(logging.ERROR, logger="agentkv"):
            gate.open()
            asyncio.run(check_answers(runtime, prompts(3, 0)))
            idle_and_sound(runtime)
        assert caplog.records == []
        asyncio.run(runtime.close())


def test_successive_event_loops_one_of_which_was_left_in_the_middle_of_a_call() -> None:
    runtime = Runtime(tiny_model("llama"), **OPTIONS)
    asyncio.run(check_answers(runtime, prompts(3, 0)))

    async def leave() -> None:
        stream = runtime.stream(BASE, max_tokens=100)
        async for _ in stream:
            return

    async def fail() -> None:
        async with runtime.stream(BASE, max_tokens=100) as stream:
            async for _ in stream:
                raise ZeroDivisionError

    asyncio.run(leave())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())
    asyncio.run(check_answers(runtime, prompts(3, 1)))
    idle_and_sound(runtime)
    asyncio.run(runtime.close())


async def test_two_runtimes_with_two_backends_and_page_sizes_in_turns_and_at_once() -> None:
    reference_model, plain_model = tiny_model("gemma3"), tiny_model("gemma3")
    models, inputs = (reference_model, plain_model), torch.tensor([BASE])
    before = [model(inputs).logits for model in models]
    async with (
        serving(reference_model, page_size=4) as reference,
        serving(plain_model, page_size=3, backend="plain in turns") as plain,
    ):
        asked = prompts(2, 0)
        for runtime in (reference, plain, reference, plain):
            await check_answers(runtime, asked, "gemma3")
        await asyncio.gather(*(check_answers(runtime, prompts(3, 2), "gemma3") for runtime in (reference, plain)))
        for runtime, page_size in ((reference, 4), (plain, 3)):
            figures = runtime.report().to_dict()
            assert figures["cached_tokens"] > 0
            assert figures["pages"]["cached"] > 0
            assert figures["pages"]["total"] == 128, page_size
    assert all(torch.equal(model(inputs).logits, logits) for model, logits in zip(models, before, strict=True))


async def test_an_unknown_backend_is_named_with_those_that_were_registered() -> None:
    with pytest.raises(ConfigError, match=r"no backend is named 'plane'; known are .*plain in turns, reference"):
        await Runtime(tiny_model("llama"), backend="plane", **OPTIONS).start()
