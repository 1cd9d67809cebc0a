"""Plain completions, the model list, health, and the two endpoints of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv import Runtime
from agentkv.testing import scripted
from support.servers import ask, chunks_of, in_process, scripted_runtime

PATH = "/v1/completions"
PAGE = 4


async def test_text_is_continued_whole_and_streamed(door: Any) -> None:
    async with scripted_runtime(lambda asked: " upon a time") as runtime, door(runtime) as client:
        answer = await ask(client, PATH, prompt="Once")
        chunks = await chunks_of(client, PATH, prompt="Once", stream_options={"include_usage": True})
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (" upon a time", "stop", None)
    *texts, last = chunks
    assert "".join(chunk["choices"][0]["text"] for chunk in texts) == " upon a time"
    assert texts[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == last["usage"]["prompt_tokens"] - 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_ids_and_their_text_are_one_prompt(door: Any) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        ids = (await client.post("/tokenize", json={"prompt": "Hello, you"})).json()["tokens"]
        said = [
            (await ask(client, PATH, prompt=prompt, temperature=0, return_token_ids=True))["choices"][0]["token_ids"]
            for prompt in ("Hello, you", ids, ["Hello, you"], [ids])
        ]
    assert said[0] == said[1] == said[2] == said[3]
    assert len(said[0]) <= 16


async def test_a_list_of_prompts_gives_the_choices_of_each_in_order(door: Any) -> None:
    async with scripted_runtime(lambda asked: [f"{asked}{i}" for i in "xy"]) as runtime, door(runtime) as client:
        asked = {"prompt": ["A", "B", "C"], "n": 2}
        answer = await ask(client, PATH, **asked)
        texts = [""] * 6
        for chunk in await chunks_of(client, PATH, **asked):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == texts == ["Ax", "Ay", "Bx", "By", "Cx", "Cy"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 18


async def test_one_prompt_that_cannot_be_ends_them_all(door: Any) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:
        for stream in (False, True):
            body = {"model": "scripted", "prompt": ["A", "B" * 5000], "stream": stream}
            assert (await client.post(PATH, json=body)).status_code == 400


@pytest.mark.parametrize("cached", [0, PAGE - 1, PAGE, 3 * PAGE])
@pytest.mark.parametrize("as_text", [True, False], ids=["text", "ids"])
async def test_echo_has_the_logprobs_of_the_whole_prompt_whatever_of_it_is_cached(
    door: Any, cached: int, as_text: bool
) -> None:
    text = "The answer is with you, and it is not the tool that you are."
    async with scripted_runtime(lambda asked: None) as runtime, door(runtime) as client:
        ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
        assert len(ids) > 3 * PAGE + 2
        asked = {"prompt": text if as_text else ids, "echo": True, "logprobs": 2, "max_tokens": 4, "temperature": 0}
        cold = (await ask(client, PATH, **asked, cache_salt="apart"))["choices"][0]
        if cached:
            await ask(client, PATH, prompt=[*ids[:cached], 7], max_tokens=1)
        warm = (await ask(client, PATH, **asked))["choices"][0]
    assert warm["text"] == cold["text"]
    assert warm["text"].startswith(text)
    logprobs = warm["logprobs"]
    assert logprobs["tokens"] == cold["logprobs"]["tokens"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
    assert "".join(logprobs["tokens"][: len(ids)]) == text
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(cold["logprobs"]["token_logprobs"][1:], abs=1e-4)
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])


async def test_offsets_say_where_each_token_stands_in_the_text(door: Any) -> None:
    async with scripted_runtime(lambda asked: " the 🌧 of it") as runtime, door(runtime) as client:
        asked = {"prompt": "Ø is 🌧.", "echo": True, "logprobs": 0}
        (choice,) = (await ask(client, PATH, **asked))["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert text == "Ø is 🌧. the 🌧 of it"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if "�" not in token and not token.startswith("<|"):
            assert text[offset : offset + len(token)] == token


async def test_logprobs_are_streamed_with_the_offsets_of_the_whole_answer(door: Any) -> None:
    async with scripted_runtime(lambda asked: " the 🌧 of it") as runtime, door(runtime) as client:
        whole = (await ask(client, PATH, prompt="Hi", logprobs=1))["choices"][0]["logprobs"]
        chunks = await chunks_of(client, PATH, prompt="Hi", logprobs=1)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [each for part in parts for each in part[name]] == whole[name]


async def test_echo_alone_is_the_prompt_before_the_answer(door: Any) -> None:
    async with scripted_runtime(lambda asked: " there") as runtime, door(runtime) as client:
        whole = await ask(client, PATH, prompt="Hello", echo=True)
        chunks = await chunks_of(client, PATH, prompt="Hello", echo=True)
    assert whole["choices"][0]["text"] == "Hello there"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there"


async def test_the_model_is_listed_with_its_context(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        listed = (await client.get("/v1/models")).json()
        (model,) = listed["data"]
        assert listed["object"] == "list"
        assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 2048)
        assert (await client.get("/v1/models/scripted")).json() == model


async def test_a_name_with_slashes_is_asked_for_as_it_is(door: Any) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime, served_model="org/model") as client:
        assert (await client.get("/v1/models/org/model")).json()["id"] == "org/model"
        answer = await ask(client, model="org/model", messages=[{"role": "user", "content": "Hi"}])
        assert answer["model"] == "org/model"


async def test_tokens_there_and_back(door: Any) -> None:
    text = "Ø is 🌧, <|im_end|> and the tool."
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        counted = (await client.post("/tokenize", json={"prompt": text})).json()
        assert counted["count"] == len(counted["tokens"])
        assert counted["max_model_len"] == 2048
        back = await client.post("/detokenize", json={"tokens": counted["tokens"]})
        assert back.json() == {"prompt": text}


async def test_a_runtime_that_is_not_started_starts_with_its_first_request() -> None:
    for path, body in (("/tokenize", {"prompt": "Hi"}), ("/v1/completions", {"prompt": "Hi", "model": "scripted"})):
        runtime = Runtime(scripted(["Yes."]), num_pages=64)
        try:
            async with in_process(runtime) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.post(path, json=body)).status_code == 200
        finally:
            await runtime.close()


async def test_messages_are_counted_as_they_are_sent(door: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        counted = (await client.post("/tokenize", json={"messages": messages, "tools": [tool]})).json()
        answer = await ask(client, messages=messages, tools=[tool])
    assert answer["usage"]["prompt_tokens"] == counted["count"]
