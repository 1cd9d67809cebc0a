"""Fields of OpenAI's API: none is unknown, what is taken is followed or changes nothing, and the rest is refused."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from agentkv.server.errors import ApiError
from agentkv.server.openai.chat_request import ChatRequest
from agentkv.server.openai.completion_request import CompletionRequest
from agentkv.server.prompts import ToolField, known_tools, tools_of
from agentkv.testing import TEMPLATE, scripted
from support.agent_turns import in_odd_cuts
from support.servers import ask, chunks_of, in_process, refusal_of, scripted_runtime
from support.tiny_tokenizers import byte_level

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
MAP = {"type": "function", "function": {"name": "map", "parameters": {"type": "object", "properties": {}}}}

GRADED = TEMPLATE.replace("{%- for message", "Effort: {{ reasoning_effort | default('as it is') }}\n{%- for message", 1)
SWITCHED = TEMPLATE.replace(
    "{%- for message", "Thinking: {{ enable_thinking | default('as it is') }}\n{%- for message", 1
)


def fields_of(module: Any) -> set[str]:
    """All that the SDK's `create` sends, of the kinds that stream and that do not."""
    kinds = (module.CompletionCreateParamsNonStreaming, module.CompletionCreateParamsStreaming)
    return {name for kind in kinds for name in typing.get_type_hints(kind)}


def test_every_field_that_the_sdk_sends_is_known_here() -> None:
    chat = pytest.importorskip("openai.types.chat.completion_create_params", reason="openai is not installed")
    text = pytest.importorskip("openai.types.completion_create_params", reason="openai is not installed")
    assert fields_of(chat) >= {"messages", "moderation", "prompt_cache_options", "stream"}
    assert fields_of(chat) - set(ChatRequest.model_fields) == set()
    assert fields_of(text) - set(CompletionRequest.model_fields) == set()


REFUSED: list[tuple[str, Any]] = [
    ("moderation", {"model": "omni-moderation-latest"}),
    ("logit_bias", {"5": 10}),
    ("verbosity", "low"),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("web_search_options", {}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
]


async def test_fields_that_would_change_the_answer_and_are_not_followed_are_refused_as_that() -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, in_process(runtime) as client:
        for name, value in REFUSED:
            answer = await client.post(CHAT, json={"model": "scripted", "messages": HI, name: value})
            error = refusal_of(answer, 400)
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        taken = {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "prompt_cache_retention": "24h"}
        assert (await ask(client, messages=HI, **taken))["choices"][0]["message"]["content"] == "Yes."


# -- reasoning_effort -----------------------------------------------------------------------------------------------


async def shown(template: str, effort: str | None, **more: Any) -> str:
    """The first line of the prompt that a request with this effort is given."""
    model = scripted(lambda asked: "Yes.", template=template)
    async with scripted_runtime(model) as runtime, in_process(runtime) as client:
        asked = {"messages": HI, "reasoning_effort": effort, **more}
        counted = (await client.post("/tokenize", json=asked)).json()
        answer = await ask(client, **asked)
        assert answer["usage"]["prompt_tokens"] == counted["count"]
        text: str = (await client.post("/detokenize", json={"tokens": counted["tokens"]})).json()["prompt"]
    return text.strip().partition("\n")[0].partition("<")[0]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh", "max"])
async def test_a_template_with_a_word_for_the_effort_is_told_it(effort: str) -> None:
    assert await shown(GRADED, effort) == f"Effort: {effort}"
    assert await shown(GRADED, effort, chat_template_kwargs={"reasoning_effort": "own"}) == "Effort: own"


@pytest.mark.parametrize(
    ("effort", "told"), [("none", "False"), ("medium", "as it is"), ("minimal", "True"), ("high", "True")]
)
async def test_a_template_that_switches_thinking_is_told_on_or_off(effort: str, told: str) -> None:
    assert await shown(SWITCHED, effort) == f"Thinking: {told}"
    assert await shown(SWITCHED, effort, chat_template_kwargs={"enable_thinking": 5}) == "Thinking: 5"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_an_effort_that_the_template_has_no_word_for_is_refused(path: str) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, in_process(runtime) as client:
        for effort in ("none", "minimal", "low", "high", "xhigh", "max"):
            answer = await client.post(path, json={"model": "scripted", "messages": HI, "reasoning_effort": effort})
            error = refusal_of(answer, 400)
            assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
            assert "enable_thinking" in error["message"]
        answer = await client.post(path, json={"model": "scripted", "messages": HI, "reasoning_effort": "much"})
        assert refusal_of(answer, 400)["param"] == "reasoning_effort"
        assert (
            await client.post(path, json={"model": "scripted", "messages": HI, "reasoning_effort": "medium"})
        ).is_success


async def test_no_effort_is_what_a_model_without_reasoning_makes_anyway() -> None:
    plain = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer: Any = byte_level()
    made: Any = PreTrainedTokenizerFast
    without_markers = made(tokenizer_object=tokenizer, eos_token="<|end|>")
    model = scripted(lambda asked: "Yes.", template=plain, tokenizer=without_markers)
    async with scripted_runtime(model) as runtime, in_process(runtime) as client:
        assert (await ask(client, messages=HI, reasoning_effort="none"))["choices"][0]["message"]["content"] == "Yes."


# -- tool_choice ----------------------------------------------------------------------------------------------------


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_allowed_tools_are_followed_where_they_are_all_or_the_one_that_is_required(door: Any) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        for choice, names in (
            (allowed("required", "clock", "map"), {"clock", "map"}),
            (allowed("required", "map"), {"map"}),
        ):
            asked = {"messages": HI, "tools": [CLOCK, MAP], "tool_choice": choice, "max_tokens": 200}
            (made,) = (await ask(client, **asked))["choices"]
            assert {call["function"]["name"] for call in made["message"]["tool_calls"]} <= names
    async with scripted_runtime(lambda asked: "No call.") as runtime, door(runtime) as client:
        asked = {"messages": HI, "tools": [CLOCK, MAP], "tool_choice": allowed("auto", "map", "clock")}
        assert (await ask(client, **asked))["choices"][0]["message"]["content"] == "No call."


@pytest.mark.parametrize(
    "choice",
    [
        allowed("auto", "clock"),
        allowed("required", "clock", "nowhere"),
        allowed("required", "nowhere"),
        allowed("required"),
        allowed("sometimes", "clock"),
        {"type": "custom", "custom": {"name": "clock"}},
    ],
)
async def test_allowed_tools_that_cannot_be_followed_are_refused_with_what_to_do(choice: dict[str, Any]) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, in_process(runtime) as client:
        body = {"model": "scripted", "messages": HI, "tools": [CLOCK, MAP], "tool_choice": choice}
        error = refusal_of(await client.post(CHAT, json=body), 400)
        assert error["param"].startswith("tool_choice")
        if choice == allowed("auto", "clock"):
            assert error["code"] == "unsupported_parameter"
            assert "offer in tools those alone that may be called" in error["message"]


@pytest.mark.parametrize("name", ["auto", "none", "required"])
async def test_a_tool_called_like_a_choice_is_refused_and_so_is_a_choice_of_it(name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    named = {"type": "function", "function": {"name": name}}
    async with scripted_runtime(lambda asked: "Yes.") as runtime, in_process(runtime) as client:
        for path in (CHAT, "/tokenize"):
            error = refusal_of(
                await client.post(path, json={"model": "scripted", "messages": HI, "tools": [tool]}), 400
            )
            assert error["param"] == "tools"
            assert repr(name) in error["message"]
        body = {"model": "scripted", "messages": HI, "tools": [CLOCK], "tool_choice": named}
        assert refusal_of(await client.post(CHAT, json=body), 400)["param"] == "tool_choice"


# -- tools ----------------------------------------------------------------------------------------------------------


def tool_with(default: Any, name: str = "f") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "number", "default": default}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def fields_for(*tools: dict[str, Any]) -> list[ToolField]:
    return [ToolField.model_validate(tool) for tool in tools]


def test_the_tools_of_the_latest_requests_are_known_by_all_that_they_hold() -> None:
    first = tools_of(fields_for(tool_with(1), CLOCK))
    assert known_tools(fields_for(tool_with(1), CLOCK)) is first
    assert known_tools(fields_for(tool_with(1))) is None
    for other in (1.0, True, None, "1", [1], {"a": 1}, float("inf")):
        fields = fields_for(tool_with(other), CLOCK)
        assert known_tools(fields) is None
        if other != float("inf"):
            assert repr(tools_of(fields)[1].parameters["properties"]["a"]["default"]) == repr(other)
    with pytest.raises(ApiError, match="JSON does not have all of its values"):
        tools_of(fields_for(tool_with(float("inf"))))
    assert known_tools(fields_for(tool_with(float("inf")))) is None
    assert known_tools(None) == ()


def test_tools_that_are_refused_are_refused_again() -> None:
    for _ in range(2):
        with pytest.raises(ApiError, match="two tools are called"):
            tools_of(fields_for(CLOCK, CLOCK))


def test_the_tools_of_many_requests_and_very_long_ones_are_forgotten() -> None:
    first = fields_for(tool_with(-7))
    tools_of(first)
    assert known_tools(first) is not None
    for number in range(64):
        tools_of(fields_for(tool_with(number, "g")))
    assert known_tools(first) is None
    long = fields_for(tool_with("x" * 70_000))
    assert tools_of(long)[0].name == "f"
    assert known_tools(long) is None


# -- seed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_without_a_seed_the_same_request_is_answered_anew_and_with_one_it_is_not(door: Any, path: str) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:

        async def said(**more: Any) -> Any:
            asked = {**prompt, "max_tokens": 24, "return_token_ids": True, **more}
            return (await ask(client, path, **asked))["choices"][0]["token_ids"]

        assert len({tuple(await said()) for _ in range(3)}) == 3
        assert await said(seed=7) == await said(seed=7)
        assert await said(seed=0) == await said(seed=0)
        assert await said(temperature=0) == await said(temperature=0)


async def test_prompts_of_one_request_that_are_alike_are_answered_each_by_itself(door: Any) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        asked = {"prompt": ["Hi", "Hi", "Hi"], "max_tokens": 24, "return_token_ids": True}
        answer = await ask(client, TEXT, **asked)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3


# -- max_tokens=0 ---------------------------------------------------------------------------------------------------


async def test_a_prompt_can_be_scored_and_nothing_written_behind_it(door: Any) -> None:
    asked = {"prompt": "The answer is with you.", "echo": True, "max_tokens": 0, "temperature": 0}
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        scored = await ask(client, TEXT, **asked, logprobs=1, return_token_ids=True)
        longer = await ask(client, TEXT, **{**asked, "max_tokens": 3}, logprobs=1)
        chunks = await chunks_of(client, TEXT, **asked, stream_options={"include_usage": True})
        error = refusal_of(await client.post(TEXT, json={"model": "scripted", **asked, "echo": False}), 400)
    (choice,) = scored["choices"]
    usage = scored["usage"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (asked["prompt"], "length", [])
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(logprobs) == usage["prompt_tokens"]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(longer["choices"][0]["logprobs"]["token_logprobs"][1 : len(logprobs)])
    *texts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == asked["prompt"]
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 0
    assert error["param"] == "max_tokens"


# -- /tokenize ------------------------------------------------------------------------------------------------------


async def test_tokens_are_counted_as_the_request_with_the_same_fields_has_them(door: Any) -> None:
    replies = [in_odd_cuts("There it is."), *["Yes."] * 2]
    async with scripted_runtime(scripted(replies, template=SWITCHED)) as runtime, door(runtime) as client:
        fields = {"tools": [CLOCK], "chat_template_kwargs": {"enable_thinking": False}, "cache_salt": "one"}
        message = (await ask(client, messages=HI, **fields))["choices"][0]["message"]
        messages = [*HI, message, *HI]
        for asked in (fields, {"tools": [CLOCK]}):
            counted = (await client.post("/tokenize", json={"messages": messages, **asked})).json()["count"]
            assert (await ask(client, messages=messages, **asked))["usage"]["prompt_tokens"] == counted
