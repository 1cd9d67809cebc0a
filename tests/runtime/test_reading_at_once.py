"""Deltas that are read where they come, between the tasks of the loop: none twice, none lost, each in its order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from agentkv import Runtime, TurnEnd
from agentkv.streams import CallStream
from support.engines import random_prompt
from support.runtimes import gated, idle_and_sound, serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def talking(model: PreTrainedModel, **options: Any) -> contextlib.AbstractAsyncContextManager[Runtime]:
    return serving(model, tokenizer=tiny_chat_tokenizer(), **options)


class Taken:
    """Everything in the order in which it came, by either way."""

    def __init__(self, ready: Callable[[], bool] = lambda: True, broken_at: int = -1) -> None:
        self.events: list[Any] = []
        self.at_once = 0
        self.tasks: set[Any] = set()
        self.ready = ready
        self._broken_at = broken_at

    def take(self, delta: Any) -> None:
        if self.at_once == self._broken_at:
            raise ValueError("this reader is broken")
        self.at_once += 1
        self.tasks.add(asyncio.current_task())
        self.events.append(delta)

    async def all_of(self, stream: CallStream) -> None:
        stream.read_at_once(self)
        async for event in stream:
            self.events.append(event)


def text_and_ids(events: list[Any], index: int) -> tuple[str, tuple[int, ...]]:
    own = [event for event in events if event.index == index and not isinstance(event, TurnEnd)]
    return "".join(event.text for event in own), tuple(each for event in own for each in event.token_ids)


@pytest.mark.parametrize("often", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [1, 3])
async def test_what_is_read_at_once_and_what_is_read_as_ever_are_together_the_reply(
    model: PreTrainedModel, n: int, often: float
) -> None:
    draw = random.Random(f"{n}/{often}")
    async with talking(model) as runtime:
        taken = Taken(lambda: draw.random() < often)
        async with runtime.stream(PROMPT, n=n, temperature=1.0, max_tokens=40, ignore_eos=True) as stream:
            await taken.all_of(stream)
            replies = await stream.replies()
        for index, reply in enumerate(replies):
            assert text_and_ids(taken.events, index) == (reply.text, reply.token_ids)
        assert taken.events[-1] == TurnEnd(replies[taken.events[-1].index], taken.events[-1].index)
        assert (taken.at_once > 0) == (often > 0)
        assert taken.tasks <= {None}, "it was read by no task"


async def test_what_the_reader_raises_ends_the_call_and_is_raised_to_whoever_waits(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        taken = Taken(broken_at=2)
        async with runtime.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
            with pytest.raises(ValueError, match="this reader is broken"):
                await taken.all_of(stream)
            idle_and_sound(runtime)
            with pytest.raises(ValueError, match="this reader is broken"):
                await stream.reply()
        assert taken.at_once == 2


async def test_nothing_is_read_any_more_once_the_task_that_waits_is_cancelled(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        third = asyncio.Event()

        def ready() -> bool:
            if taken.at_once == 3:
                third.set()
            return True

        taken = Taken(ready)

        async def reading() -> None:
            async with runtime.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
                await taken.all_of(stream)

        task = asyncio.create_task(reading())
        await third.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        idle_and_sound(runtime)
        so_far = len(taken.events)
        await runtime.generate(PROMPT, max_tokens=3)
        assert len(taken.events) == so_far < 200


async def test_a_timeout_ends_a_call_that_is_read_at_once(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(model) as gate:
        async with talking(model) as runtime:
            worker = runtime._life.worker
            abort = worker.abort

            def let_go(call_id: int) -> Any:
                gate.open()
                return abort(call_id)

            def ready() -> bool:
                gate.close()
                return True

            monkeypatch.setattr(worker, "abort", let_go)
            taken = Taken(ready)
            async with runtime.stream(PROMPT, max_tokens=200, ignore_eos=True, timeout=0.2) as stream:
                with pytest.raises(TimeoutError, match=r"no complete answer within 0\.2 s"):
                    await taken.all_of(stream)
            idle_and_sound(runtime)
            assert len(taken.events) < 200


async def test_a_stream_that_is_cancelled_and_kept_tells_its_end_behind_what_was_read_at_once(
    model: PreTrainedModel,
) -> None:
    async with talking(model) as runtime:
        taken = Taken()
        async with runtime.stream(PROMPT, max_tokens=200, ignore_eos=True) as stream:
            reading = asyncio.create_task(taken.all_of(stream))
            while taken.at_once < 3:
                await asyncio.sleep(0)
            await stream.cancel(keep=True)
            await reading
            reply = await stream.reply()
        assert text_and_ids(taken.events, 0) == (reply.text, reply.token_ids)
        assert taken.events[-1] == TurnEnd(reply)
        assert reply.finish_reason == "cancelled"


async def test_a_reader_that_holds_its_stream_lets_it_go_when_it_is_told_so(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=3)
        taken = Taken()
        taken.events.append(stream)
        gone = weakref.ref(stream)
        async with stream:
            await taken.all_of(stream)
        stream.read_at_once(None)
        gc.disable()
        try:
            del stream, taken
            assert gone() is None
        finally:
            gc.enable()
