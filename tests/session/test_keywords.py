"""A keyword that a call does not take: the error knows what was meant, or where it belongs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import agentkv.sync
from agentkv import Runtime
from agentkv.testing import scripted

SESSION: list[tuple[str, Any, str]] = [
    ("max_completion_tokens", 5, "it is max_tokens here"),
    ("temprature", 1.0, "did you mean temperature"),
    ("tool_choise", "auto", "did you mean tool_choice"),
    ("tools", [], r"tools goes to runtime\.session\(tools=\.\.\.\)"),
    ("cache", False, r"cache goes to runtime\.session\(cache=\.\.\.\)"),
    ("name", "x", r"name goes to runtime\.session\(name=\.\.\.\)"),
    ("messages", [], r"what runtime\.session\(messages=\.\.\.\) goes on from"),
    ("n", 2, r"session\.fork\(n\) gives n sessions"),
    ("stream", True, r"call stream\(\.\.\.\)"),
    ("xyzzy", 1, "known are .*timeout.*tool_choice.*max_tokens"),
]


@pytest.mark.parametrize(("name", "value", "advice"), SESSION, ids=[case[0] for case in SESSION])
async def test_calls_of_a_session_say_where_a_keyword_belongs(name: str, value: Any, advice: str) -> None:
    session = Runtime(scripted([])).session()
    for call in (session.ask, session.run):
        with pytest.raises(TypeError, match=f"unknown keyword '{name}': .*{advice}"):
            await call("Hi", **{name: value})


async def test_each_call_knows_its_own_keywords() -> None:
    runtime = Runtime(scripted([]))
    session = runtime.session()
    with pytest.raises(TypeError, match="'max_turn': did you mean max_turns"):
        await session.run("Hi", max_turn=3)
    with pytest.raises(TypeError, match=r"'max_turns': max_turns goes to session\.run\(\)"):
        await session.ask("Hi", max_turns=3)
    with pytest.raises(TypeError, match="'tool': did you mean tools"):
        await runtime.generate("Hi", tool=[print])
    with pytest.raises(TypeError, match="'timout': did you mean timeout"):
        runtime.stream("Hi", timout=5)
    with pytest.raises(TypeError, match="'sistem': did you mean system"):
        runtime.session(sistem="Be brief.")
    with pytest.raises(TypeError, match="'timeout': timeout goes to each call"):
        runtime.session(timeout=5)


@pytest.mark.parametrize("max_turns", ["3", 2.0, True])
def test_a_number_of_turns_is_an_int(max_turns: Any) -> None:
    with pytest.raises(TypeError, match="max_turns must be an int of at least 1"):
        Runtime(scripted([])).session().run_stream("Hi", max_turns=max_turns)


@pytest.mark.parametrize("kind", [Runtime, agentkv.sync.Runtime])
def test_a_runtime_says_what_was_meant_by_an_unknown_option(kind: Any) -> None:
    with pytest.raises(TypeError, match="unknown option 'memry': did you mean memory"):
        kind("smollm2-135m", memry="1GiB")
    with pytest.raises(TypeError, match="unknown option 'max_tokens': max_tokens goes to the call"):
        kind("smollm2-135m", max_tokens=5)
    with pytest.raises(TypeError, match=r"'tools': tools goes to runtime\.session"):
        kind("smollm2-135m", tools=[])
    assert list(inspect.signature(kind).parameters)[:3] == ["model", "tokenizer", "adapter"]
