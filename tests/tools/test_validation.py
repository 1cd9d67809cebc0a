"""Arguments are checked and converted; what is wrong is said in a line that a small model can act on."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Annotated, Any, Literal

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.tools import Tool, as_tool, validate


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


def paint(where: Point, colour: Colour = Colour.RED, day: datetime.date | None = None, times: int = 1) -> None: ...


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}


def forecast() -> Tool:
    return Tool("forecast", "", SCHEMA)


def test_a_function_gets_values_of_its_own_types_and_its_own_defaults() -> None:
    found = validate(as_tool(paint), {"where": {"x": "5"}, "colour": "blue", "day": "2024-02-29"})
    assert found.error is None
    assert found.arguments == {"where": Point(5), "colour": Colour.BLUE, "day": datetime.date(2024, 2, 29)}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "where is missing"),
        ({"where": {"x": 1}, "wehre": 2}, "wehre is no argument (there are: where, colour, day, times)"),
        (
            {"where": {"x": "five"}},
            'where.x should be a valid integer, not "five"',
        ),
        ({"where": {"x": 1}, "colour": "green"}, "colour should be 'red' or 'blue', not \"green\""),
    ],
)
def test_wrong_arguments_of_a_function_are_told_in_one_line(arguments: dict[str, Any], error: str) -> None:
    assert validate(as_tool(paint), arguments).error == error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "city is missing"),
        ({"city": "Paris"}, 'city should be one of ["Rome", "Oslo"], not "Paris"'),
        ({"city": "Rome", "days": "2"}, 'days should be integer, not "2"'),
        ({"city": "Rome", "days": 0}, "days breaks the rule minimum: 1, not 0"),
        ({"city": "Rome", "tags": ["a", 3]}, "tags[1] should be string, not 3"),
        ({"city": "Rome", "dasy": 2}, "dasy is no argument (there are: city, days, tags)"),
    ],
)
def test_wrong_arguments_of_a_schema_are_told_in_one_line(arguments: dict[str, Any], error: str) -> None:
    assert validate(forecast(), arguments).error == error


def test_right_arguments_of_a_schema_are_handed_on_unchanged() -> None:
    arguments = {"city": "Oslo", "days": 3, "tags": []}
    assert validate(forecast(), arguments).arguments == arguments


def test_a_schema_that_allows_more_is_given_more() -> None:
    tool = Tool("f", "", {**SCHEMA, "additionalProperties": {"type": "integer"}})
    assert validate(tool, {"city": "Rome", "more": 3}).error is None
    assert validate(tool, {"city": "Rome", "more": "x"}).error == 'more should be integer, not "x"'
    assert validate(Tool("f", "", {"type": "object"}), {"any": 1}).error is None


def test_a_broken_reference_is_an_error_of_the_call_and_asks_no_network() -> None:
    tool = Tool("f", "", {"properties": {"a": {"$ref": "#/$defs/gone"}}})
    error = validate(tool, {"a": 1}).error
    assert error is not None
    assert "/$defs/gone" in error


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def pick(
    one: Literal[Colour.RED],
    some: list[Literal[Colour.RED, "blue", Level.LOW, True]],
    other: Literal[Level.HIGH] | None = None,
    plain: Literal[Colour.BLUE] = Colour.BLUE,
) -> None: ...


def test_a_member_of_an_enum_in_a_literal_is_read_by_its_value() -> None:
    tool = as_tool(pick)
    assert tool.parameters["properties"]["one"]["const"] == "red"
    found = validate(tool, {"one": "red", "some": ["red", "blue", 1, True], "other": 2})
    assert found.arguments == {"one": Colour.RED, "some": [Colour.RED, "blue", Level.LOW, True], "other": Level.HIGH}
    assert found.arguments is not None
    assert [type(each) for each in found.arguments["some"]] == [Colour, str, Level, bool]
    assert validate(tool, {"one": "blue", "some": []}).error == "one should be 'red', not \"blue\""


class Holds(pydantic.BaseModel):
    colour: Literal[Colour.RED]


def in_a_model(one: Holds) -> None: ...
def a_class(one: type[int]) -> None: ...
def of_complex(one: list[complex]) -> None: ...
def looks_ahead(one: Annotated[str, pydantic.Field(pattern="(?=a)b")]) -> None: ...


def of_anything(text: bytes, one: object, many: dict[str, object]) -> None: ...


def test_bytes_are_a_text_s_and_an_object_is_any_json_value() -> None:
    found = validate(as_tool(of_anything), {"text": "é", "one": [1, None], "many": {"a": {"b": 2.5}}})
    assert found.arguments == {"text": "é".encode(), "one": [1, None], "many": {"a": {"b": 2.5}}}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (in_a_model, "members of an Enum"),
        (a_class, "IsSubclass"),
        (of_complex, "take two floats"),
        (looks_ahead, "str"),
    ],
)
def test_a_type_that_every_call_would_fail_is_no_tool_s(function: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=f"parameter 'one' of tool '{function.__name__}' has a type .*{reason}"):
        as_tool(function)


def far(one: float = float("nan"), other: float = float("-inf"), text: str = "\ud800", kept: float = 0.5) -> None: ...


def test_a_default_that_no_prompt_takes_is_not_shown() -> None:
    shown = as_tool(far).parameters["properties"]
    assert [name for name, schema in shown.items() if "default" in schema] == ["kept"]


class Looked(pydantic.BaseModel):
    up: int

    @pydantic.field_validator("up")
    @classmethod
    def in_the_table(cls, up: int) -> str:
        if up == 3:
            raise SystemExit("no")
        return {1: "one"}[up]


def look(where: Looked) -> None: ...


@pytest.mark.parametrize(
    ("up", "raised"), [(2, "checking them raised KeyError: 2"), (3, "checking them raised SystemExit: no")]
)
def test_a_validator_that_raises_whatever_it_likes_is_an_error_of_the_arguments(up: int, raised: str) -> None:
    assert validate(as_tool(look), {"where": {"up": up}}).error == raised


def test_a_number_that_the_schemas_reader_cannot_take_is_an_error_of_the_arguments() -> None:
    tool = Tool("f", "", {"properties": {"a": {"type": "number", "multipleOf": 0.5}}})
    error = validate(tool, {"a": 10**400}).error
    assert error is not None
    assert error.startswith("checking them raised OverflowError")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def every(
    a: int, b: list[Point], c: dict[str, float], d: Literal["x", 1], e: Colour | str | None = None, f: bytes = b""
) -> None: ...


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "d", "e", "f", "g", "city", "days", "tags"]), JSON))
def test_any_json_gives_either_arguments_or_one_short_line(arguments: dict[str, Any]) -> None:
    for tool in (as_tool(every), forecast()):
        found = validate(tool, arguments)
        assert (found.arguments is None) != (found.error is None)
        if found.error is not None:
            assert found.error
            assert len(found.error.splitlines()) == 1
            assert len(found.error) < 2000
