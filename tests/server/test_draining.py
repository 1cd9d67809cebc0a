"""Draining, as SIGTERM begins it: what runs comes to its end, what comes is refused, what takes too long is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from agentkv import Runtime
from agentkv.clients.asgi_transport import StreamingASGITransport
from agentkv.server import create_app
from agentkv.server.serving import Serving
from support.sent_in_parts import SentInParts
from support.servers import refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
LONG = "word " * 200


@asynccontextmanager
async def served(runtime: Runtime) -> AsyncIterator[tuple[Serving, httpx.AsyncClient]]:
    app = create_app(runtime)
    transport = StreamingASGITransport(app)
    async with httpx.AsyncClient(base_url="http://agentkv.test", transport=transport, timeout=None) as client:
        yield app.state.serving, client


async def until_it_runs(runtime: Runtime) -> None:
    async with asyncio.timeout(60):
        while not runtime.report().to_dict()["running"]:
            await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_runs_comes_to_its_end_and_what_comes_is_refused(stream: bool) -> None:
    async with scripted_runtime([LONG], strict=False) as runtime, served(runtime) as (serving, client):
        running = asyncio.ensure_future(client.post(CHAT, json={**BODY, "stream": stream}))
        await until_it_runs(runtime)
        draining = asyncio.ensure_future(serving.drain(60))
        await asyncio.sleep(0)
        for answer in (await client.post(CHAT, json=BODY), await client.get("/health"), await client.get("/v1/models")):
            assert refusal_of(answer, 503)["code"] == "draining"
            assert int(answer.headers["retry-after"]) >= 1
        assert not draining.done()
        answer = await running
        assert await draining is True
    assert answer.status_code == 200
    if stream:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_a_body_that_is_still_coming_is_waited_for_and_then_refused() -> None:
    body = json.dumps(BODY).encode()
    async with scripted_runtime([]) as runtime:
        app = create_app(runtime)
        asking = SentInParts(app, CHAT, len(body))
        await asking.send(body[:10], more=True)
        draining = asyncio.ensure_future(app.state.serving.drain(60))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not draining.done()
        await asking.send(body[10:], more=False)
        assert (await asking.status(), asking.error["code"]) == (503, "draining")
        assert await draining is True


async def test_a_body_that_does_not_come_is_cut_off_with_the_reason() -> None:
    async with scripted_runtime([]) as runtime:
        app = create_app(runtime)
        asking = SentInParts(app, CHAT, 100)
        await asking.send(b"{", more=True)
        assert await app.state.serving.drain(0.001) is False
        assert await app.state.serving.cut_off() == 1
        assert (await asking.status(), asking.error["code"]) == (503, "draining")


async def test_an_idle_server_is_drained_at_once() -> None:
    async with scripted_runtime([]) as runtime, served(runtime) as (serving, client):
        await client.get("/v1/models")
        assert await serving.drain(60) is True


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_takes_too_long_is_ended_with_the_reason(stream: bool) -> None:
    async with scripted_runtime([LONG]) as runtime, served(runtime) as (serving, client):
        running = asyncio.ensure_future(asked(client, stream))
        await until_it_runs(runtime)
        assert await serving.drain(0.001) is False
        assert await serving.cut_off() == 1
        error = await running
        assert (error["type"], error["code"]) == ("server_error", "draining")
        # Nothing of the call is left: the runtime is proved to be idle behind this.


async def asked(client: httpx.AsyncClient, stream: bool) -> dict[str, Any]:
    """The error that the answer is, or that its stream ends with."""
    if not stream:
        return refusal_of(await client.post(CHAT, json=BODY), 503)
    async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
        text = (await response.aread()).decode()
    if response.status_code == 503:  # Cut off before its first token.
        return refusal_of(response, 503)
    last = json.loads(text.split("\n\n")[-2].removeprefix("data: "))
    error: dict[str, Any] = last["error"]
    return error
