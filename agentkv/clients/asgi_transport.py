"""An httpx transport that calls an ASGI application in the same process, and streams.

httpx's own collects a whole body before it answers, so nothing streams and a client that leaves is never noticed. Here
the body's parts come as the application sends them, one waiting at most, and closing a response early tells the
application `http.disconnect` and waits until it has ended. Of a request's timeouts the one for reading holds, for the
status and for each part; there is nothing to connect to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, NoReturn

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
        self._open: set[_Exchange] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer once the application has sent its status. What it raises comes out here, or while the body is read.

        Raises ReadTimeout, once the application has heard that nobody reads any more and has ended.
        """
        patience = request.extensions.get("timeout", {}).get("read")
        exchange = _Exchange(await request.aread(), patience)
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
        exchange.run(self._app(scope, exchange.receive, exchange.send), self._open.discard)
        self._open.add(exchange)
        try:
            status, headers = await exchange.started()
        except BaseException:
            await exchange.leave()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(exchange))

    async def aclose(self) -> None:
        """Tell every application that still answers that nobody reads any more, and wait for its end.

        Whoever reads an answer meanwhile raises ReadError.
        """
        await asyncio.gather(*(exchange.leave() for exchange in list(self._open)))


class _Exchange:
    """One request and its answer, between the application's task and the reader of the response.

    One part stands in between at most; whoever sends the next one waits until it was taken. Everything happens on one
    loop, so that what is looked at holds until the next await.
    """

    def __init__(self, body: bytes, patience: float | None) -> None:
        """patience: seconds for the status, and for each part."""
        self._patience = patience
        self._body: bytes | None = body
        self._start: tuple[int, list[tuple[bytes, bytes]]] | None = None
        self._part: bytes | None = None
        self._complete = False
        """The application has sent its last part."""
        self._left = False
        """Whoever reads on learns that the transport was closed."""
        self._over = asyncio.Event()
        """Nobody reads any more, or there is nothing more to read: `http.disconnect` for the application."""
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()
        self._task: asyncio.Future[None] | None = None

    def run(self, application: Awaitable[None], ended: Callable[[_Exchange], None]) -> None:
        """Begin; what the application raises is kept for the reader. ended: hears when it has ended."""
        self._task = asyncio.ensure_future(application)
        self._task.add_done_callback(lambda _: self._readable.set())
        self._task.add_done_callback(lambda _: ended(self))

    async def started(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """The status and the headers, once they are sent; what the application raised before."""
        while self._start is None:
            await self._wait_to_read("it answered")
        return self._start

    async def parts(self) -> AsyncIterator[bytes]:
        """What is sent, until the application has ended."""
        assert self._task is not None, "a body is read of an application that runs"
        while self._part is not None or not self._complete:
            if self._part is not None:
                part, self._part = self._part, None
                self._writable.set()
                yield part
            else:
                await self._wait_to_read("its answer did")
        done, _ = await asyncio.wait([self._task], timeout=self._patience)
        if not done:
            await self._give_up()
        self._task.result()

    async def leave(self) -> None:
        """Tell the application that nobody reads any more, and wait for its end."""
        self._left = True
        self._over.set()
        self._writable.set()
        assert self._task is not None, "what is left has begun"
        if not self._task.done():
            await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # Asked for, so that nobody is told of an error that nobody is there for.

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            if message.get("body"):
                while self._part is not None and not self._over.is_set():
                    self._writable.clear()
                    await self._writable.wait()
                if not self._over.is_set():
                    self._part = bytes(message["body"])
            if not message.get("more_body", False):
                self._complete = True
                self._over.set()
        self._readable.set()

    async def _wait_to_read(self, what: str) -> None:
        """Until something was sent; raises what the application raised, or RuntimeError where it ended."""
        assert self._task is not None, "an answer is waited for of an application that runs"
        if self._left:
            raise httpx.ReadError("the transport was closed while the answer was read")
        if self._task.done():
            if not self._task.cancelled():
                self._task.result()
            raise RuntimeError(f"the application ended before {what}")
        self._readable.clear()
        try:
            async with asyncio.timeout(self._patience):
                await self._readable.wait()
        except TimeoutError:
            await self._give_up()

    async def _give_up(self) -> NoReturn:
        await self.leave()
        raise httpx.ReadTimeout(f"nothing came from the application for {self._patience} s") from None


class _Body(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._exchange.parts():
            yield part

    async def aclose(self) -> None:
        await self._exchange.leave()
