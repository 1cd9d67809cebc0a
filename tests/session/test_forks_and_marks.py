"""Forks, marks and going back: what they cost, and what they leave alone."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentkv import Mark, Runtime, Session, SessionBusy
from agentkv.testing import scripted
from support.families import served, turned

MICROSECONDS = 1e-6


def echo(asked: Any) -> str:
    """Says how many messages there were and what the last one was."""
    return f"{len(asked)}: {asked[-1]['content'][-40:]}"


async def long_session(runtime: Runtime, num_tokens: int = 4096) -> Session:
    """A session of exactly so many tokens, the last of them a reply's; each z is one token."""
    session = runtime.session("Be brief.", name="planner")
    answer = len(runtime.tokenizer("ok", add_special_tokens=False)["input_ids"])
    await session.ask("z" * (num_tokens - answer - session.count_tokens("")))
    assert len(session.token_ids) == num_tokens
    return session


def median_seconds(act: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def pages_in_books(runtime: Runtime) -> dict[str, int]:
    runtime.check()
    pages: dict[str, int] = runtime.report().to_dict()["pages"]
    return {kind: pages[kind] for kind in ("free", "cached", "in_use", "pinned")}


async def test_forking_4096_tokens_takes_at_most_100_microseconds_and_no_page_until_the_fork_writes() -> None:
    async with served(scripted(lambda asked: "ok"), strict=False) as runtime:
        session = await long_session(runtime)
        before = pages_in_books(runtime)
        assert median_seconds(session.fork, 2000) <= 100 * MICROSECONDS
        assert pages_in_books(runtime) == before
        child = session.fork()
        reply = await child.ask("Go on.")
        assert reply.usage.cached_tokens == len(session.token_ids)
        assert pages_in_books(runtime)["cached"] > before["cached"]


async def test_a_mark_and_a_rollback_of_4096_tokens_take_at_most_100_microseconds_and_no_page() -> None:
    async with served(scripted(lambda asked: "ok"), strict=False) as runtime:
        session = await long_session(runtime)
        mark = session.mark()
        before = pages_in_books(runtime)
        assert median_seconds(session.mark, 2000) <= 100 * MICROSECONDS
        assert median_seconds(lambda: session.rollback(mark), 2000) <= 100 * MICROSECONDS

        def away_and_back() -> None:
            session.append("More.")
            session.rollback(mark)

        assert median_seconds(away_and_back, 2000) <= 100 * MICROSECONDS
        assert pages_in_books(runtime) == before


async def test_taking_an_answered_turn_of_4096_tokens_back_takes_at_most_100_microseconds_and_no_page() -> None:
    async with served(scripted(lambda asked: "ok"), strict=False) as runtime:
        session = await long_session(runtime)
        mark = session.mark()
        await session.ask("More?")
        answered = session.mark()
        before = pages_in_books(runtime)
        # Only the way back takes something back, and tells the cache so.
        took = []
        for _ in range(500):
            session.rollback(answered)
            took.append(median_seconds(lambda: session.rollback(mark), 1))
        assert statistics.median(took) <= 100 * MICROSECONDS
        assert pages_in_books(runtime) == before


async def test_a_rollback_hands_the_cache_the_ledger_itself_and_copies_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(scripted(lambda asked: "ok")) as runtime:
        told: list[Any] = []
        session = runtime.session("Be brief.")
        mark = session.mark()
        await session.ask("One?")
        cache = await asyncio.wrap_future(runtime._life.worker.ask(lambda engine: engine.cache))
        monkeypatch.setattr(cache, "supersede", lambda token_ids, start, namespace: told.append(token_ids))
        ledger = session.mark().conversation.ledger.token_ids
        session.rollback(mark)
        runtime.check()
        assert [token_ids is ledger for token_ids in told] == [True]


async def test_forks_go_on_by_themselves_and_share_all_that_was_before() -> None:
    async with served(scripted(echo)) as runtime:
        session = runtime.session("Be brief.", name="planner")
        await session.ask("Plan.")
        shared, messages = session.token_ids, session.messages
        left, right = session.fork(2)
        assert (left.name, right.name, left.parent) == ("planner/1", "planner/2", session)
        a, b = await asyncio.gather(left.ask("Left."), right.ask("Right."))
        assert (a.text, b.text) == ("4: Left.", "4: Right.")
        assert a.usage.cached_tokens >= len(shared)
        assert b.usage.cached_tokens >= len(shared)
        assert (session.token_ids, session.messages) == (shared, messages)
        assert left.token_ids[: len(shared)] == right.token_ids[: len(shared)] == shared
        grandchild = left.fork()
        assert grandchild.name == "planner/1/1"
        assert (session.usage + a.usage).prompt_tokens == session.usage.prompt_tokens + left.usage.prompt_tokens


async def test_a_busy_session_forks_its_last_finished_state() -> None:
    async with served(scripted(echo)) as runtime:
        session = runtime.session()
        await session.ask("One.")
        finished = session.messages
        async with session.stream("Two.") as stream:
            await anext(stream)
            assert session.busy
            fork = session.fork()
            assert fork.messages == finished
            assert not fork.busy
            with pytest.raises(SessionBusy):
                session.append("x")
            with pytest.raises(SessionBusy):
                session.rollback(session.mark())
            await stream.reply()
        assert fork.messages == finished
        assert (await fork.ask("Other.")).text == f"{len(finished) + 1}: Other."


async def test_going_back_to_every_place_gives_exactly_what_was_there() -> None:
    async with served(scripted(echo)) as runtime:
        session = runtime.session("Be brief.")
        marks: list[tuple[Mark, Any, Any]] = []
        for number in range(4):
            marks.append((session.mark(), session.messages, session.token_ids))
            await session.ask(f"Question {number}?")
        sibling = session.fork()
        told = (sibling.messages, sibling.token_ids)
        end = (session.mark(), session.messages, session.token_ids)
        for mark, messages, token_ids in [end, *reversed(marks), *marks, end]:
            session.rollback(mark)
            assert (session.messages, session.token_ids) == (messages, token_ids)
            assert (sibling.messages, sibling.token_ids) == told
        session.rollback(marks[2][0])
        reply = await session.ask("Another way?")
        assert reply.text == f"{len(marks[2][1]) + 1}: Another way?"
        assert reply.usage.cached_tokens >= len(marks[2][2])


async def test_marks_from_before_a_fork_work_in_the_fork_and_no_others_do() -> None:
    async with served(scripted(echo)) as runtime:
        session = runtime.session()
        await session.ask("One.")
        early, at = session.mark(), session.messages
        await session.ask("Two.")
        fork = session.fork()
        late = session.mark()
        fork.rollback(early)
        assert fork.messages == at
        with pytest.raises(ValueError, match="made in another session"):
            fork.rollback(late)
        with pytest.raises(ValueError, match="made in another session"):
            runtime.session().rollback(early)
        with pytest.raises(ValueError, match="made in another session"):
            session.rollback(fork.mark())
        for nothing in (None, 0, -1, 10**9):
            with pytest.raises(TypeError, match="what mark"):
                session.rollback(nothing)  # type: ignore[arg-type]
        session.rollback(late)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
async def test_a_number_of_forks_that_cannot_be_is_refused(n: Any) -> None:
    async with served(scripted([])) as runtime:
        with pytest.raises(ValueError if type(n) is int else TypeError, match="at least 1"):
            runtime.session().fork(n)


async def test_a_seeded_answer_depends_on_the_path_of_forks_and_not_on_the_order_of_calls() -> None:
    """Random weights answer at temperature 1; each fork draws by its own path."""

    async def answers(order: list[int]) -> list[str]:
        async with served(scripted(lambda asked: None), seed=7) as runtime:
            session = runtime.session(name="root", temperature=1.0, max_tokens=12)
            await session.ask("Begin.")
            forks = session.fork(3)
            replies = {index: await forks[index].ask("Go on.") for index in order}
            return [replies[index].text for index in range(3)]

    first = await answers([0, 1, 2])
    assert first == await answers([2, 0, 1])
    assert len(set(first)) == 3


async def test_eight_forks_of_a_session_that_was_never_computed_compute_its_prompt_once() -> None:
    async with served(scripted(echo)) as runtime:
        session = runtime.session("s" * 1000)
        forks = session.fork(8)
        replies = await asyncio.gather(*(fork.ask(f"{number}") for number, fork in enumerate(forks)))
        computed = sum(reply.usage.computed_tokens for reply in replies)
        prompt = replies[0].usage.prompt_tokens
        assert computed <= prompt + 8 * 32
        assert [reply.text for reply in replies] == [f"2: {number}" for number in range(8)]


async def test_an_unstarted_runtime_makes_sessions_that_can_be_edited_forked_and_asked() -> None:
    runtime = Runtime(scripted(echo), num_pages=64)
    session = runtime.session("Be brief.", name="early")
    session.append("Hello.")
    fork = session.fork()
    mark = fork.mark()
    fork.append("More.")
    fork.rollback(mark)
    assert fork.messages == session.messages
    try:
        reply = await fork.ask()
        assert reply.text == "2: Hello."
        assert turned(reply) == fork.token_ids[-len(turned(reply)) :]
    finally:
        await runtime.close()
