"""What is a call, what is a malformed one, and what is text, in the formats that models write."""

from __future__ import annotations

import json

import pytest

from agentkv.chat.call_formats import CALL_FORMATS, render_calls
from agentkv.chat.reader import TurnReader
from support.written_calls import parse_calls

TOOL_CALL, BRACKETED, PARAMETERS, BARE = CALL_FORMATS
ADD = '{"name": "add", "arguments": {"a": 1}}'
SUB = '{"name": "sub", "arguments": {}}'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1}}'
LLAMA_SUB = '{"name": "sub", "parameters": {}}'


def parse(text, call_format=TOOL_CALL, tool_names=("add", "sub")):
    """The finished text's calls, which are those of the text as it comes."""
    parsed = parse_calls(text, call_format, tool_names=tool_names, id_seed=3)
    reader = TurnReader(
        reasoning=None, inside_reasoning=False, call_format=call_format, tool_names=tool_names, id_seed=3
    )
    for character in text:
        reader.feed(character, ())
    assert reader.finish()[1] == parsed
    return parsed


def named(parsed):
    return [call.name for call in parsed.calls]


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        (TOOL_CALL, f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{SUB}\n</tool_call>"),
        (TOOL_CALL, f"<tool_call>{ADD}{SUB}</tool_call>"),
        (TOOL_CALL, f"<tool_call>[{ADD}, {SUB}]</tool_call>"),
        (TOOL_CALL, f"<tool_call>{ADD}<tool_call>{SUB}"),
        (TOOL_CALL, f"[{ADD}, {SUB}]"),
        (BRACKETED, f"[TOOL_CALLS][{ADD}, {SUB}]"),
        (BRACKETED, f"[TOOL_CALLS] [{ADD[:-1]}, \"id\": \"abcdefghi\"}}, {SUB}]"),
        (BRACKETED, '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]sub{}'),
        (BRACKETED, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{}'),
        (BRACKETED, f"<tool_call>{ADD}</tool_call><tool_call>{SUB}</tool_call>"),
        (PARAMETERS, f"{LLAMA_ADD}; {LLAMA_SUB}"),
        (PARAMETERS, f"{LLAMA_ADD}\n{LLAMA_SUB}"),
        (PARAMETERS, f"<|python_tag|>{LLAMA_ADD}; {LLAMA_SUB}"),
        (PARAMETERS, f"<tool_call>{ADD}</tool_call><tool_call>{SUB}</tool_call>"),
        (BARE, f"[{ADD}, {SUB}]"),
        (BARE, f"```json\n[{ADD},\n {SUB}]\n```\n"),
        (BARE, f"```\n[{ADD}, {SUB}]"),
    ],
)  # fmt: skip
def test_parallel_calls_are_read_in_order_and_nothing_is_left_as_text(call_format, text):
    parsed = parse(text, call_format)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [
        ("add", {"a": 1}, None),
        ("sub", {}, None),
    ]
    assert parsed.text == ""


def test_text_around_a_call_stays_text():
    parsed = parse(f"  I add.\n\n<tool_call>\n{ADD}\n</tool_call>\n\nThen I wait.\n")
    assert parsed.text == "  I add.\nThen I wait.\n"
    assert named(parsed) == ["add"]


def test_bare_json_beside_a_marked_call_is_text():
    parsed = parse(f"<tool_call>{ADD}</tool_call>\n{SUB}")
    assert (parsed.text, named(parsed)) == (SUB, ["add"])


def test_text_after_a_call_without_closing_marker_stays_text():
    parsed = parse(f"<tool_call>\n{ADD}\nThen I wait.")
    assert (parsed.text, named(parsed), parsed.calls[0].error) == ("Then I wait.", ["add"], None)


def test_text_after_python_tag_calls_keeps_its_separator():
    parsed = parse(f"<|python_tag|>{LLAMA_ADD}; that is all", PARAMETERS)
    assert (parsed.text, named(parsed)) == ("; that is all", ["add"])
    parsed = parse(f"<|python_tag|>{LLAMA_ADD};; {LLAMA_SUB}", PARAMETERS)
    assert (parsed.text, named(parsed)) == (f";; {LLAMA_SUB}", ["add"])


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_an_unknown_tool_behind_a_marker_is_a_call_without_error(call_format):
    parsed = parse('<tool_call>{"name": "fly", "arguments": {}}</tool_call>', call_format)
    assert [(call.name, call.error) for call in parsed.calls] == [("fly", None)]


@pytest.mark.parametrize(
    ("call_format", "is_call"), [(TOOL_CALL, False), (BRACKETED, False), (PARAMETERS, True), (BARE, True)]
)
def test_a_bare_unknown_tool_is_a_call_only_where_calls_stand_bare(call_format, is_call):
    text = '{"name": "fly", "arguments": {}}'
    parsed = parse(text, call_format)
    assert (named(parsed), parsed.text) == ((["fly"], "") if is_call else ([], text))


@pytest.mark.parametrize(
    "text",
    [
        f"Here: {ADD}",
        f"{ADD} there",
        f"{ADD}\n{SUB}",
        f"[{ADD}, 1]",
        f"[{ADD},]",
        "[]",
        "{}",
        '{"name": "add"}',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "add", "arguments": {"a": 1}',
        "{'name': 'add', 'arguments': {}}",
        f"```json\n{ADD}\n```\nThat adds.",
        f"````\n{ADD}\n````",
        f"```json\n{ADD} and\n```",
        "```python\nprint(1)\n```",
        "[1] says so",
    ],
)
@pytest.mark.parametrize("call_format", [TOOL_CALL, BRACKETED, BARE])
def test_json_that_is_not_wholly_calls_is_text(call_format, text):
    parsed = parse(text, call_format)
    assert (parsed.text, parsed.calls) == (text, ())


def test_bare_arguments_of_the_wrong_kind_are_a_malformed_call():
    call = parse('{"name": "add", "arguments": [1]}', BARE).calls[0]
    assert call.name == "add"
    assert call.error is not None
    assert "no object" in call.error


@pytest.mark.parametrize("call_format", CALL_FORMATS)
def test_without_tools_nothing_is_a_call(call_format):
    text = f"<tool_call>{ADD}</tool_call>"
    assert parse(text, call_format, ()).text == text


@pytest.mark.parametrize(
    ("inner", "name", "reason"),
    [
        ('{"name": "add", "arguments": {"a": 1,}}', "add", "after the comma"),
        ("{'name': 'add', 'arguments': {}}", "", "double quotes"),
        ('{"name": "add", "arguments": {"a": \'x\'}}', "add", "wanted a value"),
        ('{"name": "add", "arguments": {"a": 1}', "add", "wanted a comma or the end"),
        (ADD + "}", "add", "goes on after its JSON"),
        ('{"arguments": {"a": 1}}', "", "no name"),
        ('{"name": "", "arguments": {}}', "", "no name"),
        ('{"name": 5, "arguments": {}}', "", "no name"),
        ('{"name": "add"}', "add", "no arguments"),
        ('{"name": "add", "arguments": [1]}', "add", "no object"),
        ('{"name": "add", "arguments": null}', "add", "no object"),
        ('{"name": "add", "arguments": "a=1"}', "add", "cannot be read"),
        ('{"name": "add", "arguments": "[1]"}', "add", "no object"),
        ('{"name": "add", "name": "sub", "arguments": {}}', "add", "twice"),
        ('{"name": "add", "arguments": {}, "parameters": {}}', "add", "twice"),
        ('{"name": "add", "arguments": {"a": 1e999}}', "add", "cannot be read"),
        ('{"name": "add", "arguments": {"a": NaN}}', "add", "wanted a value"),
        ('{"name": "add", "arguments": {"a": "\\ud800"}}', "add", "surrogate"),
        ('{"name": "\\ud800", "arguments": {}}', "", "no name"),
        (
            '{"name": "add", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
            "add",
            "nested more than 100 deep",
        ),
        ("add(a=1)", "", "does not begin with {"),
        ("[]", "", "does not begin with {"),
        ("", "", "does not begin with {"),
    ],
)
def test_a_malformed_call_says_what_was_wanted_and_what_there_was(inner, name, reason):
    parsed = parse(f"<tool_call>\n{inner}\n</tool_call>")
    [call] = parsed.calls
    assert parsed.text == ""
    assert (call.name, call.arguments, call.raw) == (name, {}, inner)
    assert call.error is not None
    assert reason in call.error
    assert 'Wanted {"name": …, "arguments": {…}}; there was ' in call.error
    assert len(call.error) < 300


@pytest.mark.parametrize(
    ("call_format", "text", "name"),
    [
        (TOOL_CALL, "<tool_call>", ""),
        (TOOL_CALL, '<tool_call>\n{"name": "ad', ""),
        (TOOL_CALL, '<tool_call>\n{"name": "add", "arguments": {"a": 1', "add"),
        (BRACKETED, "[TOOL_CALLS]add", ""),
        (BRACKETED, '[TOOL_CALLS]add{"a": ', "add"),
        (BRACKETED, '[TOOL_CALLS][{"name": "add", "argum', "add"),
        (PARAMETERS, '<|python_tag|>{"name": "add", "parameters": ', "add"),
    ],
)
def test_a_call_that_was_cut_off_is_malformed(call_format, text, name):
    parsed = parse(text, call_format)
    [call] = parsed.calls
    assert (parsed.text, call.name) == ("", name)
    assert call.error is not None
    assert "ended inside it" in call.error


def test_a_closing_marker_that_was_cut_off_is_no_text():
    parsed = parse(f"<tool_call>{ADD}\n</tool_ca")
    assert (parsed.text, named(parsed), parsed.calls[0].error) == ("", ["add"], None)


def test_arguments_given_as_a_string_of_json_are_read():
    call = parse('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>').calls[0]
    assert (call.arguments, call.error) == ({"a": 1}, None)


def test_either_key_of_arguments_is_read_in_every_format():
    assert parse(f"<tool_call>{LLAMA_ADD}</tool_call>").calls[0].arguments == {"a": 1}
    assert parse(ADD, PARAMETERS).calls[0].arguments == {"a": 1}


def test_markers_inside_of_arguments_end_nothing():
    inner = '{"name": "add", "arguments": {"a": "</tool_call> <tool_call>"}}'
    [call] = parse(f"<tool_call>{inner}</tool_call>").calls
    assert call.arguments == {"a": "</tool_call> <tool_call>"}


def test_an_unclosed_quote_does_not_swallow_the_next_call():
    parsed = parse(
        f'<tool_call>{{"name": "sub", "arguments": {{"a": "x}}}}</tool_call> and <tool_call>{ADD}</tool_call>'
    )
    assert [(call.name, call.error is None) for call in parsed.calls] == [("sub", False), ("add", True)]
    assert parsed.text == "and"


def test_an_unclosed_quote_that_is_cut_off_ends_at_the_closing_marker_too():
    parsed = parse('<tool_call>{"name": "sub", "arguments": {"a": "x}}</tool_call> and so on')
    assert (named(parsed), parsed.text) == (["sub"], "and so on")


def test_a_broken_call_without_closing_marker_ends_at_the_next_call():
    parsed = parse(f"<tool_call>{{bad <tool_call>{ADD}</tool_call>")
    assert [(call.name, call.error is None) for call in parsed.calls] == [("", False), ("add", True)]


@pytest.mark.parametrize("rest", [",]", "", ",", ", 1]", f" {SUB}]"])
def test_the_good_calls_of_a_broken_list_are_kept_beside_the_malformed_one(rest):
    parsed = parse(f"[TOOL_CALLS][{ADD}{rest}", BRACKETED)
    assert [(call.name, call.error is None) for call in parsed.calls] == [("add", True), ("", False)]
    assert parsed.text == ""


@pytest.mark.parametrize("call_format", CALL_FORMATS, ids=lambda one: one.name)
def test_a_thousand_calls_of_one_reply_stand_in_their_order(call_format):
    text = render_calls([("add", {"a": number}) for number in range(1000)], call_format)
    calls = parse(text, call_format).calls
    assert [call.arguments["a"] for call in calls] == list(range(1000))
    assert len({call.id for call in calls}) == 1000


@pytest.mark.parametrize(("levels", "reason"), [(99, None), (100, "nested more than 100 deep")])
@pytest.mark.parametrize("in_text", [False, True])
def test_arguments_may_be_nested_a_hundred_deep(levels, reason, in_text):
    arguments = f'{{"a": {"[" * levels}{"]" * levels}}}'
    [call] = parse(
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(arguments) if in_text else arguments}}}'
    ).calls
    assert (call.error is None) == (reason is None)
    assert (reason or "") in (call.error or "")


@pytest.mark.parametrize("digits", [4000, 5000])
def test_a_number_of_any_length_is_read_or_makes_its_call_malformed(digits):
    [call] = parse(f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * digits}}}}}</tool_call>').calls
    assert (call.error is None) == (digits == 4000)


def test_what_is_nested_beside_the_arguments_is_passed_over():
    [call] = parse(f'<tool_call>{{"x": {"[" * 20_000}{"]" * 20_000}, "name": "add", "arguments": {{"a": 1}}}}').calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, None)


def test_of_a_key_that_is_there_twice_the_last_counts():
    [call] = parse('<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>').calls
    assert call.arguments == {"a": 2}
