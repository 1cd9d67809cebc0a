"""A session under failure: what raises, is cancelled, times out or is left leaves it as it was, and nothing running."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentkv import (
    ContextOverflow,
    GrammarDeadEnd,
    PendingToolCalls,
    PoolFull,
    RequestError,
    Runtime,
    Session,
    SessionBusy,
    SessionClosed,
    Tool,
    ToolResult,
)
from agentkv.testing import Answer, fail_allocation, scripted
from support.families import Gated, in_words, served, turned
from support.runtimes import Gate, idle_and_sound

State = tuple[Any, ...]


def state(session: Session) -> State:
    """All that a failed call must leave as it was."""
    return session.messages, session.token_ids, session.usage, session.context_left, session.busy


def unscripted(asked: Any) -> None:
    """The model's own random words, which a wrong key or value anywhere would change."""


@asynccontextmanager
async def gated(replies: Any = unscripted, **options: Any) -> AsyncIterator[tuple[Runtime, Gate]]:
    model = Gated(scripted(replies))
    async with served(model, **options) as runtime:
        try:
            yield runtime, model.gate
        finally:
            model.gate.open()


async def until(condition: Callable[[], object]) -> None:
    """Wait for another thread."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0)


async def cold(runtime: Runtime, session: Session, num_tokens: int) -> tuple[int, ...]:
    """What the model answers to the session's prompt with nothing cached."""
    # The opening of the answer is what count_tokens adds to the ids.
    reply = await runtime.generate(session.messages, cache=False, max_tokens=num_tokens, ignore_eos=True)
    return reply.token_ids


# -- cancelled, timed out -----------------------------------------------------------------------------------------


async def by_cancelling(session: Session, reached: Callable[[], Any], gate: Gate, **options: Any) -> None:
    task = asyncio.create_task(session.ask("Now?", **options))
    await reached()
    task.cancel()
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_asyncio_timeout(session: Session, reached: Callable[[], Any], gate: Gate, **options: Any) -> None:
    deadlines: list[asyncio.Timeout] = []

    async def ask() -> None:
        async with asyncio.timeout(None) as deadline:
            deadlines.append(deadline)
            await session.ask("Now?", **options)

    task = asyncio.create_task(ask())
    await reached()
    loop = asyncio.get_running_loop()
    deadlines[0].reschedule(loop.time())
    loop.call_later(0.02, gate.open)
    with pytest.raises(TimeoutError):
        await task


async def by_its_own_timeout(session: Session, reached: Callable[[], Any], gate: Gate, **options: Any) -> None:
    task = asyncio.create_task(session.ask("Now?", timeout=1.0, **options))
    await reached()
    asyncio.get_running_loop().call_later(1.1, gate.open)
    with pytest.raises(TimeoutError, match=r"no complete answer within 1\.0 s"):
        await task


@pytest.mark.parametrize("leave", [by_cancelling, by_asyncio_timeout, by_its_own_timeout])
@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
async def test_an_ask_that_is_left_changes_nothing_and_the_same_ask_again_gives_the_cold_answer(
    stage: str, leave: Callable[..., Any]
) -> None:
    async with gated(max_num_seqs=1, max_num_batched_tokens=48) as (runtime, gate):
        session = runtime.session("Be brief. " * 40, ignore_eos=True, max_tokens=12)
        await session.ask("Before?")
        mark, before = session.mark(), state(session)
        other: asyncio.Task[Any] | None = None

        async def reached() -> None:
            nonlocal other
            if stage == "queued":
                await until(lambda: session.busy and other is not None and gate.arrived.is_set())
                for _ in range(200):
                    await asyncio.sleep(0)
            elif stage == "prefill":
                await until(gate.arrived.is_set)
            else:
                start = gate.forwards
                gate.open()
                await until(lambda: gate.forwards > start + 4)
                gate.close()
                await until(gate.arrived.is_set)

        gate.close()
        if stage == "queued":
            other = asyncio.create_task(runtime.generate("Another prompt", max_tokens=3, ignore_eos=True))
            await until(gate.arrived.is_set)
        many = {"max_tokens": 4000} if stage == "decode" else {}
        await leave(session, reached, gate, **many)
        if other is not None:
            await other
        idle_and_sound(runtime)
        assert state(session) == before
        session.rollback(mark)
        assert state(session) == before
        kept = session.token_ids
        reply = await session.ask("Now?")
        assert reply.usage.cached_tokens >= len(kept) - 1
        session.rollback(mark)
        session.append("Now?")
        assert await cold(runtime, session, 12) == reply.token_ids


async def test_two_asks_at_once_of_one_session_are_one_answer_and_one_refusal_a_hundred_times() -> None:
    async with served(scripted(lambda asked: f"{len(asked)}."), strict=False) as runtime:
        session = runtime.session("Be brief.", name="planner")
        for number in range(100):
            one, other = await asyncio.gather(session.ask("a"), session.ask("b"), return_exceptions=True)
            errors = [each for each in (one, other) if isinstance(each, SessionBusy)]
            assert len(errors) == 1
            assert "session 'planner' is answering another call" in str(errors[0])
            assert len(session.messages) == 3 + 2 * number
        assert [message["role"] for message in session.messages[1:]] == ["user", "assistant"] * 100


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("kind", ["generate", "ask", "run"])
async def test_leaving_a_streams_block_early_ends_the_request_before_the_block_is_left(kind: str) -> None:
    async with gated() as (runtime, _):
        session = runtime.session("Be brief.", ignore_eos=True, max_tokens=4000)
        session.append("Hello?")
        before = state(session)
        streams = {
            "generate": lambda: runtime.stream("Hello?", max_tokens=4000, ignore_eos=True),
            "ask": session.stream,
            "run": session.run_stream,
        }
        async with streams[kind]() as stream:
            async for _ in stream:
                break
        idle_and_sound(runtime)
        assert state(session) == before


async def test_two_hundred_callers_that_leave_at_random_moments_leave_nothing_behind() -> None:
    """Over sessions and their forks, in a pool for a few: at once, after some turns of the loop, after some events."""
    rng = random.Random(27)
    async with served(
        scripted(unscripted), num_pages=96, max_num_seqs=8, max_queue=32, strict=False, context_limit=1024
    ) as runtime:
        root = runtime.session("Be brief. " * 10, ignore_eos=True, max_tokens=40, name="root")
        await root.ask("Begin.")
        sessions = [root, *root.fork(19)]
        states = {session: state(session) for session in sessions}

        async def streaming(session: Session, events: int) -> None:
            async with session.stream("More?") as stream:
                for _ in range(events):
                    await anext(stream, None)

        async def one(number: int) -> None:
            session = sessions[number % 20] if number < 20 else sessions[number % 20].fork()
            states.setdefault(session, state(session))
            way = number % 3
            if way == 0:
                await streaming(session, rng.randrange(6))
                return
            task = asyncio.create_task(session.ask("More?"))
            for _ in range(rng.choice((0, 1, 2, 5, 20, 80, 300) if way == 2 else (100, 1000, 3000))):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        await asyncio.gather(*(one(number) for number in range(200)))
        idle_and_sound(runtime)
        for session, before in states.items():
            assert not session.busy
            unchanged = state(session) == before
            assert unchanged or len(session.messages) == len(before[0]) + 2
        assert len((await root.fork().ask("End.")).token_ids) == 40


async def test_two_hundred_forgotten_sessions_hold_no_page_of_a_pool_for_five() -> None:
    async with served(scripted(unscripted), num_pages=1 + 5 * 12, context_limit=192) as runtime:
        kept = []
        for number in range(200):
            session = runtime.session(f"{number} " * 20, ignore_eos=True, max_tokens=4)
            kept.append(session)
            await session.ask("Hello?")
        assert runtime.report().to_dict()["pages"]["in_use"] == 0
        again = await kept[0].ask("Still there?")
        assert len(again.token_ids) == 4


# -- faults -------------------------------------------------------------------------------------------------------


class InjectedFault(Exception):
    """What the tests put in."""


async def check_that_it_goes_on(session: Session, before: State) -> None:
    assert state(session) == before
    assert (await session.ask("Now?")).text == "Here."
    assert len(session.messages) == len(before[0]) + 2


@pytest.mark.parametrize("error", [InjectedFault("sampling"), GrammarDeadEnd("nothing may follow")])
async def test_a_fault_while_sampling_or_a_grammars_dead_end_ends_that_call_alone(error: Exception) -> None:
    def reply(asked: Any) -> Any:
        return error if asked[-1]["content"] == "Bad." else "Here."

    async with served(scripted(reply)) as runtime:
        session, other = runtime.session("Be brief."), runtime.session("Be long.")
        before = state(session)
        failed, answered = await asyncio.gather(session.ask("Bad."), other.ask("Good."), return_exceptions=True)
        assert failed is error
        assert not isinstance(answered, BaseException)
        idle_and_sound(runtime)
        await check_that_it_goes_on(session, before)


async def test_a_fault_of_the_model_ends_the_call_and_the_session_goes_on() -> None:
    async with gated(lambda asked: "Here.") as (runtime, gate):
        session = runtime.session("Be brief.")
        before = state(session)
        gate.error = InjectedFault("forward")
        with pytest.raises(InjectedFault, match="forward"):
            await session.ask("Now?")
        gate.error = None
        await check_that_it_goes_on(session, before)


async def test_a_full_pool_refuses_the_call_and_the_session_goes_on() -> None:
    async with served(scripted(lambda asked: "Here.")) as runtime:
        session = runtime.session("Be brief.")
        before = state(session)
        with fail_allocation(runtime) as pool:
            with pytest.raises(PoolFull, match="pages needed"):
                await session.ask("Now?")
            assert pool.failed
        await check_that_it_goes_on(session, before)


async def test_a_template_that_refuses_the_conversation_says_so_and_the_session_goes_on() -> None:
    template = (
        "{% for message in messages %}{% if message.content == 'Bad.' %}{{ raise_exception('I refuse Bad.') }}"
        "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    async with served(scripted(lambda asked: "Here.", template=template)) as runtime:
        session = runtime.session("Be brief.")
        before = state(session)
        with pytest.raises(RequestError, match="I refuse Bad"):
            await session.ask("Bad.")
        await check_that_it_goes_on(session, before)


async def test_a_tokenizer_that_raises_ends_the_call_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(scripted(lambda asked: "Here.")) as runtime:
        session = runtime.session("Be brief.")
        before = state(session)
        with monkeypatch.context() as patch:

            def broken(text: str) -> list[int]:
                raise InjectedFault("tokenizing")

            patch.setattr(session._host.served_now().scribe, "_encode", broken)
            with pytest.raises(InjectedFault, match="tokenizing"):
                await session.ask("Now?")
        await check_that_it_goes_on(session, before)


async def test_a_run_that_fails_stands_as_after_its_last_finished_turn() -> None:
    def look(path: str) -> str:
        """Look.

        Args:
            path: where
        """
        return f"seen {path}"

    async with served(scripted([in_words("look", path="a"), InjectedFault("second turn"), "Here."])) as runtime:
        session = runtime.session("Be brief.", tools=[look])
        with pytest.raises(InjectedFault):
            await session.run("Look.")
        assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "tool"]
        assert not session.busy
        run = await session.run()
        assert (run.reply.text, run.turns) == ("Here.", 1)


async def test_a_run_cancelled_while_its_tools_run_stands_as_before_that_turn() -> None:
    started = asyncio.Event()

    async def wait(path: str) -> str:
        """Wait.

        Args:
            path: where
        """
        started.set()
        await asyncio.Event().wait()
        return "never"

    async with served(scripted([in_words("wait", path="a"), "Here."])) as runtime:
        session = runtime.session("Be brief.", tools=[wait])
        before = session.messages, session.token_ids
        task = asyncio.create_task(session.run("Look."))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (session.messages, session.token_ids) == before
        assert (await session.ask("Now?")).text == "Here."


async def test_calls_without_results_must_be_answered_first_and_a_closed_session_answers_nothing() -> None:
    human = Tool("human", "Asks a human.", {"type": "object", "properties": {}})
    async with served(scripted([in_words("human"), "Here."])) as runtime:
        session = runtime.session(tools=[human], name="asker")
        reply = await session.ask("Ask.")
        before = state(session)
        with pytest.raises(PendingToolCalls, match="session 'asker' waits for the results of human"):
            await session.ask("And?")
        assert state(session) == before
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "yes"}
        assert (await session.ask([result, {"role": "user", "content": "And?"}])).text == "Here."
        await session.close()
        with pytest.raises(SessionClosed):
            await session.ask("More?")


# -- limits -------------------------------------------------------------------------------------------------------


async def test_prompt_and_max_tokens_may_fill_the_context_and_not_one_token_more() -> None:
    async with served(scripted(unscripted), context_limit=256) as runtime:
        session = runtime.session("Be brief.", ignore_eos=True, name="grows")
        before, prompt = state(session), session.count_tokens("Hello?")
        with pytest.raises(ContextOverflow) as raised:
            await session.ask("Hello?", max_tokens=256 - prompt + 1)
        error = raised.value
        assert (error.prompt_tokens, error.max_tokens, error.limit) == (prompt, 256 - prompt + 1, 256)
        assert "rollback" not in str(error)  # No mark can lie before the first message.
        assert state(session) == before
        for less in (1, 0):
            fork = session.fork()
            reply = await fork.ask("Hello?", max_tokens=256 - prompt - less)
            assert len(reply.token_ids) == 256 - prompt - less


async def test_a_session_that_grows_to_the_limit_knows_what_is_left_at_each_turn_and_stays_when_it_is_full() -> None:
    async with served(scripted(unscripted), context_limit=256) as runtime:
        session = runtime.session("Be brief.", ignore_eos=True, max_tokens=20)
        lefts = [session.context_left]
        while True:
            before, prompt = state(session), session.count_tokens("More?")
            assert session.context_left == 256 - len(session.token_ids)
            if prompt + 20 > 256:
                with pytest.raises(ContextOverflow, match=r"rollback\(\) to an earlier mark"):
                    await session.ask("More?")
                assert state(session) == before
                break
            last = session.fork()
            reply = await session.ask("More?")
            assert reply.usage.prompt_tokens == prompt
            lefts.append(session.context_left)
        assert lefts == sorted(lefts, reverse=True)
        assert len(lefts) > 4
        # Unless told how long, an answer takes what is left.
        prompt = last.count_tokens("More?")
        reply = await last.ask("More?", max_tokens=None)
        assert len(reply.token_ids) == 256 - prompt
        assert last.context_left == 0


# -- pressure -----------------------------------------------------------------------------------------------------


async def test_streams_read_the_whole_answer_across_preemptions() -> None:
    """Eight answers in a pool for three: those that came last are put back and go on later."""
    said = {f"Say {number}.": f"Answer {number}: " + "for you and not for me, " * 6 for number in range(8)}
    async with served(scripted(lambda asked: said[asked[-1]["content"]]), num_pages=28, context_limit=384) as runtime:

        async def read(asked: str) -> tuple[str, Any]:
            session = runtime.session("Be brief.")
            async with session.stream(asked, max_tokens=200) as stream:
                text = "".join([piece async for piece in stream.text()])
                reply = await stream.reply()
            assert session.messages[-1]["content"] == reply.text
            return text, reply

        for (text, reply), expected in zip(await asyncio.gather(*map(read, said)), said.values(), strict=True):
            assert text == reply.text == expected
            assert reply.finish_reason == "stop"
        assert runtime.report().to_dict()["preemptions"] > 2


async def test_log_probabilities_are_there_for_every_token_of_every_turn() -> None:
    async with served(scripted(unscripted)) as runtime:
        session = runtime.session("Be brief.", ignore_eos=True, max_tokens=9, logprobs=2)
        for _ in range(3):
            reply = await session.ask("More?")
            assert reply.logprobs is not None
            assert [each.token_id for each in reply.logprobs] == list(reply.token_ids)
            assert all(each.logprob <= 0 for each in reply.logprobs)
            assert all(len(each.top) == 2 for each in reply.logprobs)
            assert turned(reply) == session.token_ids[-9:-1]


# -- tools that misbehave -----------------------------------------------------------------------------------------


async def test_a_run_goes_on_past_tools_that_raise_hang_block_or_return_odd_things_and_the_loop_stays_free() -> None:
    release = threading.Event()

    def raises() -> str:
        """Raises."""
        raise ValueError("no")

    def hangs() -> str:
        """Hangs."""
        release.wait(60)
        return "late"

    def floods() -> str:
        """Returns a megabyte."""
        return "x" * 1_000_000

    def odd() -> object:
        """Returns no string."""
        return {"at": (1, 2), "none": None}

    def blocks() -> str:
        """Blocks for a second."""
        threading.Event().wait(1.0)
        return "done"

    no_arguments = {"type": "object", "properties": {}}
    tools = [raises, floods, odd, blocks, Tool("hangs", "Hangs.", no_arguments, hangs, timeout=0.3)]
    names = ["raises", "hangs", "floods", "odd", "blocks"]
    longest_pause = longest_work = 0.0

    async def watch() -> None:
        nonlocal longest_pause, longest_work
        while True:
            wall, cpu = time.monotonic(), time.thread_time()
            await asyncio.sleep(0)
            longest_pause = max(longest_pause, time.monotonic() - wall)
            longest_work = max(longest_work, time.thread_time() - cpu)

    model = scripted([Answer(calls=[(name, {}) for name in names]), "Done."], context_limit=40_000)
    async with served(model, strict=False, num_pages=4096, context_limit=40_000) as runtime:
        session = runtime.session("Be brief.", tools=tools)
        # What the tests before this one left behind is not for the collector to walk while pauses are measured.
        gc.collect()
        gc.freeze()
        watching = asyncio.create_task(watch())
        try:
            async with session.run_stream("Use them all.") as stream:
                events = [event async for event in stream]
                run = await stream.run()
        finally:
            watching.cancel()
            gc.unfreeze()
        release.set()
        assert run.reply.text == "Done."
        raised, hung, flood, odd_one, blocked = run.tool_results
        assert raised.error == "raises raised ValueError: no"
        assert hung.error == "hangs took longer than its 0.3 s and was given up"
        assert 19_900 < len(flood.content) <= 20_000
        assert odd_one.content == '{"at":[1,2],"none":null}'
        assert blocked.content == "done"
        assert {event.call.name for event in events if isinstance(event, ToolResult)} == set(names)
        # Work on the loop's own thread, and then its pauses, in which a busy machine counts too.
        assert longest_work < 0.05
        assert longest_pause < 0.5


async def test_whichever_allocation_fails_a_run_ends_as_ever_or_stands_at_a_finished_turn() -> None:
    """A run of three turns and a fork of it, for the first allocation, the second, … until none is left to fail."""

    def look(path: str) -> str:
        """Look.

        Args:
            path: where
        """
        return f"seen {path} " * 12

    said = {1: in_words("look", path="a"), 3: in_words("look", path="b"), 5: "Seen both of them, " * 6}
    expected: tuple[int, ...] = ()
    outcomes = []
    for n in range(40):
        async with served(scripted(lambda asked: said[len(asked)]), num_pages=33, page_size=32) as runtime:
            session = runtime.session(tools=[look])
            with contextlib.ExitStack() as stack:
                pool = stack.enter_context(fail_allocation(runtime, n)) if n else None
                try:
                    await session.run("Look twice.")
                except PoolFull:
                    outcomes.append("refused")
                    roles = [message["role"] for message in session.messages]
                    assert roles in ([], ["user", "assistant", "tool"], ["user", *["assistant", "tool"] * 2])
                else:
                    outcomes.append("ended")
            idle_and_sound(runtime)
            if outcomes[-1] == "refused":
                await (session.run() if session.messages else session.run("Look twice."))
            expected = expected or session.token_ids
            assert session.token_ids == expected
            if pool is not None and not pool.failed:
                break
    assert pool is not None
    assert not pool.failed
    assert {"refused", "ended"} <= set(outcomes[1:-1])
