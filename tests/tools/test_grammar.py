"""Under a mask any sequence of choices is one well-formed call that ends."""

from __future__ import annotations

import datetime
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentkv.errors import ConfigError, GrammarDeadEnd
from agentkv.tool_calls import CallFormat
from agentkv.tools import Tool, as_tools, forced_call_mask, json_mask, validate
from support.grammar_walks import Talker, chatty, marked_tokenizer, piecewise_tokenizer, uniform, walk

PLAIN = CallFormat("tool_call", before="<tool_call>\n", after="\n</tool_call>")
MARKED = CallFormat("marked", before="<call>", after="", arguments_key="parameters")
LISTED = CallFormat("listed", before="[TOOL_CALLS]", after="", listed=True)
BARE = CallFormat("bare", before="", after="")
FORMATS = [PLAIN, MARKED, LISTED, BARE]

TOKENIZER = marked_tokenizer()
END = frozenset({TOKENIZER.convert_tokens_to_ids("<|end|>"), TOKENIZER.convert_tokens_to_ids("<s>")})
VOCAB = len(TOKENIZER) + 50

WORD = st.text('abé/"\\n ', max_size=4)
SMALL = st.integers(0, 4)


def _string(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string", "maxLength": draw(st.integers(2, 9))}
    kind = draw(st.sampled_from(["plain", "least", "pattern", "format"]))
    if kind == "least":
        schema["minLength"] = draw(st.integers(0, 2))
    elif kind == "pattern":
        schema["pattern"] = draw(st.sampled_from(["^[a-c]*$", "x", '^"\\\\?$', "^é+"]))
    elif kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "uuid", "ipv4", "time", "email", "odd"]))}
    return schema


def _number(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    low = draw(st.integers(-200, 200) | st.floats(-3, 3).map(lambda number: round(number, 2)))
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["minimum", "exclusiveMinimum"]))] = low
    if draw(st.booleans()):
        schema[draw(st.sampled_from(["maximum", "exclusiveMaximum"]))] = low + draw(st.integers(2, 300))
    if schema["type"] == "integer" and not schema.keys() & {"minimum", "exclusiveMinimum"} and draw(st.booleans()):
        schema["multipleOf"] = draw(st.integers(1, 7))
    return schema


def _array(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    least = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "minItems": least, "maxItems": least + draw(st.integers(0, 2))}
    if draw(st.booleans()):
        schema["items"] = draw(inner)
        if draw(st.booleans()):
            schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    else:
        schema |= {"items": {"enum": draw(st.lists(WORD, min_size=4, max_size=5, unique=True))}, "uniqueItems": True}
    return schema


def _object(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(WORD, max_size=3, unique=True))
    schema: dict[str, Any] = {"type": "object", "properties": {name: draw(inner) for name in names}}
    schema["required"] = [name for name in names if draw(st.booleans())]
    if draw(st.booleans()):
        schema["additionalProperties"] = draw(st.just(False) | inner)
    return schema


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "number", "boolean", "null", "enum", "const"]
    kind = draw(st.sampled_from([*kinds, "array", "object", "anyOf", "types"] if depth else kinds))
    if kind == "string":
        return _string(draw)
    if kind == "number":
        return _number(draw)
    if kind == "enum":
        return {"enum": draw(st.lists(WORD | st.integers() | st.none() | st.lists(WORD, max_size=2), min_size=1))}
    if kind == "const":
        return {"const": draw(WORD | st.integers() | st.dictionaries(WORD, st.booleans(), max_size=2))}
    if kind == "array":
        return _array(draw, schemas(depth - 1))
    if kind == "object":
        return _object(draw, schemas(depth - 1))
    if kind == "anyOf":
        return {"anyOf": draw(st.lists(schemas(depth - 1), min_size=1, max_size=3)), "description": "any"}
    if kind == "types":
        return {"type": draw(st.lists(st.sampled_from(["boolean", "null", "integer"]), min_size=1, unique=True))}
    return {"type": kind}


def call_in(text: str, call_format: CallFormat) -> dict[str, Any]:
    """The call that the text holds, and nothing beside it."""
    assert text.startswith(call_format.before)
    assert text.endswith(call_format.after)
    body = json.loads(text[len(call_format.before) : len(text) - len(call_format.after)])
    if call_format.listed:
        [body] = body
    assert list(body) == ["name", call_format.arguments_key]
    assert isinstance(body, dict)
    return body


def forced(tools: list[Tool], call_format: CallFormat, order: random.Random, talker: Talker, most: int) -> str:
    mask = forced_call_mask(tools, call_format, TOKENIZER, VOCAB, END)(0)
    output = walk(mask, TOKENIZER, order, talker, END, most)
    return str(TOKENIZER.decode(output, clean_up_tokenization_spaces=False))


def json_by(schema: dict[str, Any] | None, talker: Talker = uniform, seed: int = 0, most: int = 20_000) -> Any:
    mask = json_mask(schema, TOKENIZER, VOCAB, END)(0)
    return json.loads(TOKENIZER.decode(walk(mask, TOKENIZER, random.Random(seed), talker, END, most)))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(WORD, schemas(), max_size=3),
    st.sampled_from(FORMATS),
    st.sampled_from([uniform, chatty]),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_any_choices_make_one_call_that_ends_and_fits_its_schema(
    properties: dict[str, Any], call_format: CallFormat, talker: Talker, order: random.Random, data: st.DataObject
) -> None:
    required = [name for name in properties if data.draw(st.booleans())]
    parameters = {"type": "object", "properties": properties, "required": required}
    tools = [Tool("get", "", parameters), Tool("get_all", "", {})]
    call = call_in(forced(tools, call_format, order, talker, most=20_000), call_format)
    arguments = call[call_format.arguments_key]
    [tool] = [tool for tool in tools if tool.name == call["name"]]
    assert validate(tool, arguments).error is None
    Draft202012Validator(tool.parameters).validate(arguments)
    assert list(arguments) == [name for name in sorted(properties) if name in arguments]


@pytest.mark.parametrize("call_format", FORMATS, ids=lambda one: one.name)
def test_a_tool_without_parameters_has_one_spelling(call_format: CallFormat) -> None:
    text = forced([Tool("now", "", {})], call_format, random.Random(0), uniform, most=100)
    inner = f'{{"name": "now", "{call_format.arguments_key}": {{}}}}'
    assert text == call_format.before + (f"[{inner}]" if call_format.listed else inner) + call_format.after


def test_a_marker_that_is_a_token_is_that_token_and_never_within_a_text() -> None:
    marker = TOKENIZER.convert_tokens_to_ids("<call>")
    tool = Tool("say", "", {"properties": {"a": {"type": "string"}}, "required": ["a"]})
    mask = forced_call_mask([tool], MARKED, TOKENIZER, VOCAB, END)(0)
    assert mask.allowed([]).nonzero().flatten().tolist() == [marker]  # type: ignore[union-attr]
    text = TOKENIZER.encode('{"name": "say", "parameters": {"a": "', add_special_tokens=False)
    may = mask.allowed([marker, *text])
    assert may is not None
    added = list(TOKENIZER.added_tokens_decoder)
    assert not may[added].any()
    assert may.sum() > 200


def test_only_the_end_tokens_may_come_at_the_end_and_all_of_them() -> None:
    mask = forced_call_mask([Tool("now", "", {})], BARE, TOKENIZER, VOCAB, END)(0)
    output = TOKENIZER.encode('{"name": "now", "arguments": {}}', add_special_tokens=False)
    for more in ([], [min(END)], [min(END), 5, max(END)]):
        may = mask.allowed([*output, *more])
        assert may is not None
        assert set(may.nonzero().flatten().tolist()) == END
        assert str(may.dtype) == "torch.bool"
        assert may.shape == (VOCAB,)


def test_a_mask_stays_valid_when_a_choice_is_made_anew() -> None:
    tool = Tool("say", "", {"properties": {"a": {"enum": ["left", "right"]}, "b": {"type": "integer"}}})
    factory = forced_call_mask([tool], PLAIN, TOKENIZER, VOCAB, END)
    one, other = factory(0), factory(1)
    outputs = [walk(factory(0), TOKENIZER, random.Random(seed), uniform, END, 500) for seed in (1, 2)]
    assert outputs[0] != outputs[1]
    # In any order of asking, each answer is that of a mask that was asked once.
    for length in (0, 30, 3, 41, 12, 40, 41):
        for output in outputs:
            for mask in (one, other):
                expected, found = factory(0).allowed(output[:length]), mask.allowed(output[:length])
                assert expected is not None
                assert found is not None
                assert expected.equal(found)


def test_a_token_that_the_mask_forbids_is_a_dead_end() -> None:
    mask = forced_call_mask([Tool("now", "", {})], BARE, TOKENIZER, VOCAB, END)(0)
    with pytest.raises(GrammarDeadEnd, match="token 3 at place 0"):
        mask.allowed([3])
    with pytest.raises(GrammarDeadEnd, match=f"token {VOCAB - 1} "):
        mask.allowed([VOCAB - 1])
    assert mask.allowed([]) is not None


def test_a_vocabulary_that_cannot_write_the_call_is_a_dead_end() -> None:
    mask = forced_call_mask([Tool("now", "", {})], BARE, TOKENIZER, 5, frozenset({1}))(0)
    with pytest.raises(GrammarDeadEnd, match="the vocabulary has none"):
        mask.allowed([])


def test_a_text_ends_by_itself_however_much_there_is_to_say() -> None:
    assert len(json_by({"type": "string"}, chatty)) == 256
    assert len(json_by({"type": "string", "minLength": 300}, chatty)) == 300
    assert len(json_by({"type": "array", "items": {"type": "boolean"}}, chatty)) <= 8
    assert -(10**15) < json_by({"type": "integer"}, chatty) < 10**15
    assert abs(json_by({"type": "number"}, chatty)) < 10**115


@pytest.mark.parametrize("seed", range(5))
def test_any_object_is_bounded(seed: int) -> None:
    assert isinstance(json_by(None, seed=seed), dict)
    assert isinstance(json_by({"type": "object", "additionalProperties": True}, seed=seed), dict)
    json_by({}, seed=seed)


def test_a_map_keeps_to_its_keys_and_its_values() -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
    for seed in range(10):
        found = json_by(schema, seed=seed)
        assert list(found) in ([], ["a"], ["b"], ["a", "b"])
    found = json_by({"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1}, seed=3)
    assert found
    assert all(isinstance(value, bool) for value in found.values())


def test_a_property_that_is_not_named_never_takes_a_named_one_s_key() -> None:
    schema = {
        "properties": {"a": {"const": 1}},
        "additionalProperties": {"type": "null"},
        "type": "object",
    }
    mask = json_mask(schema, TOKENIZER, VOCAB, END)(0)
    with pytest.raises(GrammarDeadEnd):
        mask.allowed(TOKENIZER.encode('{"a": null', add_special_tokens=False))
    assert mask.allowed(TOKENIZER.encode('{"ab": null', add_special_tokens=False)) is not None


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["name", "children", "next"],
        }
    },
}


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_that_contains_itself_ends(seed: int) -> None:
    Draft202012Validator(TREE).validate(json_by(TREE, seed=seed))


ALL_OF = {
    "allOf": [{"$ref": "#/$defs/named"}, {"properties": {"n": {"minimum": 3}}, "required": ["n"]}],
    "properties": {"n": {"type": "integer", "maximum": 5}},
    "$defs": {"named": {"type": "object", "properties": {"name": {"enum": ["a", "b", 3]}}, "required": ["name"]}},
}
ONE_OF = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"maximum": 9}}, "required": ["kind"]},
        {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]},
        {"type": "string", "maxLength": 3},
    ]
}
TUPLE = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2}


@pytest.mark.parametrize("schema", [ALL_OF, ONE_OF, TUPLE, {"type": "string", "enum": ["a", 3, "b"]}])
@pytest.mark.parametrize("seed", range(4))
def test_schemas_made_of_others_hold_for_what_comes_out(schema: dict[str, Any], seed: int) -> None:
    Draft202012Validator(schema).validate(json_by(schema, seed=seed))


def when(day: datetime.date, at: datetime.datetime, length: datetime.timedelta, share: float, tags: set[str]) -> None:
    """A function whose types JSON writes as text."""


@pytest.mark.parametrize("seed", range(5))
def test_what_a_typed_function_is_given_converts(seed: int) -> None:
    [tool] = as_tools([when])
    call = call_in(forced([tool], BARE, random.Random(seed), uniform, most=20_000), BARE)
    assert validate(tool, call["arguments"]).error is None


@pytest.mark.parametrize(
    ("schema", "feature"),
    [
        ({"type": "string", "pattern": "(?=x)"}, "the pattern '(?=x)' (look-around"),
        ({"type": "string", "pattern": "^b{9}$", "maxLength": 8}, "pattern"),
        ({"not": {"type": "string"}}, "'not' at a"),
        ({"type": "object", "patternProperties": {"x": {}}}, "'patternProperties' at a"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "allows no value"),
        ({"type": "number", "multipleOf": 0.1}, "multipleOf 0.1"),
        ({"type": "string", "enum": [1, 2]}, "allows no value"),
        ({"$ref": "#/nowhere"}, "'#/nowhere'"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "oneOf"),
        ({"type": "array", "uniqueItems": True, "minItems": 2, "items": {"type": "integer"}}, "uniqueItems"),
    ],
)
def test_what_a_grammar_cannot_express_is_said_when_it_is_made(schema: dict[str, Any], feature: str) -> None:
    tool = Tool("odd", "", {"properties": {"a": schema}, "required": ["a"]})
    with pytest.raises(ConfigError, match="tool 'odd'") as raised:
        forced_call_mask([tool], PLAIN, TOKENIZER, VOCAB, END)
    assert feature in str(raised.value)


def test_an_optional_property_that_can_have_no_value_is_left_out() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": []}, "b": {"const": 1}}, "required": ["b"]}
    assert json_by(schema) == {"b": 1}


def test_without_tools_or_an_end_there_is_nothing_to_force() -> None:
    with pytest.raises(ValueError, match="no tools"):
        forced_call_mask([], PLAIN, TOKENIZER, VOCAB, END)
    for ends in (frozenset[int](), frozenset({VOCAB})):
        with pytest.raises(ValueError, match="end tokens"):
            json_mask(None, TOKENIZER, VOCAB, ends)


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    class Slow:
        pass

    with pytest.raises(ConfigError, match="fast tokenizer"):
        json_mask(None, Slow(), VOCAB, END)


def test_pieces_with_spaces_in_front_and_byte_fallback_are_the_text_that_they_decode_to() -> None:
    tokenizer = piecewise_tokenizer()
    ends = frozenset({tokenizer.convert_tokens_to_ids("<|end|>")})
    tool = Tool("say", "", {"properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]})
    for seed in range(10):
        mask = forced_call_mask([tool], BARE, tokenizer, len(tokenizer), ends)(0)
        output = walk(mask, tokenizer, random.Random(seed), uniform, ends, 500)
        assert call_in(tokenizer.decode(output), BARE)["name"] == "say"


@pytest.mark.real_model
@pytest.mark.parametrize("talker", [uniform, chatty])
def test_the_real_tokenizer_writes_calls_whatever_is_chosen(real_model_folder: Path, talker: Talker) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_model_folder)
    ends = frozenset([int(tokenizer.convert_tokens_to_ids("<|im_end|>"))])

    def plan(tasks: list[str], count: int = 3, note: str | None = None) -> None: ...

    tools = as_tools([plan, when])
    factory = forced_call_mask(tools, PLAIN, tokenizer, len(tokenizer), ends)
    for seed in range(2):
        output = walk(factory(0), tokenizer, random.Random(seed), talker, ends, 20_000)
        call = call_in(str(tokenizer.decode(output)), PLAIN)
        [tool] = [tool for tool in tools if tool.name == call["name"]]
        assert validate(tool, call["arguments"]).error is None
