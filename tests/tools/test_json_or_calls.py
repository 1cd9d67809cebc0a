"""Under one mask an answer is a call of a tool or JSON by a schema, and is read as what it is."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from agentkv.chat import ReadTurn, ReasoningMarkers, TurnReader
from agentkv.chat.call_formats import CALL_FORMATS
from agentkv.errors import GrammarDeadEnd
from agentkv.tool_calls import CallFormat
from agentkv.tools import Tool, check_call, json_mask, json_or_calls_mask
from support.grammar_walks import Talker, chatty, marked_tokenizer, uniform, walk

TOKENIZER = marked_tokenizer()
END = frozenset({TOKENIZER.convert_tokens_to_ids("<|end|>")})
VOCAB = len(TOKENIZER)
FORMATS = {one.name: one for one in CALL_FORMATS}
BARE = [one for one in CALL_FORMATS if not one.before]
THOUGHTS = ReasoningMarkers("<think>", "</think>")

ADD = Tool("add", "", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
SAY = Tool("add_all", "", {"type": "object", "properties": {"name": {"enum": ["x", "<tool_call>"]}}})
TOOLS = {tool.name: tool for tool in (ADD, SAY)}


def answer(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)[:1]}


NAMES = {"enum": ["add", "ada", "add_all"]}
SCHEMAS: dict[str, Any] = {
    "any object": None,
    "anything": {},
    "list": {"type": "array", "items": {"type": "boolean"}},
    "text": {"enum": ["<tool_call>", "<think>", "add"]},
    "object": answer(n={"type": "integer"}, name=NAMES),
    "marker": answer(quoted={"enum": ["<tool_call>\n{", "</think>", "[TOOL_CALLS]["]}),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "named": answer(name=NAMES, age={"type": "integer"}),
    "like a call": answer(name=NAMES, arguments={"anyOf": [{"type": "null"}, {"type": "object"}]}),
    "a call of another tool": answer(name={"const": "sub"}, arguments=answer(a={"type": "integer"})),
    "one call": {"const": {"name": "add", "arguments": {"a": 1}}},
    "no call": {"enum": [{"name": "add", "arguments": {"a": "1"}}, {"name": "add"}]},
}


def told(tool_call: Any) -> bool:
    return check_call(tool_call, TOOLS, {}).error is None


def read(text: str, call_format: CallFormat, order: random.Random, *, inside: bool = False) -> ReadTurn:
    reader = TurnReader(
        reasoning=THOUGHTS,
        inside_reasoning=inside,
        call_format=call_format,
        tool_names=TOOLS,
        id_seed=1,
        is_call=told,
    )
    while text:
        length = order.randint(1, 9)
        reader.feed(text[:length], ())
        text = text[length:]
    return reader.finish()[1]


def is_one(value: Any, call_format: CallFormat) -> bool:
    """Whether it is an object that calls one of the tools, by the tools' own schemas."""
    key = call_format.arguments_key
    if not isinstance(value, dict) or value.get("name") not in TOOLS or set(value) != {"name", key}:
        return False
    return Draft202012Validator(
        {"additionalProperties": False, **TOOLS[value["name"]].parameters, "type": "object"}
    ).is_valid(value[key])


def written(schema: str, call_format: CallFormat, order: random.Random, talker: Talker = uniform) -> str:
    mask = json_or_calls_mask(list(TOOLS.values()), call_format, SCHEMAS[schema], TOKENIZER, VOCAB, END)(0)
    return str(TOKENIZER.decode(walk(mask, TOKENIZER, order, talker, END, 20_000), clean_up_tokenization_spaces=False))


def call_text(call_format: CallFormat, name: str, arguments: dict[str, Any]) -> str:
    body = json.dumps({"name": name, call_format.arguments_key: arguments})
    return call_format.before + (f"[{body}]" if call_format.listed else body) + call_format.after


def accepts(schema: dict[str, Any] | None, call_format: CallFormat, text: str) -> bool:
    mask = json_or_calls_mask([ADD, SAY], call_format, schema, TOKENIZER, VOCAB, END)(0)
    try:
        may = mask.allowed(TOKENIZER.encode(text, add_special_tokens=False))
    except GrammarDeadEnd:
        return False
    assert may is not None
    return bool(may[list(END)].all())


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(SCHEMAS)),
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from([uniform, chatty]),
    st.randoms(use_true_random=False),
)
def test_any_choices_make_a_call_or_the_value_and_are_read_as_that(
    schema: str, form: str, talker: Talker, order: random.Random
) -> None:
    call_format = FORMATS[form]
    text = written(schema, call_format, order, talker)
    turn = read(text, call_format, order)
    calls = text.startswith(call_format.before) if call_format.before else is_one(json.loads(text), call_format)
    if calls:
        [call] = turn.calls
        assert (turn.text, told(call)) == ("", True)
        body = text.removeprefix(call_format.before).removesuffix(call_format.after)
        value = json.loads(body)[0] if call_format.listed else json.loads(body)
        assert value == {"name": call.name, call_format.arguments_key: call.arguments}
    else:
        assert turn.calls == ()
        assert turn.text == text
        if SCHEMAS[schema] is not None:
            Draft202012Validator(SCHEMAS[schema]).validate(json.loads(turn.text))
    assert turn.reasoning is None


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("schema", sorted(SCHEMAS))
def test_every_call_may_be_written_beside_every_schema(schema: str, form: str) -> None:
    call_format = FORMATS[form]
    for name, arguments in (("add", {"a": -3}), ("add_all", {}), ("add_all", {"name": "<tool_call>"})):
        text = call_text(call_format, name, arguments)
        assert accepts(SCHEMAS[schema], call_format, text)
        [call] = read(text, call_format, random.Random(0)).calls
        assert (call.name, call.arguments) == (name, arguments)
    assert not accepts(SCHEMAS["list"], call_format, call_text(call_format, "add", {"a": "x"}))
    assert not accepts(SCHEMAS["list"], call_format, call_text(call_format, "ad", {"a": 1}))


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("any object", '{"name": "Ada", "born": 1815}'),
        ("any object", '{"nam": 1}'),
        ("anything", "true"),
        ("anything", '"<tool_call>"'),
        ("list", "[true, false]"),
        ("list", "[]"),
        ("text", '"<tool_call>"'),
        ("object", '{"n": 1, "name": "add"}'),
        ("map", '{"name": 3, "arguments": 4}'),
        ("map", "{}"),
        ("named", '{"name": "add"}'),
        ("named", '{"name": "add", "age": 3}'),
        ("like a call", '{"name": "add", "arguments": null}'),
        ("like a call", '{"name": "add", "arguments": {}}'),
        ("a call of another tool", '{"name": "sub", "arguments": {"a": 1}}'),
        ("no call", '{"name": "add", "arguments": {"a": "1"}}'),
    ],
)
def test_a_value_may_be_written_beside_calls_and_is_no_call(schema: str, text: str, form: str) -> None:
    assert accepts(SCHEMAS[schema], FORMATS[form], text)
    turn = read(text, FORMATS[form], random.Random(len(text)))
    assert (turn.text, turn.calls, turn.reasoning) == (text, (), None)


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("any object", '{"name": "add", "OTHER": {"a": 1}, "why": 2}'),
        ("any object", '{"name": "add", "OTHER": {"a": 1}}'),
        ("anything", '{"name": "add", "OTHER": {"a": 1}}'),
    ],
)
def test_what_resembles_a_call_but_is_not_written_as_the_formats_calls_is_the_value(
    schema: str, text: str, form: str
) -> None:
    other = {"arguments": "parameters", "parameters": "arguments"}[FORMATS[form].arguments_key]
    text = text.replace("OTHER", other)
    assert accepts(SCHEMAS[schema], FORMATS[form], text)
    turn = read(text, FORMATS[form], random.Random(len(text)))
    assert (turn.text, turn.calls, turn.reasoning) == (text, (), None)


def test_a_constant_that_another_format_would_call_with_is_the_value() -> None:
    text = '{"name": "add", "arguments": {"a": 1}}'
    assert accepts(SCHEMAS["one call"], FORMATS["parameters"], text)
    assert read(text, FORMATS["parameters"], random.Random(0)).calls == ()
    [call] = read(text, FORMATS["bare"], random.Random(0)).calls
    assert call.arguments == {"a": 1}


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_both_come_where_the_model_may_choose(form: str) -> None:
    kinds = {
        bool(read(written("list", FORMATS[form], random.Random(n)), FORMATS[form], random.Random(n)).calls)
        for n in range(20)
    }
    assert kinds == {True, False}


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_reasoning_that_the_prompt_opened_is_closed_first(form: str) -> None:
    both = json_or_calls_mask([ADD], FORMATS[form], SCHEMAS["list"], TOKENIZER, VOCAB, END, closes="</think>")
    value = json_mask(SCHEMAS["list"], TOKENIZER, VOCAB, END, closes="</think>")
    for number, mask in enumerate([both(0), both(0), both(0), value(0)]):
        order = random.Random(number)
        text = str(TOKENIZER.decode(walk(mask, TOKENIZER, order, uniform, END, 2000)))
        assert text.startswith("\n</think>\n\n")
        turn = read(text, FORMATS[form], order, inside=True)
        assert turn.reasoning == ""
        if turn.calls:
            assert (turn.text, [told(call) for call in turn.calls]) == ("", [True])
        else:
            Draft202012Validator(SCHEMAS["list"]).validate(json.loads(turn.text))


def test_without_tools_it_is_the_value_alone() -> None:
    mask = json_or_calls_mask([], BARE[0], SCHEMAS["list"], TOKENIZER, VOCAB, END)(0)
    assert isinstance(json.loads(TOKENIZER.decode(walk(mask, TOKENIZER, random.Random(0), uniform, END, 100))), list)
