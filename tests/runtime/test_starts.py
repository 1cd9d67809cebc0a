"""Starts that are given up, one after another, and the one that comes after them."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.worker import Worker
from support.engines import cold, random_prompt
from support.runtimes import idle_and_sound
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))
SMALL: dict[str, Any] = {"page_size": 4, "num_pages": 65, "context_limit": 128, "strict": True}
EXPECTED = cold("llama").answer(PROMPT, 3)


async def give_up_a_start(runtime: Runtime, *, turns: int = 1) -> None:
    starting = asyncio.create_task(runtime.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting])


async def test_starts_given_up_before_their_threads_run_wait_for_none_that_came_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_given_up, joined = threading.Event(), []
    run, join = Worker._run, Worker.join

    def late(worker: Worker) -> None:
        assert all_given_up.wait(60)
        run(worker)

    def joining(worker: Worker) -> None:
        joined.append((threading.current_thread(), worker._thread))
        join(worker)

    monkeypatch.setattr(Worker, "_run", late)
    monkeypatch.setattr(Worker, "join", joining)
    runtime = Runtime(tiny_model("llama"), **SMALL)
    for _ in range(3):
        await give_up_a_start(runtime)
    answer = asyncio.create_task(runtime.generate(PROMPT, max_tokens=3))
    await asyncio.sleep(0)
    all_given_up.set()
    assert (await asyncio.wait_for(answer, 30)).token_ids == EXPECTED
    waiting = {who for who, _ in joined}
    assert len(waiting) == 1, "only the start that is wanted waits for others"
    assert waiting.isdisjoint(former for _, former in joined)
    await runtime.close()


@pytest.mark.parametrize("seed", range(3))
async def test_starts_given_up_at_any_moment_leave_the_next_call_as_it_would_be(seed: int) -> None:
    moment = random.Random(seed)
    runtime = Runtime(tiny_model("llama"), **SMALL)
    for _ in range(6):
        await give_up_a_start(runtime, turns=moment.choice((1, 10, 100, 300, 1000)))
    reply = await asyncio.wait_for(runtime.generate(PROMPT, max_tokens=3), 30)
    assert reply.token_ids == EXPECTED
    idle_and_sound(runtime)
    await runtime.close()


async def test_a_runtime_that_nobody_holds_any_more_ends_its_thread_and_gives_the_model_back() -> None:
    model = tiny_model("llama").train()
    runtime: Runtime | None = Runtime(model, **SMALL)
    assert runtime is not None
    session = runtime.session()
    assert (await runtime.generate(PROMPT, max_tokens=3)).token_ids == EXPECTED
    thread = runtime._life.worker._thread
    runtime = None
    gc.collect()
    assert thread.is_alive(), "its session holds it"
    del session
    gc.collect()
    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()
    assert model.training
