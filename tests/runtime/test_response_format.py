"""Answers that are JSON: by a schema or any object, beside tools, behind plain prompts, preempted, and n at once."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from agentkv import ConfigError, Reply, Runtime, ToolCallDelta
from agentkv.testing import Answer, ScriptedModel, scripted
from support.families import OPENS_REASONING, families, served
from support.runtimes import serving

ASKED = [{"role": "user", "content": "Where do you want to go?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "nights": {"type": "integer", "minimum": 1, "maximum": 30}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
ANY_OBJECT = {"type": "json_object"}

Family = Callable[..., ScriptedModel]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fits(text: str) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(json.loads(text))


# -- what the answer is ---------------------------------------------------------------------------------------------


@families
async def test_an_answer_fits_its_schema_whatever_the_model_would_say(family: Family) -> None:
    async with served(family([None] * 3)) as runtime:
        for seed in range(3):
            reply = await runtime.generate(ASKED, response_format=BY_SCHEMA, temperature=1.0, seed=seed)
            assert fits(reply.text), reply.text
            assert (reply.finish_reason, reply.tool_calls, reply.reasoning or "") == ("stop", (), "")


@families
async def test_any_object_is_an_object(family: Family) -> None:
    async with served(family([None])) as runtime:
        # Whatever its grammar allows, a model of random weights does not end by itself: only what it began can be told.
        reply = await runtime.generate(ASKED, response_format=ANY_OBJECT, temperature=1.0, seed=1, max_tokens=64)
        assert reply.text.startswith("{")
        if reply.finish_reason == "stop":
            assert isinstance(json.loads(reply.text), dict)


@families
async def test_beside_tools_an_answer_is_one_call_or_json_and_both_come(family: Family) -> None:
    kinds = set()
    async with served(family(lambda asked: None)) as runtime:
        if not runtime.tokenizer.chat_template or "tools" not in runtime.tokenizer.chat_template:
            pytest.skip("this template shows no tools")
        for seed in range(24):
            reply = await runtime.generate(
                ASKED, tools=[add], response_format=BY_SCHEMA, temperature=1.0, seed=seed, max_tokens=400
            )
            if reply.tool_calls:
                kinds.add("call")
                (call,) = reply.tool_calls
                assert (call.name, call.error, set(call.arguments)) == ("add", None, {"a", "b"})
                assert (reply.text, reply.finish_reason) == ("", "tool_calls")
            else:
                kinds.add("json")
                assert fits(reply.text), reply.text
            if len(kinds) == 2:
                return
    pytest.fail(f"of 24 answers all were of one kind: {kinds}")


async def test_a_forced_call_goes_before_a_form_and_none_leaves_only_the_form() -> None:
    async with served(scripted([None, None])) as runtime:
        forced = await runtime.generate(ASKED, tools=[add], tool_choice="required", response_format=BY_SCHEMA)
        assert [call.name for call in forced.tool_calls] == ["add"]
        free = await runtime.generate(ASKED, tools=[add], tool_choice="none", response_format=BY_SCHEMA)
        assert fits(free.text)


async def test_a_form_that_looks_like_a_call_of_no_tool_is_text() -> None:
    schema = {"const": {"name": "sub", "arguments": {"a": 1, "b": 2}}}
    formed = {"type": "json_schema", "json_schema": {"schema": schema}}
    async with served(scripted([None])) as runtime:
        reply = await runtime.generate(ASKED, tools=[], response_format=formed)
        assert (json.loads(reply.text), reply.tool_calls) == (schema["const"], ())


async def test_a_plain_prompt_goes_on_as_json() -> None:
    async with served(scripted([None, None])) as runtime:
        reply = await runtime.generate("A trip: ", response_format=BY_SCHEMA, temperature=1.0)
        assert fits(reply.text)
        of_ids = await runtime.generate([5, 6, 7], response_format=BY_SCHEMA, temperature=1.0)
        assert fits(of_ids.text)


async def test_reasoning_that_the_prompt_opened_is_closed_before_the_json() -> None:
    async with served(scripted([None], template=OPENS_REASONING)) as runtime:
        reply = await runtime.generate(ASKED, response_format=BY_SCHEMA)
        assert fits(reply.text)
        assert reply.reasoning == ""
        assert runtime.tokenizer.decode(reply.token_ids).startswith("\n</think>\n\n{")


async def test_text_is_no_demand() -> None:
    async with served(scripted(["Free speech.", "Free speech."])) as runtime:
        asked = await runtime.generate(ASKED, response_format={"type": "text"})
        assert asked.text == (await runtime.generate(ASKED, response_format=None)).text == "Free speech."


async def test_an_answer_of_a_session_may_be_json_by_its_prompt_alone_and_says_so() -> None:
    async with served(scripted([])) as runtime:
        with pytest.raises(TypeError, match="response_format"):
            await runtime.session().ask("Go.", response_format=ANY_OBJECT)


# -- several, streamed, preempted -----------------------------------------------------------------------------------


async def test_each_of_several_answers_fits() -> None:
    async with served(scripted([None])) as runtime:
        replies = await runtime.generate(ASKED, response_format=BY_SCHEMA, n=4, temperature=1.0, seed=3)
        assert [fits(reply.text) for reply in replies] == [True] * 4
        assert len({reply.text for reply in replies}) > 1


async def test_a_stream_of_json_is_text_and_never_a_call() -> None:
    async with served(scripted([None])) as runtime:
        async with runtime.stream(ASKED, tools=[add], tool_choice="none", response_format=BY_SCHEMA) as stream:
            events = [event async for event in stream]
        assert not [event for event in events if isinstance(event, ToolCallDelta)]
        text = "".join(getattr(event, "text", "") for event in events)
        assert text == (await stream.reply()).text
        assert fits(text)


async def side_by_side(num_pages: int) -> tuple[list[str], int]:
    formed = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "string", "minLength": 100, "maxLength": 140}},
    }
    async with serving(scripted(lambda asked: None), page_size=8, num_pages=num_pages, context_limit=512) as runtime:
        replies = await asyncio.gather(
            *(
                runtime.generate(
                    [{"role": "user", "content": f"Say number {number}."}],
                    response_format=formed,
                    temperature=1.0,
                    max_tokens=260,
                )
                for number in range(8)
            )
        )
        return [reply.text for reply in replies], runtime.report().to_dict()["preemptions"]


async def test_answers_are_the_same_and_well_formed_when_they_are_preempted() -> None:
    calm, none = await side_by_side(1024)
    tight, some = await side_by_side(48)
    assert none == 0
    assert some > 0
    assert calm == tight
    assert all(100 <= len(json.loads(text)) <= 140 for text in calm)


# -- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("json_object", TypeError, "must be a dict"),
        ({"type": "xml"}, ValueError, "'xml'"),
        ({"type": ["text"]}, ValueError, "type is"),
        ({}, ValueError, "got None"),
        ({"type": "json_schema"}, ValueError, "needs"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, ValueError, "needs"),
        ({"type": "json_schema", "json_schema": {"schema": "object"}}, ValueError, "needs"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
            ValueError,
            "no JSON schema: at type",
        ),
        ({"type": "json_object", "schema": SCHEMA}, ValueError, "has no schema"),
        ({"type": "json_schema", "schema": SCHEMA}, ValueError, "has no schema"),
    ],
)
async def test_a_wrong_format_is_refused_before_anything_runs(given: Any, error: type[Exception], says: str) -> None:
    runtime = Runtime(scripted([]), num_pages=64)
    with pytest.raises(error, match=says):
        runtime.stream(ASKED, response_format=given)
    await runtime.close()


async def test_a_schema_that_no_grammar_can_hold_is_refused_by_what_it_uses() -> None:
    formed = {"type": "json_schema", "json_schema": {"schema": {"$ref": "https://example.org/other.json"}}}
    async with served(scripted([None, "Well."])) as runtime:
        with pytest.raises(ConfigError, match=re.escape("https://example.org/other.json")):
            await runtime.generate(ASKED, response_format=formed)
        assert (await runtime.generate(ASKED)).text == "Well."


async def test_a_schema_is_taken_as_it_was_when_it_was_given() -> None:
    schema: dict[str, Any] = {"enum": ["first"]}
    async with served(scripted([None])) as runtime:
        stream = runtime.stream(ASKED, response_format={"type": "json_schema", "json_schema": {"schema": schema}})
        schema["enum"][0] = "second"
        async with stream:
            assert json.loads((await stream.reply()).text) == "first"


# -- log-probabilities as they come ---------------------------------------------------------------------------------


async def reply_and_logprobs(runtime: Runtime, **options: Any) -> tuple[Reply, list[Any]]:
    """Asked for behind each event, as whoever streams does."""
    taken: list[Any] = []
    async with runtime.stream(ASKED, **options) as stream:
        async for event in stream:
            ids = getattr(event, "token_ids", None)
            if ids is not None:
                come = stream.logprobs(event.index)
                assert [one.token_id for one in come[len(taken) : len(taken) + len(ids)]] == list(ids)
                taken += come[len(taken) : len(taken) + len(ids)]
        return await stream.reply(), taken


async def test_logprobs_of_a_stream_stand_behind_the_tokens_of_its_deltas() -> None:
    model = scripted([Answer("Rome, of course.", reasoning="Where it is warm.")])
    async with served(model) as runtime:
        reply, taken = await reply_and_logprobs(runtime, logprobs=2)
        assert reply.logprobs is not None
        assert tuple(taken) == reply.logprobs
        assert all(len(one.top) == 2 for one in taken)


async def test_logprobs_of_a_stream_are_empty_where_none_were_asked_for() -> None:
    async with served(scripted(["Rome."])) as runtime, runtime.stream(ASKED) as stream:
        await stream.reply()
        assert list(stream.logprobs()) == []


async def test_logprobs_of_several_choices_are_kept_apart() -> None:
    async with served(scripted([["Rome.", "Oslo, rather."]])) as runtime:
        async with runtime.stream(ASKED, n=2, temperature=1.0, logprobs=0) as stream:
            replies = await stream.replies()
        for index, reply in enumerate(replies):
            assert tuple(stream.logprobs(index)) == reply.logprobs
        assert len(stream.logprobs(0)) != len(stream.logprobs(1))
