"""An application in the same process answers as it would over HTTP: part by part, and it hears when its reader left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import httpx2 as httpx
import pytest

from agentkv.clients.asgi_transport import StreamingASGITransport
from support.in_process import when_left

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=StreamingASGITransport(app), base_url="http://in.process", timeout=None)


async def start(send: Send, status: int = 200, **headers: str) -> None:
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": named})


async def part(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


class Steps:
    """An application that sends a part whenever it is told to, and notes what it hears."""

    def __init__(self, parts: int = 3) -> None:
        self.parts = parts
        self.may_send = asyncio.Semaphore(0)
        self.sent: list[bytes] = []
        self.ended = asyncio.Event()
        self.heard_of_leaving = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(receive())
        await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.heard_of_leaving = leaving.result()["type"] == "http.disconnect"
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
        # Work that an application does once it has heard, before it ends.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.ended.set()

    async def _send(self, send: Send) -> None:
        await start(send)
        for number in range(self.parts):
            await self.may_send.acquire()
            self.sent.append(b"part %d" % number)
            await part(send, self.sent[-1])
        await part(send, b"", more=False)


def others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# -- streaming ------------------------------------------------------------------------------------------------------


async def test_a_part_is_read_before_the_next_one_is_sent() -> None:
    app = Steps(parts=3)
    async with client(app) as http, http.stream("GET", "/") as response:
        parts = response.aiter_raw()
        for number in range(3):
            assert len(app.sent) == number
            app.may_send.release()
            assert await anext(parts) == b"part %d" % number
        assert await anext(parts, None) is None
    assert app.ended.is_set()
    assert not others()


async def test_who_does_not_read_holds_the_application_up() -> None:
    app = Steps(parts=100)
    for _ in range(100):
        app.may_send.release()
    async with client(app) as http, http.stream("GET", "/") as response:
        for _ in range(50):
            await asyncio.sleep(0)
        # One part stands in between, and one waits for its place.
        assert len(app.sent) == 2
        read = [body async for body in response.aiter_raw()]
    assert read == app.sent
    assert len(read) == 100


async def test_what_was_asked_arrives_as_it_was_sent() -> None:
    seen: dict[str, Any] = {}

    async def echo(scope: Message, receive: Receive, send: Send) -> None:
        body = await receive()
        seen.update(scope, body=body["body"])
        await start(send, 201, **{"content-type": "text/plain", "x-one": "1"})
        await part(send, body["body"], more=False)

    async with client(echo) as http:
        response = await http.post("/a%20b/c?x=1&y=%2F", content=b"\x00body", headers={"X-Two": "2"})
    assert (response.status_code, response.content, response.headers["x-one"]) == (201, b"\x00body", "1")
    assert (seen["path"], seen["raw_path"], seen["query_string"]) == ("/a b/c", b"/a%20b/c", b"x=1&y=%2F")
    assert (b"x-two", b"2") in seen["headers"]
    assert seen["method"] == "POST"


async def test_answers_without_a_body_end() -> None:
    async def empty(scope: Message, receive: Receive, send: Send) -> None:
        status = 204 if scope["method"] == "DELETE" else 200
        await start(send, status, **({} if status == 204 else {"content-length": "5"}))
        await part(send, b"", more=False)

    async with client(empty) as http:
        assert (await http.head("/")).headers["content-length"] == "5"
        deleted = await http.delete("/")
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert not others()


async def test_many_requests_at_once_are_kept_apart() -> None:
    async def slowly(scope: Message, receive: Receive, send: Send) -> None:
        await start(send)
        for letter in scope["path"].encode():
            await asyncio.sleep(0)
            await part(send, bytes([letter]))
        await part(send, b"", more=False)

    async with client(slowly) as http:
        answers = await asyncio.gather(*(http.get(f"/number/{number}") for number in range(100)))
    assert [answer.text for answer in answers] == [f"/number/{number}" for number in range(100)]
    assert not others()


# -- leaving --------------------------------------------------------------------------------------------------------


async def test_closing_early_tells_the_application_and_waits_for_its_end() -> None:
    app = Steps()
    app.may_send.release()
    async with client(app) as http:
        async with http.stream("GET", "/") as response:
            assert await anext(response.aiter_raw()) == b"part 0"
            assert not app.heard_of_leaving
        assert app.heard_of_leaving
        assert app.ended.is_set()
    assert not others()


async def test_closing_reaches_an_application_that_waits_for_room() -> None:
    app = Steps(parts=10)
    for _ in range(10):
        app.may_send.release()
    async with client(app) as http:
        async with http.stream("GET", "/"):
            while len(app.sent) < 2:
                await asyncio.sleep(0)
        assert app.ended.is_set()
    assert not others()


async def test_a_cancel_while_the_status_is_awaited_ends_the_application_before_it_comes_out() -> None:
    begun, told = asyncio.Event(), asyncio.Event()

    async def waits(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0)
        told.set()

    async with client(waits) as http:
        asking = asyncio.ensure_future(http.get("/"))
        await begun.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert told.is_set()
    assert not others()


async def test_a_cancel_while_a_part_is_awaited_ends_the_application_too() -> None:
    app = Steps()

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("GET", "/") as response:
            reading.set()
            async for _ in response.aiter_raw():
                pass

    reading = asyncio.Event()
    async with client(app) as http:
        task = asyncio.ensure_future(read(http))
        await reading.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert app.heard_of_leaving
    assert app.ended.is_set()
    assert not others()


async def test_an_application_that_takes_no_notice_sends_into_nothing_until_it_ends() -> None:
    async def deaf(scope: Message, receive: Receive, send: Send) -> None:
        await start(send)
        for _ in range(20):
            await part(send, b"x")
        await part(send, b"", more=False)

    async with client(deaf) as http, http.stream("GET", "/") as response:
        assert await anext(response.aiter_raw()) == b"x"
    assert not others()


# -- timeouts -------------------------------------------------------------------------------------------------------

SOON = httpx.Timeout(None, read=0.02)
"""For applications that stand still until they are told to go."""


async def test_a_status_that_does_not_come_in_time_ends_the_application_and_raises_a_timeout() -> None:
    told = asyncio.Event()

    async def waits(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        await asyncio.sleep(0)
        told.set()

    async with client(waits) as http:
        with pytest.raises(httpx.ReadTimeout, match=r"nothing came from the application for 0\.02 s"):
            await http.get("/", timeout=SOON)
        assert told.is_set()
    assert not others()


async def test_a_part_that_does_not_come_in_time_does_too_and_those_before_it_were_read() -> None:
    app = Steps()
    app.may_send.release()
    async with client(app) as http, http.stream("GET", "/", timeout=SOON) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == b"part 0"
        with pytest.raises(httpx.ReadTimeout):
            await anext(parts)
        assert app.heard_of_leaving
        assert app.ended.is_set()
    assert not others()


async def test_the_time_is_for_each_part_and_not_for_the_reader() -> None:
    app = Steps(parts=4)
    async with client(app) as http, http.stream("GET", "/", timeout=httpx.Timeout(None, read=30)) as response:
        parts = response.aiter_raw()
        for number in range(4):
            asyncio.get_running_loop().call_soon(app.may_send.release)
            assert await anext(parts) == b"part %d" % number
        assert await anext(parts, None) is None
    assert not others()


async def test_an_application_that_goes_on_behind_its_answer_is_not_waited_for_beyond_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lingers(scope: Message, receive: Receive, send: Send) -> None:
        await start(send)
        await part(send, b"all of it", more=False)
        await going_on.wait()

    going_on = asyncio.Event()
    async with client(lingers) as http, http.stream("GET", "/", timeout=SOON) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == b"all of it"
        when_left(monkeypatch, going_on.set)
        with pytest.raises(httpx.ReadTimeout):
            await anext(parts)
    assert not others()


# -- closing the transport ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True])
async def test_closing_the_transport_ends_every_application_that_still_answers(reads: bool) -> None:
    apps = [Steps(), Steps()]

    async def either(scope: Message, receive: Receive, send: Send) -> None:
        await apps[int(scope["path"][1:])](scope, receive, send)

    http = client(either)
    responses = [await http.send(http.build_request("GET", f"/{number}"), stream=True) for number in range(2)]
    if reads:
        apps[0].may_send.release()
        assert await anext(responses[0].aiter_raw()) == b"part 0"
    await http.aclose()
    assert all(app.heard_of_leaving and app.ended.is_set() for app in apps)
    assert not others()
    for response in responses:
        await response.aclose()


async def test_who_still_waits_learns_that_the_transport_was_closed() -> None:
    app = Steps()
    http = client(app)

    async def read() -> None:
        async with http.stream("GET", "/") as response:
            reading.set()
            async for _ in response.aiter_raw():
                pass

    reading = asyncio.Event()
    task = asyncio.ensure_future(read())
    await reading.wait()
    await http.aclose()
    with pytest.raises(httpx.ReadError, match="the transport was closed"):
        await task
    assert not others()


# -- applications that fail -----------------------------------------------------------------------------------------


async def test_an_error_before_the_status_comes_out_of_the_request() -> None:
    async def fails(scope: Message, receive: Receive, send: Send) -> None:
        raise LookupError("nothing here")

    async with client(fails) as http:
        with pytest.raises(LookupError, match="nothing here"):
            await http.get("/")
    assert not others()


@pytest.mark.parametrize("parts", [0, 1, 5])
async def test_an_error_behind_the_status_comes_out_behind_the_parts_that_were_sent(parts: int) -> None:
    async def fails(scope: Message, receive: Receive, send: Send) -> None:
        await start(send)
        for _ in range(parts):
            await part(send, b"x")
        raise LookupError("lost half way")

    async with client(fails) as http, http.stream("GET", "/") as response:
        bodies = response.aiter_raw()
        assert [await anext(bodies) for _ in range(parts)] == [b"x"] * parts
        with pytest.raises(LookupError, match="lost half way"):
            await anext(bodies)
    assert not others()


async def test_an_error_of_an_application_that_was_left_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await start(send)
        await receive()
        raise LookupError("too late")

    async with client(fails) as http, http.stream("GET", "/"):
        pass
    assert not others()
    gc.collect()  # A task whose error nobody asked for would say so now.
    assert not caplog.records


@pytest.mark.parametrize("begins", [False, True])
async def test_an_application_that_ends_without_its_answer_is_an_error_and_no_waiting_for_ever(begins: bool) -> None:
    async def silent(scope: Message, receive: Receive, send: Send) -> None:
        if begins:
            await start(send)
            await part(send, b"half of it")

    async with client(silent) as http:
        with pytest.raises(RuntimeError, match="ended"):
            await http.get("/")
    assert not others()
