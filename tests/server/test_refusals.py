"""What the server refuses: the status, the field, and OpenAI's shape; and that it serves the next request as before."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import pytest

from agentkv import ConfigError, Runtime
from agentkv.errors import CapacityError, EngineFailed, GrammarDeadEnd
from agentkv.server import ServerConfig, create_app
from agentkv.server.errors import code_of
from agentkv.session.turns import ChatTurn
from agentkv.testing import fail_allocation, scripted
from support.sent_in_parts import SentInParts
from support.servers import ask, events_of, in_process, over_http, refusal_of, scripted_runtime

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}

# Fields, and the one that is at fault.
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temprature": 0.5}, "temprature"),
    ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -3}, "max_completion_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"top_p": 2}, "top_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"logit_bias": {"5": 10}}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [*HI, {"role": "tool", "tool_call_id": "nosuch", "content": "5"}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"model": 5}, "model"),
]
WRONG_TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["Hi", ""]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["Hi", 5]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"echo": True, "logprobs": 1, "stream": True}, "stream"),
    ({"messages": HI}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_wrong_fields_are_refused_by_name(stream: bool) -> None:
    async with scripted_runtime(lambda asked: None) as runtime, in_process(runtime) as client:
        misnamed = []
        for path, proper, wrongs in ((CHAT, {"messages": HI}, WRONG_CHATS), (TEXT, {"prompt": "Hi"}, WRONG_TEXTS)):
            for wrong, param in wrongs:
                body = {"model": "scripted", "stream": stream, **proper, **wrong}
                response = await client.post(path, content=json.dumps(body))
                assert response.status_code == 400, wrong
                error = refusal_of(response, 400)
                if not re.fullmatch(rf"{param}[a-z0-9._]*", error["param"] or ""):
                    misnamed.append((wrong, error))
                assert error["type"] == "invalid_request_error"
        assert not misnamed
        await ask(client, messages=HI, max_tokens=3)


NO_JSON: list[bytes] = [
    b"",
    b"{",
    b'{"model": "scripted",}',
    b"\xff\xfe{}",
    b'{"model": "\xc3("}',
    b"[" * 100_000,
    b'{"model": "scripted", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"model": "scripted", "n": ' + b"9" * 5001 + b"}",
    b'{"model": "scripted", "temperature": 1e400, "messages": [{"role": "user", "content": "Hi"}]}',
    b'{"model": "scripted", "temperature": NaN, "messages": [{"role": "user", "content": "Hi"}]}',
    b"[]",
    b"null",
    b"5",
    b'"text"',
    b"model=scripted",
    b"\x00",
    b'{"\\ud800": 1}',
]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_request_are_refused(door: Any, path: str) -> None:
    async with scripted_runtime(["Served."]) as runtime, door(runtime) as client:
        for body in NO_JSON:
            refusal_of(await client.post(path, content=body, headers={"content-type": "application/json"}), 400)
            refusal_of(await client.post(path, content=body), 400)
        await ask(client, messages=HI)


@pytest.mark.parametrize("kind", [None, "application/json", "application/json; charset=utf-8"])
async def test_json_is_read_with_and_without_its_content_type(door: Any, kind: str | None) -> None:
    body = json.dumps({"model": "scripted", "messages": HI})
    headers = {} if kind is None else {"content-type": kind}
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        assert (await client.post(CHAT, content=body, headers=headers)).status_code == 200


async def test_json_called_a_form_is_refused_with_what_to_send(door: Any) -> None:
    body = json.dumps({"model": "scripted", "messages": HI})
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        assert "application/json" in refusal_of(await client.post(CHAT, content=body, headers=headers), 400)["message"]


async def test_text_with_null_bytes_and_deep_schemas_is_answered_or_refused_by_name(door: Any) -> None:
    deep: Any = {"type": "string"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": deep}}}}
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:
        await ask(client, messages=[{"role": "user", "content": "a\0b"}])
        for more in ({"tool_choice": "auto"}, {"tool_choice": "required"}):
            body = {"model": "scripted", "messages": HI, "tools": [tool], **more}
            response = await client.post(CHAT, json=body)
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                refusal_of(response, 400)


async def test_an_unknown_model_is_404_with_the_one_that_is_served(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime, served_model="ours") as client:
        for path, body in (
            (CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": [1]}),
        ):  # fmt: skip
            error = refusal_of(await client.post(path, json={"model": "gpt-5", **body}), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert "'ours'" in error["message"]
        refusal_of(await client.get("/v1/models/gpt-5"), 404)
        assert (await client.get("/v1/models/ours")).json()["id"] == "ours"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_context_too_long_is_refused_with_the_numbers(door: Any, stream: bool) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        body = {"model": "scripted", "messages": HI, "max_tokens": 5000, "stream": stream}
        error = refusal_of(await client.post(CHAT, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "5,000" in error["message"] or "5000" in error["message"]
        assert "2,048" in error["message"] or "2048" in error["message"]
        long = {"model": "scripted", "prompt": [5] * 3000, "stream": stream}
        error = refusal_of(await client.post(TEXT, json=long), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        for field, limit, param in (
            ("max_tokens", 5000, "max_tokens"),
            ("max_completion_tokens", 5000, "max_completion_tokens"),
            ("max_tokens", 2040, "messages"),
        ):
            body = {"model": "scripted", "messages": HI, field: limit, "stream": stream}
            assert refusal_of(await client.post(CHAT, json=body), 400)["param"] == param


async def test_former_names_are_refused_with_those_of_today() -> None:
    async with scripted_runtime([]) as runtime, in_process(runtime) as client:
        for field, value, told in (
            ("functions", [{"name": "f"}], "use tools"),
            ("function_call", "auto", "use tool_choice"),
            ("verbosity", "high", "leave it out"),
        ):
            error = refusal_of(await client.post(CHAT, json={"model": "scripted", "messages": HI, field: value}), 400)
            assert error["message"].endswith(told)


async def test_errors_of_the_runtime_bring_their_names(door: Any) -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    no_grammar = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
    async with scripted_runtime(lambda asked: None, num_pages=33) as runtime, door(runtime) as client:
        for wrong, code in (
            ({"messages": picture}, "content_unsupported"),
            ({"messages": HI, "max_tokens": 1000}, "out_of_pages"),
            ({"messages": HI, "max_tokens": 5000}, "context_length_exceeded"),
            ({"messages": HI, "response_format": no_grammar}, "config_error"),
        ):
            answer = await client.post(CHAT, json={"model": "scripted", **wrong})
            assert refusal_of(answer, 400)["code"] == code


def test_every_error_has_a_code_in_words() -> None:
    assert code_of(GrammarDeadEnd("no token is left")) == "grammar_dead_end"
    assert code_of(EngineFailed("the engine's thread died")) == "engine_failed"
    assert code_of(CapacityError("no room")) == "no_room"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_fails_before_its_first_token_keeps_its_status(door: Any, stream: bool) -> None:
    async with scripted_runtime(lambda asked: "Yes.") as runtime, door(runtime) as client:
        body = {"model": "scripted", "messages": HI, "stream": stream}
        with fail_allocation(runtime):
            error = refusal_of(await client.post(CHAT, json=body), 503)
        assert error["code"] == "no_room"
        await ask(client, messages=HI)


async def test_what_fails_after_its_first_token_is_the_streams_last_event(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = itertools.count(), ChatTurn.read

    def failing(turn: ChatTurn, update: Any) -> Any:
        if next(reads) == 3:
            raise RuntimeError("the fourth token cannot be read")
        return read(turn, update)

    async with scripted_runtime(["Many words.", "Yes."]) as runtime, door(runtime) as client:
        with monkeypatch.context() as patched:
            patched.setattr(ChatTurn, "read", failing)
            first, *_, last = await events_of(client, CHAT, messages=HI)
        assert "choices" in json.loads(first)
        assert json.loads(last)["error"]["code"] == "internal_error"
        assert "fourth token" not in last
        await ask(client, messages=HI)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_call_that_fails_in_the_engine_fails_alone(door: Any, stream: bool) -> None:
    async with scripted_runtime([OSError("the disk is gone"), "Yes."]) as runtime, door(runtime) as client:
        answer = await client.post(CHAT, json={"model": "scripted", "messages": HI, "stream": stream})
        assert refusal_of(answer, 500)["type"] == "server_error"
        await ask(client, messages=HI)


async def test_a_full_queue_is_429_with_when_to_come_again(door: Any) -> None:
    async with scripted_runtime(lambda asked: "Yes.", max_queue=1, max_num_seqs=1) as runtime, door(runtime) as client:
        body = {"model": "scripted", "messages": HI}
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(40)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            error = refusal_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert int(answer.headers["retry-after"]) >= 1


async def test_a_closed_runtime_is_503(door: Any) -> None:
    async with Runtime(scripted([])) as runtime, door(runtime) as client:
        assert (await client.get("/health")).json() == {"status": "ok"}
        await runtime.close()
        for answer in (
            await client.get("/health"),
            await client.get("/v1/models"),
            await client.post(CHAT, json={"model": "scripted", "messages": HI}),
            await client.post(TEXT, json={"model": "scripted", "prompt": "Hi", "stream": True}),
            await client.post("/tokenize", json={"prompt": "Hi"}),
        ):
            assert refusal_of(answer, 503)["code"] == "closed"
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize("told", [True, False], ids=["length told", "in chunks"])
async def test_a_body_too_large_is_413(door: Any, told: bool) -> None:
    async def parts() -> Any:
        for _ in range(40):
            yield b" " * 100

    async with scripted_runtime(["Yes."]) as runtime, door(runtime, max_body_bytes=1000) as client:
        body: Any = b" " * 4000 if told else parts()
        assert "1,000" in refusal_of(await client.post(CHAT, content=body), 413)["message"]
        await ask(client, messages=HI)


async def raw(client: Any, request: bytes) -> bytes:
    """All that comes back before the server closes the connection."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_body_too_large_is_not_asked_for_before_it_is_refused() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 4000\r\n\r\n"
    async with scripted_runtime(["Yes."]) as runtime, over_http(runtime, max_body_bytes=1000) as client:
        answer = await raw(client, head)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"100 Continue" not in answer
        await ask(client, messages=HI)


async def test_paths_that_are_open_to_all_take_no_bodies_to_speak_of(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime, api_keys=("one",)) as client:
        for path in ("/health", "/openapi.json"):
            assert (await client.request("GET", path, content=b" " * 4096)).status_code == 200
            error = refusal_of(await client.request("GET", path, content=b" " * 4097), 413)
            assert "4,096" in error["message"]


@pytest.mark.parametrize("told", [True, False], ids=["length told", "in chunks"])
async def test_bodies_that_are_too_large_together_are_503_until_one_is_answered(told: bool) -> None:
    body = json.dumps({"model": "scripted", "messages": HI, "user": "x" * 600}).encode()
    async with scripted_runtime(lambda asked: "Yes.") as runtime:
        app = create_app(runtime, ServerConfig(max_held_bytes=1000))
        first, second = (SentInParts(app, CHAT, len(body) if told else None) for _ in range(2))
        await first.send(body[:-1], more=True)
        await second.send(body, more=False)
        assert (await second.status(), second.error["code"]) == (503, "no_room")
        assert int(second.headers["retry-after"]) >= 1
        await first.send(body[-1:], more=False)
        assert await first.status() == 200
        third = SentInParts(app, CHAT, len(body) if told else None)
        await third.send(body, more=False)
        assert await third.status() == 200


async def test_a_body_that_comes_too_slowly_is_408() -> None:
    async with scripted_runtime(["Yes."]) as runtime, over_http(runtime, body_timeout=0.05) as client:
        answer = await raw(client, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body)["error"]["code"] == "body_timeout"
        await ask(client, messages=HI)


async def test_keys_open_the_door_and_nothing_else_does(door: Any) -> None:
    body = {"model": "scripted", "messages": HI}
    async with scripted_runtime(["Yes.", "Yes."]) as runtime, door(runtime, api_keys=("one", "two")) as client:
        for wrong in ({}, {"authorization": "Bearer three"}, {"authorization": "Basic one"}, {"authorization": "one"}):
            answer = await client.post(CHAT, json=body, headers=wrong)
            error = refusal_of(answer, 401)
            assert error["code"] == "invalid_api_key"
            assert ("none of those" in error["message"]) == bool(
                re.fullmatch("Bearer .*", wrong.get("authorization", ""))
            )
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "two" not in answer.text
            refusal_of(await client.get("/v1/models", headers=wrong), 401)
        for right in ("Bearer one", "bearer two"):
            assert (await client.post(CHAT, json=body, headers={"authorization": right})).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 200


@pytest.mark.parametrize("keys", [(), ("one",)], ids=["no key", "a key"])
async def test_the_document_tells_of_the_key(keys: tuple[str, ...]) -> None:
    async with scripted_runtime([]) as runtime, in_process(runtime, api_keys=keys) as client:
        document = (await client.get("/openapi.json")).json()
    (name, scheme), *others = document["components"]["securitySchemes"].items()
    assert (scheme, others) == ({"type": "http", "scheme": "bearer"}, [])
    assert document["paths"][CHAT]["post"]["security"] == ([{name: []}] if keys else [{}, {name: []}])
    assert "security" not in document["paths"]["/health"]["get"]


async def test_head_is_what_get_is_without_its_body(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        for path in ("/health", "/v1/models", "/openapi.json"):
            answer = await client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert answer.headers["content-length"] == str(len((await client.get(path)).content))
        assert (await client.head(CHAT)).status_code == 405
        assert (await client.post("/health")).headers["allow"] == "GET, HEAD"


async def test_a_path_that_is_nearly_one_is_told_which_was_meant(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        for path, told in (
            ("/v1/responses", "Responses API is not served, and chat completions are, at /v1/chat/completions"),
            ("/responses/x", "Responses API is not served"),
            ("/chat/completions", "did you mean /v1/chat/completions?"),
            ("/models", "did you mean /v1/models?"),
            ("/v1/v1/completions", "did you mean /v1/completions?"),
            ("/v1/tokenize", "did you mean /tokenize?"),
        ):
            assert told in refusal_of(await client.post(path, json={}), 404)["message"]
        assert "mean" not in refusal_of(await client.get("/nope"), 404)["message"]


async def test_other_paths_are_404_and_other_methods_405(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        for path in ("/", "/v1", "/v1/embeddings", "/v1/chat/completions/x", "/v2/models", "/%00", "/%ff"):
            refusal_of(await client.get(path), 404)
        for method, path in (("GET", CHAT), ("DELETE", "/v1/models"), ("PUT", "/health"), ("GET", "/tokenize")):
            answer = await client.request(method, path)
            refusal_of(answer, 405)
            assert answer.headers["allow"]


async def test_a_fault_of_ours_is_500_and_tells_the_client_nothing_of_it(
    door: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        monkeypatch.setattr("agentkv.server.serving.Serving.text_of", lambda *_: 1 / 0)
        error = refusal_of(await client.post("/detokenize", json={"tokens": [1]}), 500)
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "division" not in error["message"]
        assert "ZeroDivisionError" in caplog.text
        await ask(client, messages=HI)


def test_configs_that_cannot_be_are_refused() -> None:
    for wrong, said in (
        ({"host": "0.0.0.0"}, "--api-key-file"),
        ({"host": "example.org"}, "--api-key-file"),
        ({"port": 70_000}, "port"),
        ({"api_keys": ("",)}, "key"),
        ({"api_keys": ("a b ",)}, "key"),
        ({"drain_timeout": 0}, "drain_timeout"),
        ({"max_body_bytes": -1}, "max_body_bytes"),
        ({"max_held_bytes": 0}, "max_held_bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServerConfig(**wrong)  # type: ignore[arg-type]
    assert ServerConfig(host="0.0.0.0", api_keys=("key",)).is_loopback is False
    assert all(ServerConfig(host=host).is_loopback for host in ("localhost", "::1", "127.9.9.9"))
