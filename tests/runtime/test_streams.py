"""A call as it runs: its events, leaving it early, cancelling it, and who may wait in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import threading
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedModel

from agentkv import ConfigError, QueueFull, Rate, Reply, Runtime, RuntimeClosed, Stream, TextDelta, TurnEnd
from agentkv.calls import Call
from agentkv.detokenizer import Delta, Detokenizer
from agentkv.runtime.admission import Gate as Queue
from agentkv.runtime.admission import RateLimits
from agentkv.sampling_params import SamplingParams
from support.engines import cold, random_prompt
from support.runtimes import Gate, gated, idle_and_sound, serving
from support.tiny_chat import text_of, tiny_chat_tokenizer
from support.tiny_models import tiny_model

PROMPT = list(random_prompt(1, 11))
EXPECTED = cold("llama").answer(PROMPT, 24)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture
def gate(model: PreTrainedModel) -> Iterator[Gate]:
    with gated(model) as gate:
        yield gate


def talking(model: PreTrainedModel, **options: Any) -> contextlib.AbstractAsyncContextManager[Runtime]:
    return serving(model, tokenizer=tiny_chat_tokenizer(), **options)


async def first_tokens(stream: Stream, count: int) -> list[int]:
    """Read until at least so many tokens have come."""
    token_ids: list[int] = []
    async for event in stream:
        assert isinstance(event, TextDelta)
        token_ids += event.token_ids
        if len(token_ids) >= count:
            return token_ids
    raise AssertionError("the stream ended early")


async def test_events_joined_are_the_reply_and_the_end_comes_last(model: PreTrainedModel) -> None:
    async with talking(model) as runtime, runtime.stream(PROMPT, max_tokens=24) as stream:
        events = [event async for event in stream]
        reply = await stream.reply()
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert events[-1] == TurnEnd(reply)
    assert len(deltas) == len(events) - 1
    assert "".join(delta.text for delta in deltas) == reply.text == text_of(EXPECTED)
    assert tuple(token_id for delta in deltas for token_id in delta.token_ids) == reply.token_ids == EXPECTED


async def test_the_text_of_several_choices_comes_each_with_its_index(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        async with runtime.stream(PROMPT, n=3, temperature=1.0, max_tokens=9) as stream:
            events = [event async for event in stream]
            replies = await stream.replies()
        for index, reply in enumerate(replies):
            own = [event for event in events if event.index == index]
            assert own[-1] == TurnEnd(reply, index)
            assert "".join(event.text for event in own if isinstance(event, TextDelta)) == reply.text
        assert len({reply.token_ids for reply in replies}) > 1


async def test_text_yields_strings_and_a_reply_may_be_awaited_without_reading(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        async with runtime.stream(PROMPT, max_tokens=24) as stream:
            pieces = [text async for text in stream.text()]
        assert "".join(pieces) == text_of(EXPECTED)
        unread = runtime.stream(PROMPT, max_tokens=24)
        reply = await unread.reply()
        assert [event async for event in unread] == [TextDelta(reply.text, reply.token_ids), TurnEnd(reply)]


async def test_what_is_not_read_is_merged_and_holds_the_engine_up_for_nobody(
    model: PreTrainedModel, gate: Gate
) -> None:
    async with talking(model) as runtime:
        async with runtime.stream(PROMPT, max_tokens=24) as stream:
            other = await runtime.generate(random_prompt(2, 5), max_tokens=30)
            assert isinstance(other, Reply)
            events = [event async for event in stream]
        assert len(events) == 2


async def test_the_engine_makes_text_for_stop_strings_alone_and_a_stream_that_nobody_reads_has_none_made(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_on: list[str] = []
    append = Detokenizer.append

    def noting(detokenizer: Detokenizer, token_ids: Iterable[int]) -> Delta:
        delta = append(detokenizer, token_ids)
        if delta.text:
            made_on.append(threading.current_thread().name)
        return delta

    monkeypatch.setattr(Detokenizer, "append", noting)
    here = threading.current_thread().name
    async with talking(model) as runtime:
        async with runtime.stream(PROMPT, max_tokens=24) as unread:
            other = await runtime.generate(random_prompt(2, 5), max_tokens=30)
            assert isinstance(other, Reply)
            assert set(made_on) == {here}
            assert len(made_on) <= 30
            assert (await unread.reply()).text == text_of(EXPECTED)
        made_on.clear()
        stopped = await runtime.generate(PROMPT, max_tokens=24, stop=["no such text"])
        assert isinstance(stopped, Reply)
        assert stopped.text == text_of(EXPECTED)
        assert set(made_on) == {"agentkv-engine"}


async def test_streams_of_one_loop_are_woken_together(model: PreTrainedModel, gate: Gate) -> None:
    woken = 0
    async with talking(model) as runtime:
        streams = [runtime.stream(random_prompt(seed, 5), max_tokens=20) for seed in range(6)]
        gate.close()
        replies = [asyncio.create_task(stream.reply()) for stream in streams]
        await asyncio.to_thread(gate.arrived.wait, 60)
        loop = asyncio.get_running_loop()
        soon = loop.call_soon_threadsafe

        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal woken
            woken += threading.current_thread().name == "agentkv-engine"
            return soon(*arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_soon_threadsafe", counting)
            before = gate.forwards
            gate.open()
            await asyncio.gather(*replies)
            forwards = gate.forwards - before + 1
        assert woken <= 2 * forwards + len(streams)


async def test_a_tokenizer_that_raises_while_text_is_read_ends_its_own_call(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Detokenizer.append

    def failing(detokenizer: Detokenizer, token_ids: Iterable[int]) -> Delta:
        given = list(token_ids)
        if threading.current_thread().name != "agentkv-engine":
            reader = asyncio.current_task()
            if reader is not None and reader.get_name() == "bad" and detokenizer.text:
                raise ArithmeticError("detokenising")
        return append(detokenizer, given)

    monkeypatch.setattr(Detokenizer, "append", failing)
    async with talking(model) as runtime:
        good = asyncio.create_task(runtime.generate(PROMPT, max_tokens=24))
        bad = asyncio.create_task(runtime.stream(random_prompt(3, 7), max_tokens=100).reply(), name="bad")
        with pytest.raises(ArithmeticError, match="detokenising"):
            await bad
        reply = await good
        assert isinstance(reply, Reply)
        assert (reply.text, reply.token_ids) == (text_of(EXPECTED), EXPECTED)
        idle_and_sound(runtime)
        figures = runtime.report().to_dict()
        assert (figures["calls"], figures["replies"], figures["failures"]) == (2, 1, 1)


async def test_a_tokenizer_that_raises_at_the_end_of_an_answer_is_counted_though_the_engine_is_done(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Detokenizer.finish

    def failing(detokenizer: Detokenizer) -> str:
        if threading.current_thread().name != "agentkv-engine":
            raise ArithmeticError("the last of the text")
        return finish(detokenizer)

    monkeypatch.setattr(Detokenizer, "finish", failing)
    async with talking(model) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=3)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="the last of the text"):
                await stream.reply()
        async with runtime.stream(PROMPT, max_tokens=100) as left:
            await first_tokens(left, 1)
        figures = runtime.report().to_dict()
        assert (figures["calls"], figures["replies"], figures["failures"]) == (2, 1, 1)
        idle_and_sound(runtime)


async def test_deltas_over_a_preemption_join_to_the_final_text(model: PreTrainedModel) -> None:
    async with talking(model, num_pages=15, context_limit=64) as runtime:
        prompts = [list(random_prompt(10 + number, 9 + number)) for number in range(4)]

        async def streamed(prompt: list[int]) -> None:
            async with runtime.stream(prompt, max_tokens=24) as stream:
                text = "".join([text async for text in stream.text()])
            reply = await stream.reply()
            assert reply.text == text == text_of(cold("llama").answer(prompt, 24))

        await asyncio.gather(*map(streamed, prompts))
        assert runtime.report().to_dict()["preemptions"] > 0


# -- leaving ------------------------------------------------------------------------------------------------


async def test_leaving_the_block_early_ends_the_call_before_the_block_is_left_without_the_garbage_collector(
    model: PreTrainedModel,
) -> None:
    gc.disable()
    try:
        async with talking(model) as runtime:
            async with runtime.stream(PROMPT, max_tokens=100) as stream:
                await first_tokens(stream, 2)
            idle_and_sound(runtime)
            with pytest.raises(RuntimeError, match="left before its end; it has no reply"):
                await stream.reply()
            with contextlib.suppress(ZeroDivisionError):
                async with runtime.stream(PROMPT, max_tokens=100) as raising:
                    await first_tokens(raising, 1)
                    raise ZeroDivisionError
            idle_and_sound(runtime)
    finally:
        gc.enable()


async def test_a_stream_that_nobody_holds_any_more_is_ended(model: PreTrainedModel, gate: Gate) -> None:
    async with talking(model) as runtime:
        stream: Stream | None = runtime.stream(PROMPT, max_tokens=100)
        assert stream is not None
        await first_tokens(stream, 1)
        stream = None
        idle_and_sound(runtime)
        assert gate.forwards < 100


async def test_a_cancelled_task_ends_its_call_wherever_it_stood(model: PreTrainedModel, gate: Gate) -> None:
    async with talking(model, max_num_seqs=1, max_num_batched_tokens=4) as runtime:
        for passed in range(6):
            gate.close()
            runs = asyncio.create_task(runtime.generate(PROMPT, max_tokens=50))
            waits = asyncio.create_task(runtime.generate(PROMPT, max_tokens=50))
            for _ in range(passed):
                await asyncio.to_thread(gate.arrived.wait, 60)
                gate.arrived.clear()
                gate.open()
                await asyncio.to_thread(gate.arrived.wait, 60)
                gate.close()
            for task in (waits, runs):
                task.cancel()
            gate.open()
            for task in (waits, runs):
                with pytest.raises(asyncio.CancelledError):
                    await task
            idle_and_sound(runtime)
        reply = await runtime.generate(PROMPT, max_tokens=24)
        assert isinstance(reply, Reply)
        assert reply.token_ids == EXPECTED


async def test_a_timeout_covers_the_whole_call_and_says_so(model: PreTrainedModel, gate: Gate) -> None:
    async with talking(model, max_num_seqs=1, max_queue=1) as runtime:
        gate.close()
        runs = asyncio.create_task(runtime.generate(PROMPT, max_tokens=100, timeout=0.05))
        queued = asyncio.create_task(runtime.generate(PROMPT, timeout=0.05))
        for task in (runs, queued):
            await asyncio.wait([queued])
            gate.open()
            with pytest.raises(TimeoutError, match=r"no complete answer within 0\.05 s"):
                await task
        idle_and_sound(runtime)
        reply = await runtime.generate(PROMPT, max_tokens=24, timeout=600)
        assert isinstance(reply, Reply)
        assert reply.token_ids == EXPECTED


@pytest.mark.parametrize("keep", [True, False])
async def test_a_cancelled_stream_has_a_reply_and_with_keep_all_of_it_is_cached(
    model: PreTrainedModel, keep: bool
) -> None:
    async with talking(model) as runtime:
        async with runtime.stream(PROMPT, max_tokens=100) as stream:
            await first_tokens(stream, 3)
            await stream.cancel(keep=keep)
            idle_and_sound(runtime)
            reply = await stream.reply()
            rest = [event async for event in stream]
        assert reply.finish_reason == "cancelled"
        assert reply.token_ids == cold("llama").answer(PROMPT, 100)[: len(reply.token_ids)]
        assert reply.text == text_of(reply.token_ids)
        assert rest[-1] == TurnEnd(reply)
        ran = len(PROMPT) + len(reply.token_ids) - 1
        following = await runtime.generate([*PROMPT, *reply.token_ids, 5], max_tokens=1)
        assert isinstance(following, Reply)
        assert following.usage.cached_tokens == (ran if keep else ran // 4 * 4)
        await stream.cancel()


async def test_a_stream_cancelled_before_it_began_or_after_it_ended(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        stream = runtime.stream(PROMPT)
        await stream.cancel()
        with pytest.raises(RuntimeError, match="cancelled before it began"):
            await stream.reply()
        ended = runtime.stream(PROMPT, max_tokens=2)
        reply = await ended.reply()
        await ended.cancel(keep=True)
        assert await ended.reply() is reply
        assert reply.finish_reason == "length"


async def test_a_call_that_ends_while_it_is_cancelled_keeps_its_natural_end(model: PreTrainedModel) -> None:
    async with talking(model) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=3)
        await first_tokens(stream, 1)
        runtime.check()
        while runtime.report().to_dict()["running"]:
            runtime.check()
        await stream.cancel()
        assert (await stream.reply()).finish_reason == "length"


async def test_an_error_of_the_call_is_raised_by_each_way_of_reading_it(model: PreTrainedModel, gate: Gate) -> None:
    async with talking(model) as runtime:
        stream = runtime.stream(PROMPT, max_tokens=50)
        await first_tokens(stream, 1)
        gate.error = ArithmeticError("in the forward")
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="in the forward"):
                await stream.reply()
        with pytest.raises(ArithmeticError, match="in the forward"):
            async for _ in stream:
                pass
        gate.error = None
        assert runtime.report().to_dict()["failures"] == 1


async def test_a_receiver_that_raises_loses_its_call_and_nobody_else_anything(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        delivered = 0

        def deliver(self, updates: Any) -> None:
            self.delivered += 1
            raise ArithmeticError("the receiver")

        def admitted(self) -> None:
            return

    async with talking(model) as runtime:
        sink = Broken()
        worker = runtime._life.worker
        with caplog.at_level(logging.ERROR, logger="agentkv"):
            worker.submit(Call(4711, tuple(PROMPT), SamplingParams(max_tokens=50), seed=0), sink)
            reply = await runtime.generate(PROMPT, max_tokens=24)
        assert isinstance(reply, Reply)
        assert reply.token_ids == EXPECTED
        assert sink.delivered == 1
        assert "the receiver of call 4711 raised" in caplog.text


# -- the queue ----------------------------------------------------------------------------------------------


async def test_a_full_queue_raises_with_the_numbers_or_lets_callers_wait_their_turn(
    model: PreTrainedModel, gate: Gate
) -> None:
    async with talking(model, max_num_seqs=1, max_queue=2, on_full="raise") as runtime:
        gate.close()
        inside = [asyncio.create_task(runtime.generate(PROMPT, max_tokens=2)) for _ in range(2)]
        await asyncio.to_thread(gate.arrived.wait, 60)
        with pytest.raises(QueueFull, match=r'2 calls are waiting and max_queue is 2.*on_full="wait"') as full:
            await runtime.generate(PROMPT)
        assert (full.value.waiting, full.value.limit) == (2, 2)
        gate.open()
        await asyncio.gather(*inside)
        await runtime.generate(PROMPT, max_tokens=1)
    async with talking(model, max_num_seqs=1, max_queue=1, on_full="wait") as runtime:
        order: list[int] = []

        async def call(number: int) -> None:
            await runtime.generate([number, *PROMPT], max_tokens=2)
            order.append(number)

        tasks = [asyncio.create_task(call(number)) for number in range(8)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.wait(tasks)
        assert order == [0, 1, 2, 4, 5, 6, 7]


async def test_a_place_given_in_the_moment_of_a_cancellation_is_passed_on() -> None:
    queue = Queue(1)
    queue.enter_or_raise()
    for cancelled_first in (False, True):
        waiter = asyncio.create_task(queue.enter())
        await asyncio.sleep(0)
        for act in (waiter.cancel, queue.leave) if cancelled_first else (queue.leave, waiter.cancel):
            act()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        queue.enter_or_raise()


async def test_a_hundred_callers_that_leave_a_short_queue_at_random_take_no_place_with_them(
    model: PreTrainedModel,
) -> None:
    choose = random.Random(3)
    async with talking(model, max_num_seqs=2, max_queue=2) as runtime:
        tasks = [
            asyncio.create_task(runtime.generate(list(random_prompt(number % 7, 6)), max_tokens=3))
            for number in range(100)
        ]
        while any(not task.done() for task in tasks):
            choose.choice(tasks).cancel()
            await asyncio.sleep(0)
            if choose.random() < 0.2:
                await asyncio.wait([task for task in tasks if not task.done()] or tasks, return_when="FIRST_COMPLETED")
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):
            assert isinstance(await runtime.generate(PROMPT, max_tokens=1), Reply)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds slept by whoever waits for a rate, on a clock that nothing else moves."""
    slept: list[float] = []

    async def no_sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = SimpleNamespace(monotonic=lambda: sum(slept), time=lambda: sum(slept))
    for module in ("agentkv.runtime.admission", "asyncio_throttle.throttler"):
        monkeypatch.setattr(f"{module}.time", clock)
        monkeypatch.setattr(f"{module}.asyncio", SimpleNamespace(sleep=no_sleep, CancelledError=asyncio.CancelledError))
    return slept


def still_open() -> None:
    return


async def test_a_rate_is_kept_for_each_name_or_each_tenant(waits: list[float]) -> None:
    limits = RateLimits(Rate(2, 10.0))
    for name in ("a", "a", "b", "b", None):
        await limits.wait(name=name, cache_salt=None, still_open=still_open)
    assert waits == []
    await limits.wait(name="a", cache_salt="other tenant", still_open=still_open)
    assert sum(waits) == pytest.approx(10.0, abs=0.1)
    by_tenant = RateLimits(Rate(1, 10.0, by="cache_salt"))
    before = list(waits)
    for salt in ("x", "y"):
        await by_tenant.wait(name="a", cache_salt=salt, still_open=still_open)
    assert waits == before
    await by_tenant.wait(name="b", cache_salt="x", still_open=still_open)
    assert sum(waits) == pytest.approx(20.0, abs=0.1)


async def test_a_call_that_leaves_while_it_waits_for_its_rate_takes_no_turn_with_it(waits: list[float]) -> None:
    limits = RateLimits(Rate(1, 10.0))
    await limits.wait(name="a", cache_salt=None, still_open=still_open)

    def closed() -> None:
        raise RuntimeClosed("closed while it waited")

    for _ in range(5):
        with pytest.raises(RuntimeClosed):
            await limits.wait(name="a", cache_salt=None, still_open=closed)
    assert waits == []
    await limits.wait(name="a", cache_salt=None, still_open=still_open)
    assert sum(waits) == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "requests must be an int"), ((1, 0), "seconds must be"), ((1, 1, "user"), 'by must be "name"')],
    ids=str,
)
def test_a_wrong_rate_is_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rate(*arguments)


async def test_calls_over_the_rate_are_served_later_and_not_lost(model: PreTrainedModel) -> None:
    async with talking(model, rate_limit=Rate(3, 0.05)) as runtime:
        replies = await asyncio.gather(*(runtime.generate(PROMPT, max_tokens=1, name="a") for _ in range(7)))
        assert all(isinstance(reply, Reply) for reply in replies)


async def test_two_hundred_callers_that_leave_at_random_moments_leave_nothing_behind(model: PreTrainedModel) -> None:
    choose = random.Random(11)
    asked = [(list(random_prompt(i % 5, 1 + i % 14)), 1 + i % 9) for i in range(200)]
    async with talking(model, max_num_seqs=4, max_num_batched_tokens=8) as runtime:

        async def call(number: int) -> Any:
            prompt, length = asked[number]
            if number % 2:
                return await runtime.generate(prompt, max_tokens=length)
            async with runtime.stream(prompt, max_tokens=length) as stream:
                async for _ in stream:
                    pass
                return await stream.reply()

        tasks = [asyncio.create_task(call(number)) for number in range(200)]
        while pending := [task for task in tasks if not task.done()]:
            if choose.random() < 0.3:
                choose.choice(pending).cancel()
            await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        idle_and_sound(runtime)
        assert {type(each) for each in ended} == {Reply, asyncio.CancelledError}
        for (prompt, length), reply in zip(asked, ended, strict=True):
            if isinstance(reply, Reply):
                assert reply.token_ids == cold("llama").answer(prompt, length)
        assert isinstance(await runtime.generate(PROMPT, max_tokens=1), Reply)
