"""What a template cannot say is said in words, in turns that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv.chat import ChatTemplate, normalise
from agentkv.testing import TEMPLATE
from agentkv.testing.tokenizer import chat_tokenizer

ALTERNATING = (
    "{% for m in messages %}"
    "{% set turn = loop.index0 - (1 if messages[0].role == 'system' else 0) %}"
    "{% if m.role != 'system' and m.role != ('user' if turn % 2 == 0 else 'assistant') %}"
    "{{ raise_exception('user and assistant must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
"""Knows system, user and assistant, and the last two by turns alone; no tools."""

ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}>{% endfor %}"
    "{% endfor %}"
)
"""Writes each argument by itself, so arguments must be a mapping."""

TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(chat_tokenizer(), text)


def call(number: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_results_and_what_the_user_says_behind_them_are_one_turn(tools: list[dict[str, Any]]) -> None:
    messages = normalise(
        [
            {"role": "user", "content": "Do both."},
            {"role": "assistant", "tool_calls": [call("1"), call("2")]},
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Done."},
        ]
    )
    rendered = template(ALTERNATING).render(messages, tools=tools, answer=False)
    results = "".join(f"<tool_response>\n{word}\n</tool_response>\n" for word in ("one", "two"))
    assert rendered.endswith(f"[user]{results}And now?[assistant]Done.")


def test_two_messages_of_the_user_stay_two() -> None:
    messages = normalise([{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}])
    text = ALTERNATING.replace("{{ raise_exception('user and assistant must alternate') }}", "")
    assert template(text).render(messages, answer=False) == "[user]One.[user]Two."


RAW = '{"name": "f", "arguments": {"a": 1,'


@pytest.mark.parametrize("text", [TEMPLATE, ALTERNATING])
@pytest.mark.parametrize("arguments", [RAW, '{"a": 1,'])
def test_arguments_that_are_no_json_stay_in_the_prompt(text: str, arguments: str) -> None:
    messages = normalise(
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call("1", arguments)]}]
    )
    rendered = template(text).render(messages, answer=False)
    if text == ALTERNATING:
        assert f"[assistant]<tool_call>\n{RAW}" in rendered
    else:
        assert arguments.replace('"', '\\"') in rendered


def test_a_template_that_takes_arguments_one_by_one_is_given_none_of_a_malformed_call() -> None:
    messages = normalise([{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call("1", RAW)]}])
    assert template(ITEMS).render(messages, answer=False) == "[user]x[assistant]<f>"


# -- templates that know no system role -----------------------------------------------------------------------------

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + ALTERNATING
    + "{% if add_generation_prompt %}[assistant]{% endif %}"
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def said(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("text", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_stand_at_the_head_of_the_users_first_message_where_no_system_text_can_stand(text: str) -> None:
    made = template(text)
    assert not made.traits().knows_system
    rendered = made.render(normalise(said("Hi.", "Yes?", "Call f.")), tools=TOOLS, answer=False)
    assert rendered.startswith("[user]# Tools\n")
    assert rendered.endswith("</tool_response>.\n\nHi.[assistant]Yes?[user]Call f.")


@pytest.mark.parametrize("text", [NO_SYSTEM, DROPS_SYSTEM])
def test_a_system_text_is_never_lost(text: str) -> None:
    system = {"role": "system", "content": "Be brief."}
    made = template(text)
    assert made.render(normalise([system, *said("Hi.")]), answer=False) == "[user]Be brief.\n\nHi."
    with_tools = made.render(normalise([system, *said("Hi.")]), tools=TOOLS, answer=False)
    assert with_tools.startswith("[user]Be brief.\n\n# Tools\n")
    assert made.render(normalise([system]), answer=False) == "[user]Be brief."


def test_what_follows_a_turn_is_the_same_whether_a_system_text_stands_before_it() -> None:
    made = template(NO_SYSTEM)
    system, tail = {"role": "system", "content": "Be brief."}, said("Hi.", "Yes?", "Go on.")
    before = made.render(normalise([system, *tail[:2]]), tools=TOOLS, answer=False)
    assert made.render(normalise([system, *tail]), tools=TOOLS, answer=True) == before + "[user]Go on.[assistant]"
    assert made.after_turn(normalise(tail[2:]), tools=TOOLS, answer=True) == "[user]Go on.[assistant]"


@pytest.mark.parametrize("text", [TEMPLATE, ALTERNATING])
def test_a_system_text_stays_one_where_the_template_shows_it(text: str) -> None:
    made = template(text)
    assert made.traits().knows_system
    assert "Be brief.\n\nHi." not in made.render(
        normalise([{"role": "system", "content": "Be brief."}, *said("Hi.")]), answer=False
    )
