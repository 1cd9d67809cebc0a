"""Streams whose first token is long in coming: they say so, for what is silent is cut by proxies and clients."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentkv.server.config import Patience
from agentkv.session.turns import ChatTurn
from support.servers import refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
SOON = Patience(begin=0.001, remind=0.001)


@asynccontextmanager
async def held_back(door: Any, reply: Any, patience: Patience) -> AsyncIterator[tuple[Any, threading.Event]]:
    """A client of a server whose calls do not begin before the event is set, as if the queue were long."""
    released, begin = threading.Event(), ChatTurn.begin

    async def begin_late(turn: ChatTurn) -> Any:
        await asyncio.to_thread(released.wait)
        return await begin(turn)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChatTurn, "begin", begin_late)
        async with scripted_runtime(lambda asked: reply) as runtime, door(runtime, patience=patience) as client:
            try:
                yield client, released
            finally:
                released.set()


async def test_a_stream_says_that_it_waits_and_then_goes_on_as_ever(door: Any) -> None:
    async with held_back(door, "Yes.", SOON) as (client, released), client.stream("POST", CHAT, json=BODY) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        for _ in range(3):
            assert (await anext(lines), await anext(lines)) == (": waiting", "")
        released.set()
        told = [line async for line in lines if line]
    data = [line.removeprefix("data: ") for line in itertools.dropwhile(lambda line: line == ": waiting", told)]
    assert data.pop() == "[DONE]"
    deltas = [choice["delta"] for chunk in map(json.loads, data) for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


async def test_what_fails_behind_the_wait_is_the_last_event(door: Any) -> None:
    fault = OSError("the disk is gone")
    async with held_back(door, fault, SOON) as (client, released), client.stream("POST", CHAT, json=BODY) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == ": waiting"
        released.set()
        *_, last = [line async for line in lines if line]
    assert response.status_code == 200
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


async def test_what_does_not_wait_long_keeps_its_status(door: Any) -> None:
    fault = OSError("the disk is gone")
    async with held_back(door, fault, Patience(begin=3600.0)) as (client, released):
        released.set()
        refusal_of(await client.post(CHAT, json=BODY), 500)


async def test_a_client_that_is_told_to_wait_and_leaves_leaves_nothing(door: Any) -> None:
    async with held_back(door, "Yes. " * 100, SOON) as (client, released):
        async with client.stream("POST", CHAT, json=BODY) as response:
            assert await anext(response.aiter_lines()) == ": waiting"
            released.set()
        assert (await client.post(CHAT, json=BODY)).status_code == 200
