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
from agentkv.testing import scripted
from support.held import Held
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


def written_in(runtime: Runtime) -> int:
    """Tokens of all answers, those that nobody read to their end among them."""
    return int(runtime.report().to_dict()["output_tokens"])


async def leave_while_it_streams(client: httpx.AsyncClient, number: int) -> None:
    body = {"model": "scripted", "messages": HI, "stream": True, "n": 1 + number % 2}
    async with client.stream("POST", CHAT, json=body) as response:
        assert response.status_code == 200
        async for _ in response.aiter_lines():
            return


@pytest.mark.usefixtures("collector")
async def test_clients_that_leave_their_streams_take_their_calls_with_them(door: Any) -> None:
    async with (
        scripted_runtime(lambda asked: LONG, strict=False, max_num_seqs=4) as runtime,
        door(runtime) as client,
    ):
        for _ in range(8):
            await asyncio.gather(*(leave_while_it_streams(client, number) for number in range(25)))
        await until(lambda: nothing_left(runtime))
        written = written_in(runtime)
        served = await ask(client, messages=HI)
        assert served["choices"][0]["message"]["content"].split() == LONG.split()
        # Two hundred answers, half of them double, that nobody stopped would have been written to their end.
        assert written < 75 * served["usage"]["completion_tokens"]


async def test_two_hundred_clients_that_leave_the_queue_are_never_taken_out_of_it(door: Any) -> None:
    model = Held(scripted(lambda asked: "Yes."))
    async with scripted_runtime(model, strict=False) as runtime, door(runtime) as client:
        model.hold(1)
        served = asyncio.ensure_future(ask(client, messages=HI))
        await model.held()
        body = {"model": "scripted", "messages": HI}
        asking = [
            asyncio.ensure_future(client.post(CHAT, json={**body, "stream": bool(number % 2)})) for number in range(200)
        ]
        # While the step is held the engine is told what comes and what goes, and takes up neither.
        worker: Any = runtime._life.worker
        await until(lambda: len(worker._commands) == 200)
        for each in asking:
            each.cancel()
        await until(lambda: len(worker._commands) == 400)
        model.let_go()
        await asyncio.gather(*asking, return_exceptions=True)
        assert (await served)["choices"][0]["message"]["content"] == "Yes."
        await until(lambda: nothing_left(runtime))
        assert runtime.report().to_dict()["calls"] == 1


PHASES = {"prefill": 2, "decode": 12, "just finished": 0}
"""In which forward of its call a client leaves; 0: in the last one."""


@pytest.mark.parametrize("phase", PHASES)
async def test_a_hundred_clients_that_leave_in_one_phase_leave_nothing(door: Any, phase: str) -> None:
    """Every other one streams."""
    model = Held(scripted(lambda asked: "And so it goes on."))
    async with (
        scripted_runtime(model, strict=False, max_num_batched_tokens=16, max_num_seqs=8) as runtime,
        door(runtime) as client,
    ):
        prompt = [{"role": "user", "content": "It is of many tokens. " * 5}]
        whole = (await ask(client, messages=prompt, cache_salt="first"))["usage"]
        prefill = -(-whole["prompt_tokens"] // 16)
        assert prefill > PHASES["prefill"]
        nth = PHASES[phase] or prefill + whole["completion_tokens"] - 1
        before = runtime.report().to_dict()
        for number in range(100):
            model.hold(nth)
            body = {"model": "scripted", "messages": prompt, "cache_salt": f"{phase} {number}"}
            body["stream"] = bool(number % 2)
            asking = asyncio.ensure_future(client.post(CHAT, json=body))
            await model.held()
            asking.cancel()
            await asyncio.sleep(0)
            model.let_go()
            await asyncio.gather(asking, return_exceptions=True)
            # Over HTTP it may still run; its forwards are not to be taken for those of the next one.
            await until(lambda: nothing_left(runtime))
        after = runtime.report().to_dict()
        assert after["calls"] - before["calls"] == 100
        ended, written = (after[name] - before[name] for name in ("replies", "output_tokens"))
        if phase == "just finished":
            assert ended == 100
        else:
            # Over HTTP the server hears of it a few steps later than the client left.
            assert ended < 50
            assert written < 50 * whole["completion_tokens"]
        assert (await ask(client, messages=HI))["choices"][0]["message"]["content"] == "And so it goes on."


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
        written = written_in(runtime)
        answer = await raw(client, {"messages": HI, "stream": stream})
        assert b'"finish_reason":"stop"' in answer
        assert written < 10 * (written_in(runtime) - written)


async def test_connections_that_are_reset_leave_nothing() -> None:
    async with scripted_runtime(lambda asked: LONG) as runtime, over_http(runtime) as client:
        body = json.dumps({"model": "scripted", "messages": HI, "stream": True}).encode()
        for cut in (1, 30, 100, *[None] * 20):
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
        await until(lambda: nothing_left(runtime))
        figures = runtime.report().to_dict()
        assert figures["calls"] > 0
        whole = (await ask(client, messages=HI))["usage"]["completion_tokens"]
        assert figures["output_tokens"] < 10 * whole


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
