"""Events that are written to the connection as they come: the same bytes, whoever reads them and however slowly."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from typing import Any

import pytest

from agentkv.server import create_app
from agentkv.server.answering import Now
from agentkv.server.listen import bound_socket
from support import servers
from support.servers import ask, chunks_of, in_process, over_http, scripted_runtime

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("httptools"), reason="needs httptools")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
WORDS = " ".join(f"word{number}" for number in range(30))


class Seen:
    """What went past ASGI, and what was not ready to."""

    def __init__(self) -> None:
        self.sent = self.refused = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, send, ready = Seen(), Now.send, Now.ready

    def noting_send(self: Now, event: Any) -> None:
        seen.sent += 1
        send(self, event)

    def noting_ready(self: Now) -> bool:
        is_ready = ready(self)
        seen.refused += seen.sent > 0 and not is_ready
        return is_ready

    monkeypatch.setattr(Now, "send", noting_send)
    monkeypatch.setattr(Now, "ready", noting_ready)
    return seen


def content_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] is not None for choice in own] == [False] * (len(own) - 1) + [True]
    return "".join(choice.get("text", "") or choice.get("delta", {}).get("content", "") for choice in own)


def raw(body: dict[str, Any]) -> bytes:
    data = json.dumps({"model": "scripted", "messages": HI, "stream": True, **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def chunks_in(body: bytes) -> list[dict[str, Any]]:
    *events, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def unchunked(body: bytes) -> bytes:
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not int(size, 16):
            assert body == b"\r\n"
            return b"".join(parts)
        parts.append(body[: int(size, 16)])
        assert body[int(size, 16) :].startswith(b"\r\n")
        body = body[int(size, 16) + 2 :]


CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI}),
    (CHAT, {"messages": HI, "n": 3, "temperature": 1.0, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HI, "n": 2, "temperature": 0, "logprobs": True, "return_token_ids": True}),
    (TEXT, {"prompt": "Say", "echo": True}),
    (TEXT, {"prompt": ["Say", "Tell"]}),
]


async def test_a_stream_says_what_the_whole_answer_says(seen: Seen) -> None:
    async with scripted_runtime(lambda asked: WORDS, strict=False) as runtime, over_http(runtime) as client:
        for path, asked in CASES:
            seen.sent = 0
            whole = await ask(client, path, max_tokens=400, **{k: v for k, v in asked.items() if k != "stream_options"})
            chunks = await chunks_of(client, path, max_tokens=400, **asked)
            for choice in whole["choices"]:
                check_choice(choice, [each for chunk in chunks for each in chunk["choices"]])
            if "stream_options" in asked:
                assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
            assert (seen.sent > 0) == (asked.get("prompt") != ["Say", "Tell"]), asked


def check_choice(choice: dict[str, Any], streamed: list[dict[str, Any]]) -> None:
    own = [each for each in streamed if each["index"] == choice["index"]]
    said = choice["text"] if "text" in choice else choice["message"]["content"]
    assert WORDS in said
    assert content_of([{"choices": own}], choice["index"]) == said
    if "token_ids" in choice:
        assert [number for each in own for number in each.get("token_ids", [])] == choice["token_ids"]
        told = [token["token"] for each in own for token in (each["logprobs"] or {"content": []})["content"]]
        assert told == [token["token"] for token in choice["logprobs"]["content"]]


async def test_a_client_that_reads_slowly_gets_everything_in_its_order(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(config: Any) -> socket.socket:
        listening = bound_socket(config)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listening

    monkeypatch.setattr(servers, "bound_socket", small)
    asked = {"max_tokens": 400, "logprobs": True, "top_logprobs": 20, "stream_options": {"include_usage": True}}
    async with scripted_runtime(lambda asked: WORDS, strict=False) as runtime, over_http(runtime) as client:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((client.base_url.host, client.base_url.port))
            connection.sendall(raw(asked))
            async with asyncio.timeout(60):
                # The engine waits for no reader.
                while not (told := runtime.report().to_dict())["output_tokens"] or told["running"]:
                    await asyncio.sleep(0)

            def read() -> bytes:
                parts = []
                while part := connection.recv(2**16):
                    parts.append(part)
                return b"".join(parts)

            body = (await asyncio.to_thread(read)).partition(b"\r\n\r\n")[2]
    *chunks, usage = chunks_in(unchunked(body))
    assert content_of(chunks) == WORDS
    told = [
        token["token"] for each in chunks for token in (each["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert len(told) == usage["usage"]["completion_tokens"]
    assert seen.sent > 0
    assert seen.refused > 0, "it waited for the reader at least once"


class Noting:
    """A middleware that counts what is sent."""

    parts = 0

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            Noting.parts += message["type"] == "http.response.body" and b'"content":"' in message["body"]
            await send(message)

        await self._app(scope, receive, noting)


async def test_a_middleware_that_somebody_adds_sees_all_that_is_sent(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_middleware(*arguments: Any) -> Any:
        app = create_app(*arguments)
        app.add_middleware(Noting)
        return app

    monkeypatch.setattr(servers, "create_app", with_middleware)
    Noting.parts = 0
    async with scripted_runtime(lambda asked: WORDS, strict=False) as runtime, over_http(runtime) as client:
        chunks = await chunks_of(client, messages=HI, max_tokens=400)
    assert content_of(chunks) == WORDS
    assert Noting.parts == sum('"content":"' in json.dumps(chunk, separators=(",", ":")) for chunk in chunks)
    assert seen.sent == 0


async def test_in_process_nothing_goes_past_asgi(seen: Seen) -> None:
    async with scripted_runtime(lambda asked: WORDS, strict=False) as runtime, in_process(runtime) as client:
        assert content_of(await chunks_of(client, messages=HI, max_tokens=400)) == WORDS
    assert seen.sent == 0
