"""Answers that end when the client leaves: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .config import Patience
from .dialect import Dialect, error_event, error_response
from .errors import ApiError, api_error
from .leaving import unless_gone
from .wire import BodyWriter, body_writer, to_json

__all__ = ["EventStream", "Now", "Whole"]

_PATIENCE = Patience()


class Whole(Response):
    """One JSON object, once it is made. What makes it is cancelled when the client leaves, which aborts its call."""

    def __init__(
        self, make: Callable[[], Awaitable[Mapping[str, Any]]], dialect: Dialect, *, param: str | None = None
    ) -> None:
        super().__init__()
        self._make, self._dialect, self._param = make, dialect, param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        made = await unless_gone(self._make(), receive)
        if made is None:
            return
        try:
            body = to_json(made.result())
        except Exception as error:
            await error_response(api_error(error, param=self._param), self._dialect)(scope, receive, send)
            return
        await _start(send, 200, b"application/json", len(body))
        await send({"type": "http.response.body", "body": body})


class EventStream(Response):
    """Server-sent events as the dialect writes them.

    The status is sent with the first event, so that what fails before it (a full queue, a prompt too long) is an
    answer with its own status; what fails later is an event with the error, which takes the place of the dialect's end.
    Where the first event is long in coming, status 200 and comments are sent meanwhile, as `patience` says.

    events: makes them; those that it sends by the `Now` that it is given are not among them
    """

    def __init__(
        self,
        events: Callable[[Now], AsyncIterator[Mapping[str, Any]]],
        dialect: Dialect,
        *,
        param: str | None = None,
        patience: Patience = _PATIENCE,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._events, self._dialect, self._param, self._patience = events, dialect, param, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = await unless_gone(self._send_all(scope, receive, send), receive)
        if sent is not None:
            sent.result()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        opening = _Opening(send, self._patience)
        events = self._events(Now(opening, body_writer(scope), self._dialect))
        try:
            async for event in events:
                if not opening.over:
                    await opening.end()
                await send({"type": "http.response.body", "body": self._dialect.event(event), "more_body": True})
            end = self._dialect.end
        except Exception as error:
            failure: ApiError = api_error(error, param=self._param)
            if not await opening.begun_while_waiting():
                await error_response(failure, self._dialect)(scope, receive, send)
                return
            end = error_event(failure, self._dialect)
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
            await opening.begun_while_waiting()
        await opening.end()
        await send({"type": "http.response.body", "body": end, "more_body": False})


class Now:
    """Sends events without being awaited, where the connection's own writer takes them."""

    def __init__(self, opening: _Opening, writer: BodyWriter | None, dialect: Dialect) -> None:
        self._opening, self._writer, self._dialect = opening, writer, dialect

    def ready(self) -> bool:
        """Whether `send` can be called: the answer has begun, and nothing waits to be written."""
        return self._writer is not None and self._opening.over and self._writer.ready()

    def send(self, event: Mapping[str, Any]) -> None:
        """The event goes behind those that were sent before."""
        assert self._writer is not None, "there is no writer to send by"
        self._writer.write(self._dialect.event(event))


class _Opening:
    """The beginning of a stream: with its first event, or with comments where that is long in coming."""

    def __init__(self, send: Send, patience: Patience) -> None:
        self._send, self._patience = send, patience
        self._begun = False
        self._waiting: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(patience.begin, self._grow_impatient)
        self.over = False
        """The status is sent, and no more comments come."""

    async def end(self) -> None:
        """Send the status, if it is not sent yet, and no more comments."""
        if not await self.begun_while_waiting():
            await self._begin()
        self.over = True

    async def begun_while_waiting(self) -> bool:
        """Whether the status is sent; of the waiting nothing is left."""
        self._timer.cancel()
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        return self._begun

    def _grow_impatient(self) -> None:
        self._waiting = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await self._begin()
        while True:
            await self._send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
            await asyncio.sleep(self._patience.remind)

    async def _begin(self) -> None:
        await _start(self._send, 200, b"text/event-stream; charset=utf-8", None)
        self._begun = True


async def _start(send: Send, status: int, content_type: bytes, length: int | None) -> None:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
