"""What a listener may do, and what it is told that it may not."""

from __future__ import annotations

import asyncio

from agentkv import Runtime
from agentkv.cache import Event
from support.engines import random_prompt
from support.runtimes import serving
from support.tiny_models import tiny_model


async def test_a_listener_that_asks_for_a_recount_is_told_that_it_would_wait_for_itself() -> None:
    told: list[str] = []
    runtimes: list[Runtime] = []

    class Recounting:
        def on_event(self, event: Event) -> None:
            try:
                runtimes[0].check()
            except RuntimeError as error:
                told.append(str(error))

    async with serving(tiny_model("llama"), listener=Recounting()) as runtime:
        runtimes.append(runtime)
        await asyncio.wait_for(runtime.generate(random_prompt(1, 9), max_tokens=3), 30)
    assert told
    assert set(told) == {"check() waits for the engine's thread, and this is it: call it outside of the listener"}
