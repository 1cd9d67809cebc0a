"""A schema is proved once, however often it comes, and what differs from it is proved by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentkv.tools import AnswerFormat, as_tool
from agentkv.tools.schema import copied
from agentkv.tools.schema_check import schema_fault

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The schemas that were proved."""
    seen: list[Any] = []
    prove = Draft202012Validator.check_schema

    def note(schema: Any) -> None:
        seen.append(copy.deepcopy(schema))
        prove(schema)

    monkeypatch.setattr(Draft202012Validator, "check_schema", note)
    return seen


def described(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_the_tools_of_the_next_request_are_not_proved_again(proved: list[Any]) -> None:
    parameters = [
        {"type": "object", "properties": {f"only here {number}": {"type": "string"}}, "required": []}
        for number in range(50)
    ]
    for turn in range(3):
        for number, each in enumerate(parameters):
            assert as_tool(described(f"tool_{turn}_{number}", copy.deepcopy(each))).parameters == each
    assert proved == parameters


def test_the_form_of_an_answer_is_proved_once_and_in_any_order_of_its_keys(proved: list[Any]) -> None:
    schema = {"type": "object", "properties": {"only in this test": {"type": "integer"}}}
    turned = {"properties": {"only in this test": {"type": "integer"}}, "type": "object"}
    for one in (schema, turned):
        assert AnswerFormat.given({"type": "json_schema", "json_schema": {"schema": one}}) == AnswerFormat(schema)
    assert proved == [schema]


def test_what_is_wrong_with_a_schema_is_told_as_often_as_it_comes(proved: list[Any]) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match=r"parameters of tool 'f' are no JSON schema: at required, 'wrong here'"):
            as_tool(described("f", {"type": "object", "required": "wrong here"}))
    assert len(proved) == 1


@pytest.mark.parametrize("odd", [{"required": ("a",)}, {"properties": {1: {}}}, {"default": {1, 2}}])
def test_what_json_would_write_as_something_else_has_a_verdict_of_its_own(odd: dict[str, Any]) -> None:
    same_text: dict[str, Any] = {"required": ["a"], "properties": {"1": {}}, "default": [1, 2]}
    assert schema_fault({key: same_text[key] for key in odd}) == ""
    try:
        Draft202012Validator.check_schema(odd)
        expected = True
    except Exception:
        expected = False
    try:
        sound = schema_fault(odd) == ""
    except TypeError:
        sound = False
    assert sound == expected


@given(JSON)
def test_a_copy_is_equal_in_value_and_types_and_shares_nothing_that_can_change(value: Any) -> None:
    made = copied(value)
    assert repr(made) == repr(value)

    def mutables(inside: Any) -> set[int]:
        children = inside.values() if isinstance(inside, dict) else inside if isinstance(inside, list) else ()
        own = {id(inside)} if isinstance(inside, (dict, list)) else set()
        return own.union(*map(mutables, children))

    assert not mutables(made) & mutables(value)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"const": float("nan")}, "JSON does not have"),
        ({"minimum": float("-inf")}, "JSON does not have"),
        ({"const": "\ud800"}, "no Unicode"),
        (_nested(200), "nested too deeply"),
    ],
)
def test_what_no_text_of_json_can_say_is_a_fault_of_the_schema(schema: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=f"response_format holds no JSON schema: .*{fault}"):
        AnswerFormat.given({"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(ValueError, match=f"parameters of tool 'f' are no JSON schema: .*{fault}"):
        as_tool(described("f", {"type": "object", "properties": {"a": schema}}))
