"""What the server sets on the connections that it takes, and what it reads from them before a request is one."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
from contextlib import suppress
from typing import Any

import pytest

from agentkv.server import ServerConfig
from agentkv.server.listen import bound_socket
from support.servers import over_http, scripted_runtime


async def test_a_connection_sends_what_is_written_at_once() -> None:
    """With Nagle's waiting a small answer's body comes 40 ms after its head."""
    taken: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        taken.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    with bound_socket(ServerConfig(port=0)) as listening:
        async with await asyncio.start_server(on_connection, sock=listening):
            _, writer = await asyncio.open_connection(*listening.getsockname())
            assert await taken
            writer.close()


async def answered(client: Any, sent: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the error of what comes back before the connection is closed."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) - {"figures"} == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1]), error


MOST_HEAD_BYTES = 64 * 2**10
LONG = b"a" * MOST_HEAD_BYTES
with_httptools = pytest.mark.skipif(not importlib.util.find_spec("httptools"), reason="needs httptools")
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


@with_httptools
@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + LONG,
        b"GET /health HTTP/1.1\r\nx: " + LONG,
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * (MOST_HEAD_BYTES // 6),
        POST + b"transfer-encoding: chunked\r\n\r\n1;" + LONG,
    ],
    ids=["a path", "a header", "many headers", "what may stand behind a chunk's size"],
)
async def test_a_head_without_end_is_refused(sent: bytes) -> None:
    async with scripted_runtime([]) as runtime, over_http(runtime) as client:
        status, error = await answered(client, sent)
        assert (status, error["code"]) == (431, "head_too_large")
        assert (await client.get("/health", headers={"x": "a" * (MOST_HEAD_BYTES // 2)})).status_code == 200


@with_httptools
async def test_trailers_without_end_end_their_request() -> None:
    async with scripted_runtime([]) as runtime, over_http(runtime, body_timeout=3600.0) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ")
        for _ in range(64):  # More than what one read may bring along with the body.
            writer.write(b"a" * 2**13)
        # A connection that is closed on a client that still sends may lose it the answer.
        with suppress(ConnectionResetError, BrokenPipeError):
            assert b" 431 " in await reader.readline()
        writer.transport.abort()
        assert (await client.get("/health")).status_code == 200


@with_httptools
async def test_what_is_no_http_is_refused_in_the_same_shape() -> None:
    async with scripted_runtime([]) as runtime, over_http(runtime) as client:
        status, error = await answered(client, b"GET / GET /\r\n\r\n")
        assert (status, error["code"]) == (400, "invalid_http")


def offering(protocol: bytes, body: bytes) -> bytes:
    """As Java's HttpClient sends its requests."""
    head = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: " + protocol + b"\r\nHTTP2-Settings: AAEA\r\n"
    return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


BODY = json.dumps({"model": "scripted", "prompt": "Hello", "max_tokens": 2}).encode()


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", ["in one read", "behind the head", "in the head", "in the body"])
async def test_an_offer_of_another_protocol_is_not_taken_and_the_request_is_answered(protocol: bytes, cut: str) -> None:
    sent = offering(protocol, BODY) * 2 + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    head = sent.index(b"\r\n\r\n") + 4
    at = {"in one read": len(sent), "behind the head": head, "in the head": head - 9, "in the body": head + 5}[cut]
    async with scripted_runtime(lambda asked: "Yes.") as runtime, over_http(runtime) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(sent[:at])
        if at < len(sent):
            # Another connection is answered meanwhile, so that the first part was read by itself.
            assert (await client.get("/health")).status_code == 200
        writer.write(sent[at:])
        answers = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answers.count(b"HTTP/1.1 200 OK") == 3, answers
    assert answers.count(b'"text_completion"') == 2
    assert answers.endswith(b'{"status":"ok"}')


async def test_a_websocket_is_refused_in_the_same_shape() -> None:
    asked = b"GET /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nUpgrade: websocket\r\n"
    keys = (
        b"Connection: keep-alive, Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
    )
    async with scripted_runtime([]) as runtime, over_http(runtime) as client:
        status, error = await answered(client, asked + keys + b"\r\nConnection: close\r\n\r\n")
        assert (status, error["code"]) == (405, "method_not_allowed")


async def test_connect_is_refused() -> None:
    async with scripted_runtime([]) as runtime, over_http(runtime) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        writer.write_eof()
        assert b" 200 " not in await reader.readline()
        writer.close()
        assert (await client.get("/health")).status_code == 200
