"""Messages in one form: nothing of the caller's is kept, what is wrong is told by its place, the way back is whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agentkv import RequestError
from agentkv.chat import Message, normalise, to_openai
from agentkv.tool_calls import ToolCall
from agentkv.tools import as_tool


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def test_what_the_caller_changes_later_changes_no_message() -> None:
    given = calling({"a": {"b": [1]}}) | {"cache_control": {"kinds": ["x"]}}
    [message] = normalise([given])
    before = copy.deepcopy(message)
    given["tool_calls"][0]["function"]["arguments"]["a"]["b"].append(2)
    given["cache_control"]["kinds"].append("y")
    assert message == before


def test_messages_that_are_handed_out_are_the_callers_to_change() -> None:
    [message] = normalise([{"role": "user", "content": "hi", "cache_control": {"kinds": ["x"]}}])
    [shape] = to_openai([message])
    shape["cache_control"]["kinds"].append("y")
    assert message.extra == {"cache_control": {"kinds": ["x"]}}


def test_a_tool_of_openais_shape_is_a_copy() -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": ["x"]}}}
    tool = as_tool({"type": "function", "function": {"name": "f", "parameters": parameters}})
    parameters["properties"]["a"]["enum"].append("y")
    assert tool.parameters["properties"]["a"]["enum"] == ["x"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning_content": None, "reasoning": "hm"},
        {"reasoning_content": "hm", "reasoning": "other"},
    ],
)
def test_reasoning_is_found_under_either_name(fields: dict[str, Any]) -> None:
    assert normalise([{"role": "assistant", "content": "yes", **fields}]) == (Message("assistant", "yes", "hm"),)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("hi", "message 1 must be a mapping with role and content, got str"),
        ({"role": "assistant", "tool_calls": ["f"]}, "a tool call of message 1 must be a mapping with id and function"),
        ({"role": "assistant", "tool_calls": 3}, "tool_calls of message 1 must be a list of calls, got int"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls of message 1 must be a list of calls, got dict"),
        ({"role": "assistant", "tool_calls": [{}]}, "a tool call of message 1 has no function name"),
        (calling({"a": {1, 2}}), "the arguments of a tool call of message 1 are no JSON: .*set"),
        (calling([1]), "the arguments of a tool call of message 1 must be JSON or a dict, got list"),
    ],
)
def test_what_is_no_message_is_told_by_its_place(message: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        normalise([{"role": "user", "content": "hi"}, message])


def test_a_malformed_call_goes_through_messages_with_what_the_model_wrote() -> None:
    raw = '{"name": "add", "arguments": {"a": 1,'
    call = ToolCall("call00001", "add", raw=raw, error="malformed call", failure="malformed")
    [message] = normalise([{"role": "assistant", "content": None, "tool_calls": [call.message]}])
    assert [(each.id, each.name, each.arguments) for each in message.tool_calls] == [("call00001", "add", raw)]
    assert normalise(to_openai([message])) == (message,)


def test_wrong_arguments_go_through_messages_as_they_are() -> None:
    call = ToolCall("call00001", "add", {"a": "x"}, raw="{...}", error="wrong", failure="wrong_arguments")
    assert call.message["function"]["arguments"] == '{"a": "x"}'
