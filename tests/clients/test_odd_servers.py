"""Whatever a server sends, what comes of it is an answer or one of the library's own errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

import agentkv
from agentkv import Reply, ServerUnreachable
from agentkv.clients.asgi_transport import StreamingASGITransport
from agentkv.clients.remote import connection

HELLO = [{"role": "user", "content": "Hello."}]
MODELS = b'{"data": [{"id": "m"}]}'
SAID = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello."}, "finish_reason": "stop"}]}\n\n'
DEEP = b"[" * 100_000


def sending(*parts: bytes, models: bytes = MODELS) -> StreamingASGITransport:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts if scope["method"] == "POST" else (models,):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return StreamingASGITransport(answer)


async def asked(*parts: bytes) -> Reply:
    async with agentkv.connect("http://in.process", transport=sending(*parts)) as remote:
        return await remote.generate(HELLO)


@pytest.mark.parametrize(
    "chunk",
    [
        DEEP,
        b'{"usage": {"prompt_tokens": 1e999}}',
        b'{"usage": {"prompt_tokens": 2, "completion_tokens": -1}}',
        b'{"usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}}',
        b'{"choices": [{"index": 1e999, "delta": {"content": "x"}}]}',
        b'{"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 1e999}]}}]}',
    ],
)
async def test_chunks_that_cannot_be_are_no_answer(chunk: bytes) -> None:
    with pytest.raises(ServerUnreachable):
        await asked(SAID, b"data: " + chunk + b"\n\n", b"data: [DONE]\n\n")


async def test_models_that_are_nested_without_end_are_no_list() -> None:
    with pytest.raises(ServerUnreachable, match="gave no JSON"):
        async with agentkv.connect("http://in.process", transport=sending(models=DEEP)):
            pass


@pytest.mark.parametrize("last", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\n\n"])
async def test_the_end_needs_no_newline(last: bytes) -> None:
    assert (await asked(SAID, last)).text == "Hello."


@pytest.mark.parametrize("last", [b"", b"data: [DO", b"data:", b": waiting"])
async def test_half_an_end_is_none(last: bytes) -> None:
    with pytest.raises(ServerUnreachable, match="broke off"):
        await asked(SAID, last)


async def test_an_event_without_end_is_read_no_further_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_EVENT_BYTES", 2**16)
    long = {"choices": [{"index": 0, "delta": {"content": "a" * 60_000}}]}
    assert (await asked(b"data: " + json.dumps(long).encode() + b"\n\n", b"data: [DONE]\n\n")).text == "a" * 60_000
    with pytest.raises(ServerUnreachable, match="an event has more than 65,536 bytes"):
        await asked(b"data: ", *[b"a" * 2**14] * 8)


async def test_each_part_of_a_long_event_is_searched_once() -> None:
    text = "é" * 3000
    whole = b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n"
    sent = whole * 2 + b"data: [DONE]"
    parts = [sent[at : at + 7] for at in range(0, len(sent), 7)]
    assert (await asked(*parts)).text == text * 2
