"""Functions, partials and dicts become tools whose text is always the same."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import random
from collections.abc import Callable
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from agentkv.tools import Tool, as_tool, as_tools


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Address(TypedDict):
    city: str
    zip: NotRequired[str]


class Order(BaseModel):
    title: str
    where: Point


class Node(BaseModel):
    name: str
    children: list[Node] = []


def search(query: str, limit: int = 5, kind: Literal["web", "news"] = "web") -> str:
    """Search for pages
    that match.

    Newest first.

    Args:
        query: What to look for,
            in words.
        limit: How many.
    """
    return f"{query} {limit} {kind}"


class Desk:
    def lend(self, book: str) -> str:
        """Lend a book."""
        return f"lent {book}"


def parameters_of(obj: object) -> dict[str, Any]:
    found = as_tool(obj).schema["function"]["parameters"]
    assert isinstance(found, dict)
    return found


def test_a_function_gives_name_description_and_schema_from_types_and_docstring() -> None:
    assert as_tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for pages that match.\n\nNewest first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
                    "limit": {"type": "integer", "description": "How many.", "default": 5},
                    "query": {"type": "string", "description": "What to look for, in words."},
                },
                "required": ["query"],
            },
        },
    }


def test_keys_stand_in_one_fixed_order() -> None:
    text = json.dumps(as_tool(search).schema["function"]["parameters"]["properties"]["limit"])
    assert text == '{"type": "integer", "description": "How many.", "default": 5}'
    assert list(as_tool(search).schema["function"]["parameters"]) == ["type", "properties", "required"]


def test_a_bound_method_has_no_self() -> None:
    tool = as_tool(Desk().lend)
    assert list(tool.parameters["properties"]) == ["book"]
    assert tool.call is not None
    assert tool.call(book="Emma") == "lent Emma"


def test_what_a_partial_has_bound_is_not_asked_of_the_model() -> None:
    tool = as_tool(functools.partial(functools.partial(search, limit=3), kind="news"))
    assert tool.name == "search"
    assert list(tool.parameters["properties"]) == ["query"]
    assert tool.call is not None
    assert tool.call(query="a") == "a 3 news"
    assert list(as_tool(functools.partial(search, "a")).parameters["properties"]) == ["kind", "limit"]


def test_a_coroutine_function_is_a_tool() -> None:
    async def fetch(url: str) -> str:
        return url

    assert as_tool(fetch).name == "fetch"


def test_a_tool_is_itself() -> None:
    tool = Tool("a", "b", {})
    assert as_tool(tool) is tool


def test_a_function_without_parameters_has_no_properties() -> None:
    def now() -> str:
        return "12:00"

    assert parameters_of(now) == {"type": "object", "properties": {}}


def test_enums_models_dataclasses_and_typed_dicts_are_described_in_place_and_without_titles() -> None:
    def buy(
        colour: Colour, order: Order, to: list[Address], backup: Address | None, counts: dict[str, int]
    ) -> None: ...

    parameters = parameters_of(buy)
    text = json.dumps(parameters)
    assert "$ref" not in text
    assert "$defs" not in text
    properties = parameters["properties"]
    assert properties["colour"] == {"type": "string", "enum": ["red", "blue"]}
    # A field called title is no noise.
    assert list(properties["order"]["properties"]) == ["title", "where"]
    assert properties["order"]["properties"]["where"]["properties"]["y"] == {"type": "integer", "default": 0}
    assert properties["to"]["items"]["required"] == ["city"]
    assert list(properties["to"]["items"]["properties"]) == ["city", "zip"]
    assert {"type": "null"} in properties["backup"]["anyOf"]
    assert properties["counts"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert '"title": "' not in text


def test_a_type_that_contains_itself_keeps_its_definition() -> None:
    def grow(root: Node, other: Node) -> None: ...

    parameters = parameters_of(grow)
    assert list(parameters["$defs"]) == ["Node"]
    assert parameters["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_names_that_pydantic_itself_uses_are_fine_as_parameters() -> None:
    def copy(json: str, model_config: int, schema: str = "x", _private: bool = False) -> None: ...

    assert sorted(as_tool(copy).parameters["properties"]) == ["_private", "json", "model_config", "schema"]


def test_a_description_in_the_annotation_wins_over_the_docstring() -> None:
    def f(a: Annotated[int, Field(description="from the type", ge=0)], b: Annotated[int, Field(le=3)]) -> None:
        """F.

        :param a: from the docstring
        :param b: also from there
        """

    properties = parameters_of(f)["properties"]
    assert properties["a"] == {"type": "integer", "description": "from the type", "minimum": 0}
    assert properties["b"] == {"type": "integer", "description": "also from there", "maximum": 3}


def test_a_default_of_none_allows_null_and_one_that_json_cannot_hold_is_left_out() -> None:
    marker = object()

    def f(a: int = None, b: Any = marker) -> None: ...  # type: ignore[assignment]  # noqa: RUF013

    properties = parameters_of(f)["properties"]
    assert {"type": "null"} in properties["a"]["anyOf"]
    assert properties["b"] == {}


def _untyped(a, b: int):  # type: ignore[no-untyped-def]
    ...


def _variadic(*items: int) -> None: ...


def _keywords(**options: int) -> None: ...


def _positional(first: int, /, second: int) -> None: ...


def _unknown_type(where: Point, what: random.Random) -> None: ...


def _callback(when_done: Callable[[int], None]) -> None: ...


@pytest.mark.parametrize(
    ("function", "parameter", "advice"),
    [
        (_untyped, "'a'", "annotation"),
        (_variadic, "'items'", "list"),
        (_keywords, "'options'", "dict"),
        (_positional, "'first'", "'/'"),
        (_unknown_type, "'what'", "dataclass"),
        (_callback, "'when_done'", "dataclass"),
    ],
)
def test_a_parameter_that_cannot_be_described_is_named_with_what_to_do(
    function: object, parameter: str, advice: str
) -> None:
    with pytest.raises(TypeError, match=f"parameter {parameter} of tool") as raised:
        as_tool(function)
    assert advice in str(raised.value)


@pytest.mark.parametrize("wrong", [3, "search", None, Point, len, ["a"]])
def test_what_is_no_tool_is_a_type_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        as_tool(wrong)


@pytest.mark.parametrize("name", ["", "a b", "a.b", "é", "x" * 65, "a\n"])
def test_a_name_that_templates_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="1 to 64 letters, digits"):
        Tool(name, "", {})


def test_a_lambda_has_no_name_to_be_called_by() -> None:
    with pytest.raises(ValueError, match="<lambda>"):
        as_tool(lambda: 3)


def test_openai_s_shape_has_no_function_behind_it() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = as_tool({"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}})
    assert (tool.name, tool.description, tool.parameters, tool.call) == ("f", "d", parameters, None)
    assert as_tool({"type": "function", "function": {"name": "f"}}).schema["function"] == {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "f"},
        {"type": "web_search"},
        {"type": "function", "function": {"description": "no name"}},
        {"type": "function", "function": {"name": "f", "parametres": {}}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}},
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "http://a/b"}}}}},
    ],
)
def test_a_dict_of_another_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        as_tool(wrong)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_is_positive_seconds_or_none(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Tool("f", "", {}, timeout=timeout)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools are called 'search'"):
        as_tools([search, Tool("search", "", {})])


def test_one_tool_alone_is_no_list_of_tools() -> None:
    with pytest.raises(TypeError, match=r"tools=\[...\]"):
        as_tools(search)  # type: ignore[arg-type]


def shuffled(value: Any, order: random.Random) -> Any:
    """The same JSON with the keys of every object in another order, and `required` too."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        made = {key: shuffled(value[key], order) for key in keys}
        if isinstance(made.get("required"), list):
            order.shuffle(made["required"])
        return made
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


NESTED = {
    "type": "object",
    "description": "what to buy",
    "properties": {
        "zoo": {
            "type": "array",
            "items": {"properties": {"b": {"const": {"q": 1, "a": 2}}, "a": {}}, "type": "object"},
        },
        "arm": {
            "anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}],
            "default": {"y": [1, {"d": 1, "c": 2}]},
        },
        "required": {"type": "string", "enum": ["b", "a"]},
    },
    "required": ["zoo", "arm", "required"],
    "additionalProperties": False,
}


@given(st.randoms(use_true_random=False))
def test_the_same_tools_in_any_order_with_shuffled_keys_give_the_same_text(order: random.Random) -> None:
    plain: list[Any] = [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": NESTED}} for name in "abc"
    ]
    plain.append(as_tool(search).schema)
    mixed = shuffled(plain, order)
    order.shuffle(mixed)

    def text(tools: list[Any]) -> str:
        return json.dumps([tool.schema for tool in as_tools(tools)])

    assert text(mixed) == text(plain)
    assert text([*plain[:3], search]) == text(plain)


def test_the_order_of_an_enum_is_kept() -> None:
    assert as_tool({"type": "function", "function": {"name": "f", "parameters": NESTED}}).schema["function"][
        "parameters"
    ]["properties"]["required"] == {"type": "string", "enum": ["b", "a"]}


def test_changing_a_schema_changes_no_tool() -> None:
    tool = as_tool(search)
    tool.schema["function"]["parameters"]["properties"].clear()
    assert "query" in tool.schema["function"]["parameters"]["properties"]
