"""Clients that leave: nothing of their calls is left, and the next one is served."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from agentkv import Runtime
from support.runtimes import idle_and_sound
from support.servers import ask, in_process, over_http, refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
LONG = "word " * 120


@pytest.fixture(params=[True, False], ids=["collected", "not collected"])
def collector(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once with the garbage collector and once without it: nothing may be freed by it alone."""
    if not request.param:
        gc.disable()
    yield
    gc.enable()


async def until(happened: Callable[[], bool]) -> None:
    """Let others run until it has; the test's own time limit ends it where it never does."""
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0)


def nothing_left(runtime: Runtime) -> bool:
    """A request of a client that is gone may still be on its way in when the others have been ended."""
    try:
        idle_and_sound(runtime)
    except AssertionError:
        return False
    return True


def inside(runtime: Runtime) -> int:
    figures = runtime.report().to_dict()
    return int(figures["running"]) + int(figures["waiting"])


async def leave_while_it_streams(client: httpx.AsyncClient, number: int) -> None:
    body = {"model": "scripted", "messages": HI, "stream": True, "n": 1 + number % 2}
    async with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            return


async def leave_before_the_answer(client: httpx.AsyncClient, number: int) -> None:
    """Queued, in prefill or in decode: by chance, which 50 of them make a certainty."""
    stream = bool(number % 2)
    body = {"model": "scripted", "messages": HI, "stream": stream, "prompt_cache_key": str(number)}
    asking = asyncio.ensure_future(client.post(CHAT, json=body))
    for _ in range(number):
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("leave", [leave_while_it_streams, leave_before_the_answer])
@pytest.mark.usefixtures("collector")
async def test_clients_that_leave_take_their_calls_with_them(door: Any, leave: Any) -> None:
    async with (
        scripted_runtime(lambda asked: LONG, strict=False, max_num_seqs=4) as runtime,
        door(runtime) as client,
    ):
        for _ in range(4):
            await asyncio.gather(*(leave(client, number) for number in range(25)))
        await until(lambda: nothing_left(runtime))
        written = sum(row["output_tokens"] for row in runtime.report().to_dict()["by_name"].values())
        served = await ask(client, messages=HI)
        assert served["choices"][0]["message"]["content"].split() == LONG.split()
        # A hundred answers that nobody stopped would have been written to their end.
        assert written < 25 * served["usage"]["completion_tokens"]


async def test_in_process_nothing_is_left_when_leaving_returns() -> None:
    async with scripted_runtime(lambda asked: LONG) as runtime, in_process(runtime) as client:
        for number in range(20):
            await leave_while_it_streams(client, number)
            idle_and_sound(runtime)


async def raw(client: httpx.AsyncClient, body: dict[str, Any], *, half_closed: bool = False) -> bytes:
    """What a plain socket gets, which says no more once it has asked."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    sent = json.dumps({"model": "scripted", **body}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    if half_closed:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_half_closed_connection_is_a_client_that_left(stream: bool) -> None:
    # Servers cannot tell one that only writes no more from one that is gone; uvicorn takes it as gone.
    async with scripted_runtime(lambda asked: LONG) as runtime, over_http(runtime) as client:
        for _ in range(20):
            await raw(client, {"messages": HI, "stream": stream}, half_closed=True)
        await until(lambda: nothing_left(runtime))
        answer = await raw(client, {"messages": HI, "stream": stream})
        assert b'"finish_reason":"stop"' in answer


async def test_connections_that_are_reset_leave_nothing() -> None:
    async with scripted_runtime(lambda asked: LONG) as runtime, over_http(runtime) as client:
        body = json.dumps({"model": "scripted", "messages": HI, "stream": True}).encode()
        for cut in (1, 30, 100, None):
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write((head + body)[:cut])
            await writer.drain()
            if cut is None:
                await reader.read(10)
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )  # A close that resets.
            writer.transport.abort()
        await until(lambda: inside(runtime) == 0)
        await ask(client, messages=HI)


async def test_a_thousand_connections_at_once_are_all_answered() -> None:
    body = {"model": "scripted", "messages": HI}
    async with (
        scripted_runtime(lambda asked: "Yes.", strict=False, max_queue=200) as runtime,
        over_http(runtime) as client,
    ):
        answers = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(1000)))
        assert len(answers) == 1000
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["message"]["content"] == "Yes."
            else:
                assert refusal_of(answer, 429)["code"] == "queue_full"
        assert any(answer.status_code == 200 for answer in answers)
        await ask(client, messages=HI)
