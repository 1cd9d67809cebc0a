"""Servers over a Runtime, asked in process and over HTTP, and what is done with their answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx

from agentkv import Runtime
from agentkv.clients.asgi_transport import StreamingASGITransport
from agentkv.server import ServerConfig, create_app
from agentkv.server.listen import Server, bound_socket
from agentkv.testing import scripted
from support.runtimes import serving

__all__ = ["MODEL", "ask", "chunks_of", "events_of", "in_process", "over_http", "refusal_of", "scripted_runtime"]

MODEL = "scripted"
ROOM: dict[str, Any] = {"page_size": 4, "num_pages": 2001, "context_limit": 2048, "on_full": "raise"}


@asynccontextmanager
async def scripted_runtime(replies: Any, **options: Any) -> AsyncIterator[Runtime]:
    """A Runtime over a scripted model, as a server has it; at the end it must be idle and its books sound."""
    model = replies if hasattr(replies, "load") else scripted(replies)
    async with serving(model, **{**ROOM, **options}) as runtime:
        yield runtime


@asynccontextmanager
async def in_process(runtime: Runtime, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application itself."""
    transport = StreamingASGITransport(create_app(runtime, ServerConfig(**config)))
    async with httpx.AsyncClient(base_url="http://agentkv.test", transport=transport, timeout=60) as client:
        yield client


@asynccontextmanager
async def over_http(runtime: Runtime, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server on a free port of this machine, which runs on a loop and a thread of its own."""
    given = ServerConfig(**{"port": 0, **config})
    with bound_socket(given) as listening:
        server = Server(create_app(runtime, given), given)
        thread = threading.Thread(target=lambda: asyncio.run(server.answer(listening)))
        thread.start()
        address = f"http://{given.host}:{listening.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=address, timeout=60, limits=httpx.Limits(max_connections=None)) as c:
                yield c
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join)


async def ask(client: httpx.AsyncClient, path: str = "/v1/chat/completions", /, **body: Any) -> dict[str, Any]:
    """The whole answer, which must be a success."""
    response = await client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events_of(client: httpx.AsyncClient, path: str, **body: Any) -> list[str]:
    """The data of the server-sent events, as text."""
    async with client.stream("POST", path, json={"model": MODEL, "stream": True, **body}) as response:
        text = (await response.aread()).decode()
    assert response.status_code == 200, text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def chunks_of(
    client: httpx.AsyncClient, path: str = "/v1/chat/completions", /, **body: Any
) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well."""
    *chunks, done = await events_of(client, path, **body)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def refusal_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer with this status, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) - {"figures"} == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    return error
