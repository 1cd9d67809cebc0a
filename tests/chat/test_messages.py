"""Messages in one form: nothing of the caller's is kept, what is wrong is told by its place, the way back is whole."""

from __future__ import annotations

import copy
import json
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv import ContentUnsupported, RequestError
from agentkv.chat import Message, normalise, to_openai
from agentkv.tool_calls import ToolCall
from agentkv.tools import as_tool


def calling(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}


def calling_as(identity: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": identity, "function": {"name": "f", "arguments": {}}}]}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


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
        (calling({"a": float("nan")}), "the arguments of a tool call of message 1 are no JSON: .*float"),
        (calling({"a": deep(20_000)}), "the arguments of a tool call of message 1 are nested more than 100 deep"),
        (calling_as([1]), r"id of a tool call of message 1 must be a str, got list"),
        ({"role": "tool", "tool_call_id": [1], "content": ""}, "tool_call_id of message 1 must be a str, got list"),
        ({"role": "user", "content": "", "name": 5}, "name of message 1 must be a str, got int"),
        ({"role": "user", "content": "", "more": deep(20_000)}, r"fields \['more'\] of message 1 are nested more than"),
        (types.SimpleNamespace(model_dump=lambda: 1 / 0), "message 1 cannot be read: ZeroDivisionError"),
        ({"role": "function", "name": "f", "content": "3"}, 'role "function", .* Give it role "tool"'),
        ({"role": "assistant", "function_call": {"name": "f"}}, "message 1 has a function_call, .* Give it tool_calls"),
        ({"role": "user"}, "message 1 of role 'user' has no content, .* Give it content"),
        ({"role": "assistant"}, "message 1 of role 'assistant' has no content"),
        ({"role": "tool", "tool_call_id": "1"}, "message 1 of role 'tool' has no content"),
        ({"role": "user", "contnet": "hi"}, r"no content, got keys \['contnet', 'role'\]. Is it 'contnet'\?"),
        ({"role": "bot", "content": "hi"}, "role 'bot'; the roles are system, developer, user, assistant, tool"),
    ],
)
def test_what_is_no_message_is_told_by_its_place(message: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        normalise([{"role": "user", "content": "hi"}, message])


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "developer", "content": "Be brief."},
    ],
)
def test_a_message_may_say_what_it_says_without_text(message: dict[str, Any]) -> None:
    again = normalise([message])
    assert normalise(to_openai(again)) == again


@pytest.mark.parametrize("given_instead", ["hi", {"role": "user"}, 5, None])
def test_what_is_no_list_of_messages_is_told_as_such(given_instead: Any) -> None:
    with pytest.raises(RequestError, match=r"messages is a list of messages, got \w+"):
        normalise(given_instead)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"refusal": "No."}, "message 0 holds a refusal, .* Put its text into content"),
        ({"audio": {"id": "a1"}}, "message 0 holds audio; tiny reads text only"),
        ({"images": ["aGk="]}, "message 0 holds images; tiny reads text only"),
    ],
)
def test_what_no_template_would_show_is_refused_and_not_left_out(field: dict[str, Any], told: str) -> None:
    with pytest.raises(ContentUnsupported, match=told):
        normalise([{"role": "assistant", "content": None, **field}], model="tiny")


def test_openais_fields_that_say_nothing_are_no_fields() -> None:
    empty = {"refusal": None, "audio": None, "function_call": None, "tool_calls": None, "name": None}
    assert normalise([{"role": "assistant", "content": "yes", **empty}]) == (Message("assistant", "yes"),)


@pytest.mark.parametrize(
    "arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 20_000 + "]" * 20_000 + "}", "[1]"]
)
def test_arguments_in_text_that_are_no_json_object_stay_as_they_are(arguments: str) -> None:
    [message] = normalise([calling(arguments)])
    assert [call.arguments for call in message.tool_calls] == [arguments]
    assert normalise(to_openai([message])) == (message,)


class Odd:
    """Raises whatever is asked of it."""

    def __str__(self) -> str:
        raise LookupError

    __repr__ = __bool__ = __eq__ = __hash__ = __deepcopy__ = __str__  # type: ignore[assignment]


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.sampled_from(["assistant", "tool", "1", "text", '{"a": 1}', '{"a": NaN}', "9" * 5000, "[" * 20_000])
    | st.builds(object)
    | st.builds(Odd)
    | st.sets(st.integers(), max_size=2)
)
KEYS = st.sampled_from(
    [
        *("role", "content", "tool_calls", "tool_call_id", "name", "id", "function", "arguments", "type", "text"),
        *("reasoning", "reasoning_content", "implicit", "refusal", "function_call", "audio", "more"),
    ]
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5) | st.tuples(inner),
    max_leaves=20,
)
CALLS = st.lists(
    st.fixed_dictionaries({"id": LEAVES, "function": st.fixed_dictionaries({"name": LEAVES, "arguments": VALUES})}),
    max_size=2,
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | VALUES},
    optional={"content": VALUES, "tool_calls": CALLS | VALUES, "tool_call_id": LEAVES, "name": LEAVES, "more": VALUES},
)


@given(st.lists(MESSAGES | VALUES, max_size=4) | VALUES)
def test_whatever_is_given_is_messages_or_an_error_that_names_the_place(messages: Any) -> None:
    refused: list[str] = []
    found: tuple[Message, ...] = ()
    try:
        found = normalise(messages)
    except RequestError as error:
        refused.append(str(error))
    assert all("message" in error for error in refused)
    for message in found:
        json.dumps([call.to_openai() for call in message.tool_calls], allow_nan=False)
        assert isinstance(message.content, str)
    assert refused or len(to_openai(found)) == len(messages)


def test_a_malformed_call_goes_through_messages_with_what_the_model_wrote() -> None:
    raw = '{"name": "add", "arguments": {"a": 1,'
    call = ToolCall("call00001", "add", raw=raw, error="malformed call", failure="malformed")
    [message] = normalise([{"role": "assistant", "content": None, "tool_calls": [call.message]}])
    assert [(each.id, each.name, each.arguments) for each in message.tool_calls] == [("call00001", "add", raw)]
    assert normalise(to_openai([message])) == (message,)


def test_wrong_arguments_go_through_messages_as_they_are() -> None:
    call = ToolCall("call00001", "add", {"a": "x"}, raw="{...}", error="wrong", failure="wrong_arguments")
    assert call.message["function"]["arguments"] == '{"a": "x"}'


def test_what_sdks_add_to_an_answer_is_no_part_of_the_message() -> None:
    said = {"role": "assistant", "content": '{"a": 5}', "reasoning_content": "Five."}
    added = {"parsed": {"a": 5}, "annotations": [{"type": "url_citation"}], "images": [], "metadata": {}, "audio": None}
    assert normalise([{**said, **added}]) == normalise([said])
    kept = {**said, "prefix": True, "cache_control": {"type": "ephemeral"}}
    assert normalise([kept])[0].extra == {"prefix": True, "cache_control": {"type": "ephemeral"}}
    assert normalise([{"role": "user", "content": "hi", "documents": []}])[0].extra == {"documents": []}
