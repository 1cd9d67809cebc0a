"""Which format a template is for, and texts in each format."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentkv.chat.call_formats import CALL_FORMATS, format_of, markers, render_calls
from agentkv.tool_calls import CallFormat
from support.written_calls import parse_calls, render_call

CALL = '{"name": "look_up", "arguments": {"word": "x"}}'
LLAMA_CALL = '{"name": "look_up", "parameters": {"word": "x"}}'
QWEN_TOOLS = (
    '<tools>\n{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}\n</tools>\n'
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
by_name = {call_format.name: call_format for call_format in CALL_FORMATS}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=5,
)
arguments_of_calls = st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=6), json_values, max_size=3)
calls_of_a_reply = st.lists(st.tuples(st.sampled_from(["look_up", "größer-2", "f"]), arguments_of_calls), min_size=1)


@pytest.mark.parametrize(
    ("rendered", "name", "before", "after", "key", "listed"),
    [
        (f"<|im_start|>assistant\n<tool_call>\n{CALL}\n</tool_call><|im_end|>\n", "tool_call", "<tool_call>\n",
         "\n</tool_call>", "arguments", False),
        (f"assistant\n<tool_call>{CALL}</tool_call>", "tool_call", "<tool_call>", "</tool_call>", "arguments", False),
        (f"<|im_start|>assistant<functioncall> {CALL} </functioncall>", "tool_call", "<functioncall> ",
         " </functioncall>", "arguments", False),
        (f"<|assistant|><|tool_call|>[{CALL}]<|/tool_call|>", "tool_call", "<|tool_call|>", "<|/tool_call|>",
         "arguments", True),
        (f"<s>[INST] hi[/INST][TOOL_CALLS] [{CALL[:-1]}, \"id\": \"abcdefghi\"}}]</s>", "bracket", "[TOOL_CALLS] ", "",
         "arguments", True),
        ('[INST]hi[/INST][TOOL_CALLS]look_up[ARGS]{"word": "x"}</s>', "bracket", "[TOOL_CALLS]", "", "arguments", True),
        (f"<|start_header_id|>assistant<|end_header_id|>\n\n{LLAMA_CALL}<|eot_id|>", "parameters", "", "", "parameters",
         False),
        (f"<|end_header_id|>\n\n<|python_tag|>{LLAMA_CALL}<|eom_id|>", "parameters", "<|python_tag|>", "", "parameters",
         False),
        (f"<|assistant|>\n{CALL}<|end|>", "bare", "", "", "arguments", False),
        (f"<|assistant|>\n[{CALL}]<|end|>", "bare", "", "", "arguments", True),
        (f"{QWEN_TOOLS}<|im_end|>\n<|im_start|>assistant\n<|im_end|>", "tool_call", "<tool_call>\n", "\n</tool_call>",
         "arguments", False),
        ("", "tool_call", "<tool_call>\n", "\n</tool_call>", "arguments", False),
    ],
)  # fmt: skip
def test_a_template_is_judged_by_what_it_renders(rendered, name, before, after, key, listed):
    assert format_of(rendered, "look_up") == CallFormat(name, before, after, key, listed)


def test_the_tools_shown_before_the_call_do_not_hide_it():
    rendered = f"{QWEN_TOOLS}<|im_start|>assistant\n<tool_call> {CALL} </tool_call><|im_end|>"
    assert format_of(rendered, "look_up").before == "<tool_call> "


@given(calls=calls_of_a_reply, call_format=st.sampled_from(CALL_FORMATS))
def test_calls_rendered_in_a_format_are_read_back(calls, call_format):
    text = render_calls(calls, call_format)
    parsed = parse_calls(text, call_format, tool_names=["look_up"], id_seed=1)
    assert [(call.name, call.arguments, call.error) for call in parsed.calls] == [(*call, None) for call in calls]
    assert parsed.text == ""


@given(arguments=arguments_of_calls, call_format=st.sampled_from(CALL_FORMATS))
def test_a_rendered_call_shows_its_own_format(arguments, call_format):
    rendered = f"<|im_start|>assistant\n{render_call('look_up', arguments, call_format)}<|im_end|>"
    assert format_of(rendered, "look_up") == call_format


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tool_call", ("<tool_call>",)),
        ("bracket", ("[TOOL_CALLS]", "<tool_call>")),
        ("parameters", ("<|python_tag|>", "<tool_call>")),
        ("bare", ("<tool_call>",)),
    ],
)
def test_markers_begin_with_the_formats_own(name, expected):
    assert markers(by_name[name]) == expected


def test_one_call_is_rendered_as_documented():
    assert render_call("f", {"a": "ü"}, by_name["tool_call"]) == (
        '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
    )
    assert render_call("f", {}, by_name["bracket"]) == '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    assert render_call("f", {}, by_name["parameters"]) == '{"name": "f", "parameters": {}}'
    assert json.loads(render_calls([("f", {}), ("g", {})], by_name["bare"]))[1]["name"] == "g"
