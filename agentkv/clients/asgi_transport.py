"""An httpx transport that calls an ASGI application in the same process, and streams.

httpx's own collects a whole body before it answers, so nothing streams and a client that leaves is never noticed. Here
the body's parts come as the application sends them, one waiting at most, and closing a response early tells the
application `http.disconnect` and waits until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx2 as httpx

__all__ = ["StreamingASGITransport"]

Message = MutableMapping[str, Any]
ASGIApp = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class StreamingASGITransport(httpx.AsyncBaseTransport):
    """For one event loop at a time, that of the request; several requests may run at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer once the application has sent its status. What it raises comes out here, or while the body is read."""
        exchange = _Exchange(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 0),
            "server": (request.url.host, request.url.port),
            "state": {},
        }
        exchange.run(self._app(scope, exchange.receive, exchange.send))
        try:
            status, headers = await exchange.started()
        except BaseException:
            await exchange.leave()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(exchange))


class _Exchange:
    """One request and its answer, between the application's task and the reader of the response."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self._start: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]] = asyncio.get_running_loop().create_future()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        self._task: asyncio.Future[None] | None = None

    def run(self, application: Awaitable[None]) -> None:
        self._task = asyncio.ensure_future(self._to_its_end(application))

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        return await self._start

    async def parts(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            yield part
        assert self._task is not None, "a body is read of an application that runs"
        await self._task

    async def leave(self) -> None:
        """Tell the application that nobody reads any more, and wait for its end."""
        self._left.set()
        while not self._parts.empty():  # A sender that waits for room goes on, and finds that nobody is there.
            self._parts.get_nowait()
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])
        if self._start.done() and not self._start.cancelled():
            self._start.exception()  # Told to whoever asked, or to nobody: the request was left.

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self._start.set_result((message["status"], list(message.get("headers", ()))))
            return
        if message.get("body"):
            await self._put(message["body"])
        if not message.get("more_body", False):
            await self._put(None)

    async def _put(self, part: bytes | None) -> None:
        if not self._left.is_set():
            await self._parts.put(part)

    async def _to_its_end(self, application: Awaitable[None]) -> None:
        try:
            await application
        except Exception as error:
            if not self._start.done():
                self._start.set_exception(error)
                return
            raise
        finally:
            if not self._start.done():
                self._start.set_exception(RuntimeError("the application ended without an answer"))
            if not self._left.is_set() and self._parts.empty():
                self._parts.put_nowait(None)


class _Body(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._exchange.parts():
            yield part

    async def aclose(self) -> None:
        await self._exchange.leave()
