"""What a session refuses to be asked or told: nothing that the caller meant is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv import PendingToolCalls, RequestError, Runtime, RuntimeClosed
from agentkv.testing import Answer, scripted


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def result(identity: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": "5"}


async def test_the_result_of_a_call_that_nobody_made_is_refused() -> None:
    async with Runtime(scripted(["Hello."]), num_pages=64) as runtime:
        session = runtime.session(tools=[add])
        before = session.messages
        with pytest.raises(RequestError, match="no call 'nosuch' waits for a result; none does"):
            await session.ask(result("nosuch"))
        with pytest.raises(RequestError, match="no call 'nosuch' waits"):
            session.append(result("nosuch"))
        assert session.messages == before
        assert not session.busy


@pytest.mark.parametrize("many", [0, 40], ids=["read at once", "read beside the loop"])
async def test_nor_is_it_taken_from_a_stored_conversation(many: int) -> None:
    function = {"name": "add", "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    stored = [{"role": "user", "content": "Add."}, *[call, result("1")] * (many or 1)]
    async with Runtime(scripted(["Hello."] * 2), num_pages=512) as runtime:
        for told, messages in (
            ("none does", [*stored, result("nosuch")]),
            ("those that do are 1", [*stored[:1], call, result("nosuch")]),
            ("none does", [*stored[:1], result("1"), call]),
        ):
            with pytest.raises(RequestError, match=f"no call '{messages[-1].get('tool_call_id', '1')}' waits.*{told}"):
                runtime.session(messages=messages, tools=[add])
            with pytest.raises(RequestError, match=f"no call .* waits for a result; {told}"):
                await runtime.generate(messages, tools=[add])
        # Late, or twice, as histories of others have them.
        untidy = [*stored, {"role": "user", "content": "And?"}, result("1")]
        assert (await runtime.generate(untidy, tools=[add])).text == "Hello."
        assert (await runtime.session(messages=untidy, tools=[add]).ask("Well?")).text == "Hello."


async def test_a_call_has_one_result_and_the_error_names_those_that_wait() -> None:
    calls = Answer(calls=[("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})])
    async with Runtime(scripted([calls, "Done."]), num_pages=64) as runtime:
        session = runtime.session(tools=[add])
        first, second = (call.id for call in (await session.ask("Add.")).tool_calls)
        session.append(result(second))
        with pytest.raises(RequestError, match=f"no call '{second}' waits for a result; those that do are {first}"):
            await session.ask(result(second))
        with pytest.raises(RequestError, match=f"no call '{first}' waits"):
            session.append(result(first), result(first))
        with pytest.raises(PendingToolCalls):
            await session.ask()
        assert (await session.ask(result(first))).text == "Done."
        assert [message["tool_call_id"] for message in session.messages[-3:-1]] == [first, second]


async def test_a_call_and_its_result_may_be_told_together() -> None:
    function = {"name": "add", "arguments": "{}"}
    async with Runtime(scripted(["Done."]), num_pages=64) as runtime:
        session = runtime.session(tools=[add])
        session.append("Add.", {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}, result("1"))
        assert (await session.ask("And?")).text == "Done."


async def test_an_empty_list_asks_nothing() -> None:
    async with Runtime(scripted([]), num_pages=64) as runtime:
        session = runtime.session("Be brief.")
        for asked in (session.ask([]), session.run([])):
            with pytest.raises(ValueError, match="the content is an empty list: give a text or messages, or None"):
                await asked


def test_two_system_texts_are_one_too_many() -> None:
    runtime = Runtime(scripted([]))
    stored = runtime.session("Be brief.", messages=[{"role": "user", "content": "Hi"}]).messages
    with pytest.raises(ValueError, match=r"leave system= out .* or give messages=stored\[1:\]"):
        runtime.session("Be long.", messages=stored)
    assert runtime.session("Be long.", messages=stored[1:]).system == "Be long."
    assert runtime.session(messages=stored).messages == stored


async def test_a_system_text_of_the_templates_own_is_none_of_the_callers() -> None:
    async with Runtime(scripted([]), num_pages=64) as runtime:
        implicit = {"role": "system", "content": "You are helpful.", "implicit": True}
        assert runtime.session("Be brief.", messages=[implicit]).system == "Be brief."


async def test_a_closed_runtime_opens_no_session() -> None:
    runtime = Runtime(scripted([]), num_pages=64)
    async with runtime:
        pass
    with pytest.raises(RuntimeClosed, match="open a new one"):
        runtime.session()


async def test_a_tool_is_denied_by_its_name_or_function_and_with_a_reason_in_words() -> None:
    async with Runtime(scripted([Answer(calls=[("add", {"a": 1, "b": 2})]), "No."]), num_pages=64) as runtime:
        session = runtime.session(tools=[add])
        with pytest.raises(TypeError, match="a str; got 5"):
            session.deny("add", 5)  # type: ignore[arg-type]
        session.deny(add, "not today")
        assert (await session.run("Add.")).tool_results[0].content == "Error: add may not be used: not today"
