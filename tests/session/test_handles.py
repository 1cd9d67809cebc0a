"""What whoever holds a session, a runtime or a stream sees of it, may set on it, and may not do with it."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

import agentkv.sync
from agentkv import Runtime, Session, Usage
from agentkv.session import RunStream
from agentkv.streams import CallStream
from agentkv.testing import Answer, scripted


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


async def test_a_repr_tells_what_can_be_asked_in_every_state() -> None:
    runtime = Runtime(scripted(["One.", "Two."], name="tiny"), num_pages=64)
    session = runtime.session("Be brief.", name="planner")
    assert repr(runtime) == "<Runtime of a ScriptedModel: not started>"
    assert repr(session) == "<Session 'planner': 0 turns, 0 tokens, 1 message to compute>"
    async with runtime:
        assert repr(runtime).startswith("<Runtime 'tiny' in fp32 on cpu")
        assert repr(runtime).endswith(": open>")
        stream = session.stream("Hi")
        assert repr(stream) == "<CallStream: not begun>"
        async with stream:
            assert repr(stream) == "<CallStream: running>"
            assert repr(session).endswith(", busy>")
            await stream.reply()
        assert repr(stream) == "<CallStream: ended>"
        assert repr(session) == f"<Session 'planner': 1 turn, {len(session.token_ids)} tokens>"
        assert repr(session.mark()) == "<Mark: 1 turn, 3 messages>"
        async with session.stream("And?") as stream:
            pass
        assert repr(stream) == "<CallStream: ended by StreamClosed>"
        assert repr(runtime.report()) == "<Report of 'tiny'; print it>"
        assert repr(session.report()) == "<SessionReport of 'planner': 1 call; print it>"
        await session.close()
        assert repr(session).endswith(" tokens, closed>")
        assert repr(runtime.session()) == "<Session: 0 turns, 0 tokens>"
    assert repr(runtime).endswith(": closed>")
    assert repr(Runtime("smollm2-135m")) == "<Runtime 'smollm2-135m': not started>"


async def test_the_repr_of_a_task_tells_how_far_it_is() -> None:
    async with Runtime(scripted([Answer(calls=[("add", {"a": 1, "b": 2})]), "3"]), num_pages=64) as runtime:
        stream = runtime.session(tools=[add]).run_stream("Add.")
        assert repr(stream) == "<RunStream: not begun, 0 of at most 16 turns>"
        async with stream:
            assert repr(stream) == "<RunStream: running, 0 of at most 16 turns>"
            await stream.run()
            assert repr(stream) == "<RunStream: done (answer), 2 of at most 16 turns>"
        async with runtime.session().run_stream("Add.") as stream:
            await stream.cancel()
            assert repr(stream) == "<RunStream: ended by StreamClosed, 0 of at most 16 turns>"


async def test_a_runtime_that_is_loading_says_so() -> None:
    runtime = Runtime(scripted([]), num_pages=64)
    starting = asyncio.ensure_future(runtime.start())
    await asyncio.sleep(0)
    assert repr(runtime) == "<Runtime of a ScriptedModel: starting>"
    await starting
    await runtime.close()


@pytest.mark.parametrize(
    "kind", [Runtime, Session, agentkv.sync.Runtime, agentkv.sync.Session, agentkv.sync.Stream, CallStream, RunStream]
)
def test_a_repr_does_not_raise_before_the_constructor_is_through(kind: type[Any]) -> None:
    assert repr(kind.__new__(kind)).startswith("<")


def test_the_names_without_await_show_what_they_hold() -> None:
    with agentkv.sync.Runtime(scripted(["One."], name="tiny"), num_pages=64) as runtime:
        assert repr(runtime).startswith("<sync.Runtime of <Runtime 'tiny'")
        session = runtime.session(name="planner")
        assert repr(session) == "<sync.Session of <Session 'planner': 0 turns, 0 tokens>>"
        assert repr(session.stream("Hi")) == "<sync.Stream of <CallStream: not begun>>"


def test_a_usage_prints_itself_on_one_line() -> None:
    usage = Usage(prompt_tokens=1200, cached_tokens=1100, computed_tokens=100, output_tokens=8, duration=0.5, ttft=0.25)
    assert str(usage) == (
        "1,200 prompt tokens: 1,100 cached, 100 computed; 8 output tokens in 0.50 s, the first after 0.25 s"
    )
    assert str(Usage(rerun_tokens=3)).endswith("0 computed, 3 run again; 0 output tokens in 0.00 s")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("max_tokens", r"to each call, as ask\(\.\.\., max_tokens=\.\.\.\), or to runtime\.session\(max_tokens="),
        ("cache", r"given once, as runtime\.session\(cache="),
        ("name", r"given once, as runtime\.session\(name="),
        ("messages", r"a copy of what was said\. append\(\.\.\.\) adds to it"),
        ("usage", "it tells what is"),
        ("foo", "a Session has no attribute 'foo', and nothing would read it"),
        ("tokens_ids", "Did you mean token_ids"),
        ("system", r"open runtime\.session\(system="),
    ],
)
def test_what_is_set_on_a_session_is_read_or_refused(name: str, advice: str) -> None:
    for runtime in (Runtime(scripted([])), agentkv.sync.Runtime(scripted([]))):
        session = runtime.session()
        with pytest.raises(AttributeError, match=advice):
            setattr(session, name, 1)
        with pytest.raises(AttributeError, match=r"options are given once, as Runtime\(\.\.\., memory="):
            runtime.memory = "1GiB"  # type: ignore[union-attr]


def test_a_test_may_put_its_own_method_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Runtime(scripted([])).session()
    monkeypatch.setattr(session, "count_tokens", lambda content: 7)
    assert session.count_tokens("Hi") == 7


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda each: each.__name__)
def test_what_is_one_of_its_kind_is_neither_copied_nor_pickled(duplicate: Any) -> None:
    for runtime in (Runtime(scripted([])), agentkv.sync.Runtime(scripted([]))):
        with pytest.raises(TypeError, match="neither copied nor pickled: open another one with the same options"):
            duplicate(runtime)
        with pytest.raises(TypeError, match=r"fork\(\) gives another session .* json\.dumps\(session\.messages\)"):
            duplicate(runtime.session())
