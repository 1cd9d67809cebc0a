"""Event loops that stand still while a call of theirs waits for its place, as between two run_until_complete."""

from __future__ import annotations

import asyncio
from typing import Any

from agentkv import Runtime
from agentkv.runtime.admission import Gate
from support.engines import cold, random_prompt
from support.runtimes import gated
from support.tiny_models import tiny_model


def test_a_place_is_not_given_to_a_loop_that_stands_still_and_who_waits_there_goes_on_with_it() -> None:
    still, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    gate = Gate(1)

    async def begin_to_wait() -> list[asyncio.Task[None]]:
        waiting = [asyncio.ensure_future(gate.enter()) for _ in range(2)]
        await asyncio.sleep(0)
        return waiting

    try:
        gate.enter_or_raise()
        first, second = still.run_until_complete(begin_to_wait())
        gate.leave()
        for _ in range(3):
            other.run_until_complete(asyncio.wait_for(gate.enter(), 10))
            gate.leave()
        still.run_until_complete(asyncio.wait_for(first, 10))
        assert not second.done()
        gate.leave()
        still.run_until_complete(asyncio.wait_for(second, 10))
        gate.leave()
        gate.enter_or_raise()
    finally:
        still.close()
        other.close()


def test_a_call_on_another_loop_is_served_while_one_in_front_of_it_stands_still() -> None:
    prompt = list(random_prompt(1, 11))
    still, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    model = tiny_model("llama")
    with gated(model) as gate:
        runtime = Runtime(model, max_num_seqs=1, max_queue=1, page_size=4, num_pages=65, context_limit=128)
        still.run_until_complete(runtime.start())
        gate.close()

        async def begin() -> list[asyncio.Task[Any]]:
            calls = [asyncio.ensure_future(runtime.generate(prompt, max_tokens=2)) for _ in range(3)]
            await asyncio.to_thread(gate.arrived.wait, 60)
            return calls

        calls = still.run_until_complete(begin())
        gate.open()
        try:
            for _ in range(2):
                reply: Any = other.run_until_complete(runtime.generate(prompt, max_tokens=2, timeout=30))
                assert reply.token_ids == cold("llama").answer(tuple(prompt), 2)
            replies = still.run_until_complete(asyncio.wait_for(asyncio.gather(*calls), 30))
            assert [each.token_ids for each in replies] == [reply.token_ids] * 3
        finally:
            still.run_until_complete(runtime.close())
            still.close()
            other.close()
