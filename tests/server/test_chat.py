"""Chat completions, whole and streamed, in process and over HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentkv.testing import Answer
from support.servers import ask, chunks_of, scripted_runtime

HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TWO_CALLS = Answer("Both.", calls=[("weather", {"place": "Oslo"}), ("clock", {})])


def told(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A stream's chunks put together, as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": {}, "finish_reason": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                known = message["tool_calls"].setdefault(call["index"], {"name": None, "arguments": "", "id": None})
                known["id"] = call.get("id") or known["id"]
                known["name"] = call["function"].get("name") or known["name"]
                known["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


async def test_an_answer_has_openais_shape(door: Any) -> None:
    async with scripted_runtime(["Hello."]) as runtime, door(runtime) as client:
        answer = await ask(client, messages=HI)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_stream_says_the_same_as_the_whole_answer(door: Any) -> None:
    reply = Answer("It is here.", calls=[("weather", {"place": "Øslo 🌧"})], reasoning="Let me think.")
    async with scripted_runtime(lambda asked: reply) as runtime, door(runtime) as client:
        whole = (await ask(client, messages=HI, tools=[WEATHER]))["choices"][0]
        chunks = await chunks_of(client, messages=HI, tools=[WEATHER])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    streamed = told(chunks)
    assert streamed["content"] == whole["message"]["content"]
    assert streamed["reasoning_content"] == whole["message"]["reasoning_content"] == "Let me think."
    (call,) = whole["message"]["tool_calls"]
    assert streamed["tool_calls"][0]["name"] == call["function"]["name"] == "weather"
    assert json.loads(streamed["tool_calls"][0]["arguments"]) == json.loads(call["function"]["arguments"])
    assert streamed["tool_calls"][0]["id"] == call["id"]
    assert streamed["finish_reason"] == whole["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cached_tokens_are_told_always_and_are_0_on_a_miss(door: Any, stream: bool) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:

        async def usage() -> dict[str, Any]:
            if not stream:
                usage: dict[str, Any] = (await ask(client, messages=HI))["usage"]
                return usage
            *before, last = await chunks_of(client, messages=HI, stream_options={"include_usage": True})
            assert all(chunk["usage"] is None for chunk in before)
            assert last["choices"] == []
            last_usage: dict[str, Any] = last["usage"]
            return last_usage

        first, second = await usage(), await usage()
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    # All but the last token, whose logits are computed again.
    assert second["prompt_tokens_details"]["cached_tokens"] == second["prompt_tokens"] - 1
    assert first["prompt_tokens"] == second["prompt_tokens"]
    assert first["completion_tokens"] == second["completion_tokens"]


async def test_a_stream_has_no_usage_unless_it_is_asked_for(door: Any) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        assert not any("usage" in chunk for chunk in await chunks_of(client, messages=HI))


async def test_assistant_text_that_comes_back_as_text_hits_wholly(door: Any) -> None:
    async with scripted_runtime(lambda asked: "There is a tool, and it is good.") as runtime, door(runtime) as client:
        messages: list[dict[str, Any]] = list(HI)
        before = 0
        for turn in range(4):
            answer = await ask(client, messages=messages)
            usage = answer["usage"]
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= before - 1
            before = usage["total_tokens"] - 1  # The end token of the answer stands in the template.
            # What an SDK makes of a message has fields that say nothing.
            said = {**answer["choices"][0]["message"], "audio": None, "function_call": None, "tool_calls": None}
            messages += [said, {"role": "user", "content": f"And then, {turn}?"}]


async def test_results_of_tools_come_back_and_the_history_hits(door: Any) -> None:
    def reply(asked: Any) -> Any:
        return "Rain." if asked[-1]["role"] == "tool" else Answer(calls=[("weather", {"place": "Oslo"})])

    async with scripted_runtime(reply) as runtime, door(runtime) as client:
        first = await ask(client, messages=HI, tools=[WEATHER])
        message = first["choices"][0]["message"]
        assert message["content"] is None
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        second = await ask(client, messages=[*HI, message, result], tools=[WEATHER])
    assert second["choices"][0]["message"]["content"] == "Rain."
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "clock"}}, {"clock"})],
    ids=["required", "named"],
)
async def test_a_call_can_be_forced_whatever_the_model_would_say(
    door: Any, stream: bool, choice: Any, names: set[str]
) -> None:
    asked = {"messages": HI, "tools": [WEATHER, CLOCK], "tool_choice": choice, "seed": 3}
    async with scripted_runtime([None]) as runtime, door(runtime) as client:
        if stream:
            message = told(await chunks_of(client, **asked))
            (call,) = message["tool_calls"].values()
            reason = message["finish_reason"]
        else:
            answered = (await ask(client, **asked))["choices"][0]
            (call,) = (each["function"] for each in answered["message"]["tool_calls"])
            reason = answered["finish_reason"]
    assert call["name"] in names
    assert isinstance(json.loads(call["arguments"]), dict)
    assert reason == "tool_calls"


async def test_with_tool_choice_none_what_looks_like_a_call_is_text(door: Any) -> None:
    async with scripted_runtime([TWO_CALLS]) as runtime, door(runtime) as client:
        (choice,) = (await ask(client, messages=HI, tools=[WEATHER, CLOCK], tool_choice="none"))["choices"]
    assert "tool_calls" not in choice["message"]
    assert "Oslo" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("parallel", [None, True])
async def test_calls_side_by_side_come_with_their_numbers(door: Any, parallel: bool | None) -> None:
    asked = {"messages": HI, "tools": [WEATHER, CLOCK], "parallel_tool_calls": parallel}
    async with scripted_runtime(lambda asked: TWO_CALLS) as runtime, door(runtime) as client:
        (choice,) = (await ask(client, **asked))["choices"]
        streamed = told(await chunks_of(client, **asked))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "clock"]
    assert [streamed["tool_calls"][number]["name"] for number in (0, 1)] == ["weather", "clock"]
    assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2


async def test_a_call_whose_arguments_nobody_can_read_is_told_the_same_whole_and_streamed(door: Any) -> None:
    asked = {"messages": HI, "tools": [CLOCK]}
    broken = 'Now:<tool_call>\n{"name": "clock", "arguments": please}\n</tool_call>'
    async with scripted_runtime(lambda asked: broken) as runtime, door(runtime) as client:
        (choice,) = (await ask(client, **asked))["choices"]
        streamed = told(await chunks_of(client, **asked))
    (call,) = choice["message"]["tool_calls"]
    (told_call,) = streamed["tool_calls"].values()
    assert (call["function"]["name"], told_call["name"]) == ("clock", "clock")
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(call["function"]["arguments"])
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(told_call["arguments"])
    assert call["id"] == told_call["id"]
    assert choice["finish_reason"] == streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_without_parallel_calls_an_answer_ends_with_its_first_call(door: Any, stream: bool, n: int) -> None:
    asked = {"messages": HI, "tools": [WEATHER, CLOCK], "parallel_tool_calls": False, "n": n, "logprobs": True}
    many = Answer("Both.", calls=[("weather", {"place": "Oslo"}), *[("clock", {})] * 20])
    only = Answer("One.", calls=[("clock", {})])
    replies: Any = [many] if n == 1 else [[many, only, "No call."]]
    async with scripted_runtime(replies) as runtime, door(runtime) as client:
        if stream:
            chunks = await chunks_of(client, **asked, stream_options={"include_usage": True})
            got = [told(chunks, index) for index in range(n)]
            calls = [[call["name"] for call in each["tool_calls"].values()] for each in got]
            texts, reasons = [each["content"].strip() for each in got], [each["finish_reason"] for each in got]
        else:
            answer = await ask(client, **asked)
            messages = [choice["message"] for choice in answer["choices"]]
            calls = [[call["function"]["name"] for call in each.get("tool_calls", ())] for each in messages]
            texts = [(each["content"] or "").strip() for each in messages]
            reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert calls == [["weather"], ["clock"], []][:n]
    assert texts == ["Both.", "One.", "No call."][:n]
    assert reasons == ["tool_calls", "tool_calls", "stop"][:n]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_json_is_written_by_a_grammar(door: Any, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "number": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["colour", "number"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "car", "schema": schema, "strict": True}}
    async with scripted_runtime([None]) as runtime, door(runtime) as client:
        asked = {"messages": HI, "response_format": form, "seed": 1}
        if stream:
            text = told(await chunks_of(client, **asked))["content"]
        else:
            text = (await ask(client, **asked))["choices"][0]["message"]["content"]
    value = json.loads(text)
    assert value["colour"] in ("red", "blue")
    assert value["number"] in range(10)


async def test_any_json_object_is_one_object_and_nothing_else(door: Any) -> None:
    ended = []
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        for seed in range(8):
            asked = {"messages": HI, "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 300}
            (choice,) = (await ask(client, **asked))["choices"]
            text = choice["message"]["content"]
            assert text.startswith("{")
            if choice["finish_reason"] == "stop":
                ended.append(json.loads(text))
    # A model of random weights may go on for long; some of these end, and the seeds make it the same ones each time.
    assert ended
    assert all(isinstance(value, dict) for value in ended)


async def test_beside_tools_the_answer_is_the_form_or_one_call(door: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99}}}
    reasons = set()
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        for seed in range(60):  # About one in twelve begins a call.
            (choice,) = (await ask(client, messages=HI, response_format=form, tools=[CLOCK], seed=seed))["choices"]
            reasons.add(choice["finish_reason"])
            if choice["finish_reason"] == "tool_calls":
                assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
            else:
                assert isinstance(json.loads(choice["message"]["content"]), int)
            if len(reasons) > 1:
                break
    assert reasons == {"stop", "tool_calls"}


async def test_n_choices_are_counted_once_in_the_prompt(door: Any) -> None:
    async with scripted_runtime([["a", "b", "c"], "d"]) as runtime, door(runtime) as client:
        answer = await ask(client, messages=HI, n=3)
        one = await ask(client, messages=HI)
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["usage"]["completion_tokens"] == 6


async def test_choices_are_streamed_side_by_side(door: Any) -> None:
    async with scripted_runtime([["a b", "c d"]]) as runtime, door(runtime) as client:
        chunks = await chunks_of(client, messages=HI, n=2)
    assert [told(chunks, index)["content"] for index in (0, 1)] == ["a b", "c d"]


async def test_a_greedy_answer_is_made_once_and_given_n_times(door: Any) -> None:
    greedy = {"messages": HI, "temperature": 0, "logprobs": True, "return_token_ids": True}
    reply = Answer("Well, yes.", reasoning="Hm.")
    async with scripted_runtime(lambda asked: reply) as runtime, door(runtime) as client:
        one, three = await ask(client, **greedy), await ask(client, **greedy, n=3)
        calls = runtime.report().to_dict()["calls"]
        chunks = await chunks_of(client, **greedy, n=3, stream_options={"include_usage": True})
    choice = one["choices"][0]
    assert [{**each, "index": 0} for each in three["choices"]] == [choice] * 3
    assert [each["index"] for each in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    assert calls == 2
    assert [told(chunks, index)["content"] for index in range(3)] == [choice["message"]["content"]] * 3
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert chunks[-1]["usage"][name] == three["usage"][name]
    assert three["usage"]["completion_tokens_details"]["reasoning_tokens"] % 3 == 0


async def test_a_seed_repeats_and_another_one_does_not(door: Any) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:

        async def said(seed: int, **more: Any) -> Any:
            asked = {"messages": HI, "seed": seed, "max_tokens": 24, "return_token_ids": True, **more}
            return [choice["token_ids"] for choice in (await ask(client, **asked))["choices"]]

        assert await said(1) == await said(1) != await said(2)
        assert len({tuple(ids) for ids in await said(5, n=4)}) == 4
        # Absent is 1.0: not greedy, and what 1.0 gives.
        assert await said(1) == await said(1, temperature=1.0) != await said(1, temperature=0)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_limit_ends_the_answer_with_length(door: Any, field: str) -> None:
    async with scripted_runtime(["A long answer of many words."]) as runtime, door(runtime) as client:
        answer = await ask(client, messages=HI, **{field: 3})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stop", ["two", ["nine", "two"]], ids=["one", "several"])
async def test_stop_strings_end_the_text_before_them(door: Any, stop: Any) -> None:
    async with scripted_runtime(lambda asked: "one two three") as runtime, door(runtime) as client:
        (choice,) = (await ask(client, messages=HI, stop=stop))["choices"]
        streamed = told(await chunks_of(client, messages=HI, stop=stop))
    assert choice["message"]["content"] == streamed["content"] == "one "
    assert choice["finish_reason"] == streamed["finish_reason"] == "stop"


async def test_penalties_change_what_is_said(door: Any) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        said = {}
        for name, value in (("top_p", 1.0), ("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
            asked = {"messages": HI, "max_tokens": 48, "temperature": 0, "return_token_ids": True, name: value}
            said[name] = (await ask(client, **asked))["choices"][0]["token_ids"]
    assert said["presence_penalty"] != said["top_p"]
    assert len(set(said["frequency_penalty"])) > len(set(said["top_p"]))


async def test_logprobs_come_for_every_token_of_every_turn_whole_and_streamed(door: Any) -> None:
    reply = Answer("The answer is 🌧.", calls=[("clock", {})], reasoning="Thinking of it.")
    async with scripted_runtime(lambda asked: reply) as runtime, door(runtime) as client:
        messages: list[dict[str, Any]] = list(HI)
        for turn in range(3):
            asked = {"messages": messages, "tools": [CLOCK], "logprobs": True, "top_logprobs": 2, "seed": 1}
            answer = await ask(client, **asked)
            entries = answer["choices"][0]["logprobs"]["content"]
            assert len(entries) == answer["usage"]["completion_tokens"]
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            assert all(entry["logprob"] <= 0 for entry in entries)
            written = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
            assert "The answer is 🌧." in written
            assert "Thinking of it." in written
            streamed = [
                entry
                for chunk in await chunks_of(client, **asked)
                for choice in chunk["choices"]
                for entry in (choice["logprobs"] or {"content": []})["content"]
            ]
            assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
            assert [entry["logprob"] for entry in streamed] == pytest.approx(
                [entry["logprob"] for entry in entries], abs=1e-4
            )
            message = answer["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"it is {turn}"}
            messages = [*messages, message, result]


async def test_reasoning_is_told_apart(door: Any) -> None:
    async with scripted_runtime([Answer("Four.", reasoning="Two and two.")]) as runtime, door(runtime) as client:
        answer = await ask(client, messages=HI)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Four.", "Two and two.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    ("headers", "field"),
    [({"X-Session-ID": "ada"}, None), ({"session-id": "ada"}, None), ({}, "ada"), ({"X-Session-ID": "ada"}, "bob")],
)
async def test_callers_are_named_in_reports(door: Any, headers: dict[str, str], field: str | None) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        body = {"model": "scripted", "messages": HI, "prompt_cache_key": field}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 200
        assert "ada" in str(runtime.report())
        assert "bob" not in str(runtime.report())


async def test_a_cache_salt_parts_callers(door: Any) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:
        cached = [
            (await ask(client, messages=HI, cache_salt=salt))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for salt in ("a", "b", "a", None)
        ]
    assert [tokens > 0 for tokens in cached] == [False, False, True, False]


async def test_fields_that_change_nothing_are_taken(door: Any) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s",
        "logit_bias": {}, "modalities": ["text"], "verbosity": "medium", "n": None, "stop": None, "tools": None,
        "temperature": None, "stream_options": None, "response_format": {"type": "text"}, "tool_choice": None,
        "functions": None, "function_call": None, "audio": None, "web_search_options": None, "prediction": None,
    }  # fmt: skip
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        assert (await ask(client, messages=HI, **harmless))["choices"][0]["message"]["content"] == "Yes."
