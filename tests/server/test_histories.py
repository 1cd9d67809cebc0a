"""Conversations that clients send back: found by what was produced, whole or streamed, whatever shape they come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentkv.testing import ScriptedModel, scripted
from support.agent_turns import in_odd_cuts, nth_answer, tool_call
from support.families import families
from support.servers import ask, chunks_of, in_process, over_http, refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]


def marked(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def put_together(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message as clients put it together of a stream's chunks, and the usage."""
    content, reason = "", None
    calls: dict[int, dict[str, Any]] = {}
    *chunks, last = chunks
    for chunk in chunks:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in choice["delta"].get("tool_calls", ()):
            empty = {"id": part.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
            function = calls.setdefault(part["index"], empty)["function"]
            function["name"] += part["function"].get("name") or ""
            function["arguments"] += part["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        assert list(calls) == list(range(len(calls)))
        assert reason == "tool_calls"
    return message, last["usage"]


async def answered(client: Any, stream: bool, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """An answer's message, and its usage."""
    if stream:
        return put_together(await chunks_of(client, **asked, stream_options={"include_usage": True}))
    answer = await ask(client, **asked)
    return answer["choices"][0]["message"], answer["usage"]


async def check_next_turn(client: Any, stream: bool, **asked: Any) -> list[dict[str, Any]]:
    """The calls of an answer, whose results are sent back with it: all that was computed must come from the cache."""
    message, before = await answered(client, stream, messages=HI, **asked)
    calls: list[dict[str, Any]] = message.get("tool_calls") or []
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "It is so."} for call in calls]
    messages = [*HI, message, *(results or [{"role": "user", "content": "And?"}])]
    _, after = await answered(client, stream, messages=messages, **asked)
    # The token that ended the answer was sampled and never run; the prompt begins with it all the same.
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 1
    return calls


TWO = "Both.\n" + tool_call("weather", place="Øslo") + "\n" + tool_call("clock")
ANSWERS = {
    "a text and two calls": (TWO, 2),
    "two calls, one text": (tool_call("clock") + tool_call("weather", place="A") + "\nThere.", 2),
    "one call": (tool_call("weather", place="Øslo"), 1),
    "no call": ("There is nothing to call.", 0),
    "it breaks in the middle": (marked('{"name": "weather", "arguments": {"place": Oslo}}') + tool_call("clock"), 2),
    "it goes on behind its end": (marked('{"name": "clock", "arguments": {}} and more') + tool_call("clock"), 2),
    "arguments in a string": (marked('{"name": "weather", "arguments": "{\\"place\\": \\"Oslo\\"}"}'), 1),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("text", "calls"), ANSWERS.values(), ids=ANSWERS)
async def test_calls_however_they_are_cut_and_written_are_found_in_the_next_turn(
    door: Any, text: str, calls: int, stream: bool
) -> None:
    async with scripted_runtime(nth_answer([in_odd_cuts(text), "Yes."])) as runtime, door(runtime) as client:
        assert len(await check_next_turn(client, stream, tools=TOOLS)) == calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("text", "calls"), ANSWERS.values(), ids=ANSWERS)
async def test_without_parallel_calls_there_is_one_and_it_is_found_in_the_next_turn(
    door: Any, text: str, calls: int, stream: bool
) -> None:
    async with scripted_runtime(nth_answer([in_odd_cuts(text), "Yes."])) as runtime, door(runtime) as client:
        made = await check_next_turn(client, stream, tools=TOOLS, parallel_tool_calls=False)
        assert len(made) == min(calls, 1)


@pytest.mark.parametrize(("text", "calls"), ANSWERS.values(), ids=ANSWERS)
async def test_a_stream_tells_the_calls_of_the_whole_answer_in_their_order(text: str, calls: int) -> None:
    async with scripted_runtime(lambda asked: in_odd_cuts(text)) as runtime, in_process(runtime) as client:
        for parallel in (True, False):
            asked = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": parallel, "seed": 1}
            whole, _ = await answered(client, False, **asked)
            streamed, _ = await answered(client, True, **asked)
            assert streamed["content"] == (whole["content"] or None)
            ids = [[call["id"] for call in each.get("tool_calls", ())] for each in (whole, streamed)]
            names = [[call["function"]["name"] for call in each.get("tool_calls", ())] for each in (whole, streamed)]
            assert ids[0] == ids[1]
            assert names[0] == names[1]
            assert len(ids[0]) == (calls if parallel else min(calls, 1))


async def test_a_list_of_calls_is_closed_behind_the_first_where_there_may_be_one() -> None:
    listed = "{% for m in messages %}{{ m.role + ': ' }}{% if m.tool_calls %}[TOOL_CALLS][" + (
        "{% for c in m.tool_calls %}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
        "{% if not loop.last %}, {% endif %}{% endfor %}]{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    two = '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"place": "A"}}]'
    async with scripted_runtime(scripted(lambda asked: two, template=listed)) as runtime, in_process(runtime) as client:
        answer = await ask(client, messages=HI, tools=TOOLS, parallel_tool_calls=False, return_token_ids=True)
        (choice,) = answer["choices"]
        written = (await client.post("/detokenize", json={"tokens": choice["token_ids"]})).json()["prompt"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["clock"]
    assert written.startswith('[TOOL_CALLS][{"name": "clock", "arguments": {}}]')
    assert "weather" not in written


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_of_calls_that_stand_bare_the_first_is_told_where_there_may_be_one(stream: bool) -> None:
    bare = (
        "{% for m in messages %}{{ m.role + ': ' }}{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    two = '[{"name": "clock", "arguments": {}}, {"name": "weather", "arguments": {"place": "A"}}]'
    async with scripted_runtime(scripted(lambda asked: two, template=bare)) as runtime, in_process(runtime) as client:
        for parallel, names in ((False, ["clock"]), (True, ["clock", "weather"])):
            asked = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": parallel}
            message, _ = await answered(client, stream, **asked)
            assert [call["function"]["name"] for call in message["tool_calls"]] == names


async def test_a_turn_sent_with_the_last_token_of_the_one_before_hits_wholly_a_hundred_times() -> None:
    async with scripted_runtime(lambda asked: "There it is.") as runtime, over_http(runtime) as client:
        for number in range(100):
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"{number} is what I ask for."}]
            body = {"model": "scripted", "messages": messages, "stream": True, "return_token_ids": True}
            text, written = "", 0
            async with client.stream("POST", CHAT, json=body) as response:
                async for line in response.aiter_lines():
                    if not line:
                        continue
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    text += choice["delta"].get("content") or ""
                    written += len(choice.get("token_ids", ()))
                    if choice["finish_reason"] is not None:
                        break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
                second = await ask(client, messages=messages)
            counted = (await client.post("/tokenize", json={"messages": messages[:1]})).json()["count"]
            # All but the token that was sampled last, which no forward has seen.
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= counted + written - 1


# -- shapes ---------------------------------------------------------------------------------------------------------


def call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identity: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content}


PLACE = {"place": "Øslo", "days": [1, 2]}
PLAIN: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where, and when?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("call00001", "weather", PLACE), call("call00002", "clock", {})],
    },
    result("call00001", "rain"),
    result("call00002", "noon"),
    {"role": "assistant", "content": "In the rain, at noon."},
    {"role": "user", "content": "Again."},
]


def changed(**at: dict[str, Any]) -> list[dict[str, Any]]:
    """PLAIN, with other fields in the message of this number."""
    return [{**message, **at.get(f"m{number}", {})} for number, message in enumerate(PLAIN)]


def in_parts(*texts: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text} for text in texts]}


AS_JSON = [call("call00001", "weather", json.dumps(PLACE)), call("call00002", "clock", "{}")]
SHAPES = {
    "arguments as JSON": changed(m2={"tool_calls": AS_JSON}),
    "arguments as JSON that is spaced otherwise": changed(
        m2={"tool_calls": [call("call00001", "weather", json.dumps(PLACE, indent=3)), call("call00002", "clock", "")]}
    ),
    "content null": changed(m2={"content": None, "tool_calls": AS_JSON}),
    "content in parts": changed(
        m0=in_parts("Be ", "brief."), m1=in_parts("Where, and when?"), m5=in_parts("In the rain,", " at noon.")
    ),
    "results in parts": changed(m3=in_parts("ra", "in")),
    "results out of order": [*PLAIN[:3], PLAIN[4], PLAIN[3], *PLAIN[5:]],
    "a developer for the system": changed(m0={"role": "developer"}),
    "fields that say nothing": changed(
        m2={"refusal": None, "audio": None, "function_call": None, "annotations": [], "content": None},
        m5={"refusal": None, "tool_calls": None, "parsed": {"answer": 5}, "annotations": [], "metadata": {}},
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@families
async def test_histories_in_openais_shapes_are_the_tokens_of_the_plain_one(
    family: Callable[..., ScriptedModel], shape: str
) -> None:
    async with scripted_runtime(family([])) as runtime, in_process(runtime) as client:
        tokens = []
        for messages in (PLAIN, SHAPES[shape]):
            answer = await client.post("/tokenize", json={"messages": messages, "tools": TOOLS})
            assert answer.status_code == 200, answer.text
            tokens.append(answer.json()["tokens"])
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 20


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
async def test_a_part_that_is_no_text_is_refused_by_its_name(door: Any, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:
        for path in (CHAT, "/tokenize"):
            body = {"model": "scripted", "messages": [*HI, {"role": "user", "content": parts}]}
            error = refusal_of(await client.post(path, json=body), 400)
            assert error["param"] == "messages"
            assert "message 1 holds a" in error["message"]
            assert f" {kind} part" in error["message"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wrong", [marked('{"name": 5, "arguments": {}}'), marked('{"nme": "clock"}')])
async def test_a_call_without_a_readable_name_is_left_out_and_those_with_one_stay(wrong: str, stream: bool) -> None:
    broken = marked('{"name": "clock", "arguments": "now"}')
    texts = [wrong, f"{tool_call('weather', place='Oslo')}\n{wrong}\n{broken}", "Well.", "And well."]
    async with scripted_runtime(texts) as runtime, in_process(runtime) as client:
        if stream:
            chunks = await chunks_of(client, messages=HI, tools=TOOLS)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
            assert not any("tool_calls" in delta for delta in deltas)
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        else:
            (choice,) = (await ask(client, messages=HI, tools=TOOLS))["choices"]
            assert "tool_calls" not in choice["message"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
        message, _ = await answered(client, stream, messages=HI, tools=TOOLS)
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "So."} for call in message["tool_calls"]]
        message, _ = await answered(client, stream, messages=[*HI, message, *results], tools=TOOLS)
        assert message["content"] == "Well."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_forced_call_cut_before_its_name_is_left_out_and_the_history_goes_on(stream: bool) -> None:
    """What comes back is another prompt than was run, and is answered as it would be with nothing cached."""
    forced: dict[str, Any] = {"messages": HI, "tools": TOOLS, "tool_choice": "required", "max_tokens": 3}
    followed: dict[str, Any] = {"tools": TOOLS, "max_tokens": 8, "temperature": 0}
    answers = []
    for cut in (True, False):
        async with scripted_runtime([None] * 2) as runtime, in_process(runtime) as client:
            if cut and stream:
                chunks = await chunks_of(client, **forced)
                assert all("tool_calls" not in chunk["choices"][0]["delta"] for chunk in chunks)
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            elif cut:
                (choice,) = (await ask(client, **forced))["choices"]
                assert (choice["message"].get("tool_calls"), choice["finish_reason"]) == (None, "length")
            messages = [*HI, {"role": "assistant", "content": ""}, {"role": "user", "content": "And?"}]
            answers.append((await ask(client, messages=messages, **followed))["choices"][0]["message"])
    assert answers[0] == answers[1]
