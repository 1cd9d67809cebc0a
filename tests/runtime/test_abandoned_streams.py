"""Streams that are given up before, while and after they begin: nothing of them is computed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentkv import Rate, Runtime, Stream, StreamClosed, TurnEnd
from agentkv.models import resolve
from agentkv.testing import scripted
from support.engines import random_prompt
from support.runtimes import Gate, gated, idle_and_sound, serving
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))


async def read(stream: Stream) -> list[Any]:
    async with stream:
        return [event async for event in stream]


async def until(happened: Any) -> None:
    while not happened():
        await asyncio.sleep(0)


def output_tokens(runtime: Runtime) -> int:
    runtime.check()
    figure: int = runtime.report().to_dict()["output_tokens"]
    return figure


@pytest.fixture
async def crowded() -> AsyncIterator[tuple[Runtime, Gate, list[asyncio.Task[Any]]]]:
    """One call stands in its forward and takes up the queue until the step ends, one waits for its place."""
    model = tiny_model("llama")
    with gated(model) as gate:
        async with serving(model, max_num_seqs=1, max_queue=1) as runtime:
            gate.close()
            calls = [asyncio.create_task(runtime.generate(PROMPT, max_tokens=2))]
            await asyncio.to_thread(gate.arrived.wait, 60)
            calls.append(asyncio.create_task(runtime.generate([*PROMPT, 1], max_tokens=2)))
            await until(lambda: len(runtime._gate._waiters) == 1)
            yield runtime, gate, calls
            gate.open()
            await asyncio.gather(*calls)


async def test_a_stream_cancelled_before_it_began_cannot_be_entered() -> None:
    async with serving(tiny_model("llama")) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=100)
        await stream.cancel()
        for _ in range(2):
            with pytest.raises(StreamClosed, match="cancelled before it began"):
                async with stream:
                    pass
        assert output_tokens(runtime) == 0


async def test_cancelled_by_another_task_while_it_waits_for_the_queue_it_takes_no_place(
    crowded: tuple[Runtime, Gate, list[asyncio.Task[Any]]],
) -> None:
    runtime, gate, calls = crowded
    stream = runtime.stream([*PROMPT, 2], max_tokens=100)
    reading = asyncio.create_task(read(stream))
    await until(lambda: len(runtime._gate._waiters) == 2)
    await asyncio.wait_for(asyncio.gather(stream.cancel(), stream.cancel()), 10)
    with pytest.raises(StreamClosed, match="cancelled before it began"):
        await reading
    assert len(runtime._gate._waiters) == 1
    gate.open()
    await asyncio.gather(*calls)
    assert output_tokens(runtime) == 4


async def test_entered_again_after_its_timeout_it_raises_the_timeout_and_computes_nothing(
    crowded: tuple[Runtime, Gate, list[asyncio.Task[Any]]],
) -> None:
    runtime, gate, calls = crowded
    stream = runtime.stream([*PROMPT, 2], max_tokens=100, timeout=0.05)
    with pytest.raises(TimeoutError):
        await read(stream)
    gate.open()
    await asyncio.gather(*calls)
    with pytest.raises(TimeoutError, match=r"no complete answer within 0\.05 s"):
        await read(stream)
    with pytest.raises(TimeoutError):
        await stream.reply()
    assert output_tokens(runtime) == 4


async def test_cancelled_while_the_model_is_loaded_the_loading_is_given_up_and_the_next_call_begins_it_anew() -> None:
    inner = resolve(tiny_model("llama"))
    loading, may_load = threading.Event(), threading.Event()

    class Slow:
        name = "slow"

        def load(self, options: Any) -> Any:
            loaded = inner.load(options)
            loading.set()
            assert may_load.wait(60)
            return loaded

    runtime = Runtime(Slow(), page_size=4, num_pages=65, context_limit=128, strict=True)
    stream = runtime.stream(PROMPT, max_tokens=100)
    reading = asyncio.create_task(read(stream))
    await asyncio.to_thread(loading.wait, 60)
    await asyncio.wait_for(stream.cancel(), 10)
    with pytest.raises(StreamClosed):
        await reading
    may_load.set()
    await runtime.generate(PROMPT, max_tokens=2)
    assert output_tokens(runtime) == 2
    await runtime.close()


async def test_cancelled_while_it_waits_for_its_rate_it_never_runs() -> None:
    async with serving(tiny_model("llama"), rate_limit=Rate(1, 3600.0)) as runtime:
        await runtime.generate(PROMPT, max_tokens=2)
        stream = runtime.stream(PROMPT, max_tokens=100)
        reading = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        await asyncio.wait_for(stream.cancel(), 10)
        with pytest.raises(StreamClosed):
            await reading
        assert output_tokens(runtime) == 2


async def test_cancelled_at_any_moment_it_raises_or_has_a_reply_that_says_so_and_a_session_is_free_again() -> None:
    async with Runtime(scripted(lambda asked: "Yes. " * 20), num_pages=129) as runtime:
        outcomes = set()
        for passed in range(40):
            session = runtime.session()
            stream = session.stream("Go.")
            reading = asyncio.create_task(read(stream))
            for _ in range(passed):
                # The prompt is written on another thread, so a single turn of the loop would not bring it far.
                for _ in range(40 if passed % 2 else 1):
                    await asyncio.sleep(0)
            await asyncio.wait_for(stream.cancel(), 10)
            try:
                last = (await asyncio.wait_for(reading, 10))[-1]
                assert isinstance(last, TurnEnd)
                outcomes.add(last.reply.finish_reason)
            except StreamClosed:
                outcomes.add("closed")
            assert not session.busy
            idle_and_sound(runtime)
        assert outcomes >= {"closed", "cancelled"}


async def test_what_goes_wrong_when_a_stream_that_nobody_holds_is_ended_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(call_id: int) -> None:
        raise LookupError(f"call {call_id} cannot be ended")

    async with serving(tiny_model("llama")) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=100)
        await anext(stream)
        worker, call_id = runtime._life.worker, stream._submitted.call_id  # type: ignore[union-attr]
        await asyncio.wrap_future(worker.ask(lambda engine: vars(engine).update(abort=fails)))
        del stream
        await asyncio.wrap_future(worker.ask(lambda engine: vars(engine).pop("abort")))
        await asyncio.wrap_future(worker.abort(call_id))
        (record,) = caplog.records
        assert "what it was told between two steps" in record.message
        assert "cannot be ended" in str(record.exc_info)
