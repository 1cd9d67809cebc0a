"""Answers that end when the client leaves: whole ones, and streams of server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .dialect import Dialect, error_event, error_response
from .errors import ApiError, api_error
from .wire import to_json

__all__ = ["EventStream", "Whole"]

T = TypeVar("T")


class Whole(Response):
    """One JSON object, once it is made. What makes it is cancelled when the client leaves, which aborts its call."""

    def __init__(
        self, make: Callable[[], Awaitable[Mapping[str, Any]]], dialect: Dialect, *, param: str | None = None
    ) -> None:
        super().__init__()
        self._make, self._dialect, self._param = make, dialect, param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        made = await _unless_gone(self._make(), receive)
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
    """

    def __init__(
        self, events: Callable[[], AsyncIterator[Mapping[str, Any]]], dialect: Dialect, *, param: str | None = None
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._events, self._dialect, self._param = events, dialect, param

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = await _unless_gone(self._send_all(scope, receive, send), receive)
        if sent is not None:
            sent.result()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._events()
        begun = False
        try:
            async for event in events:
                if not begun:
                    begun = True
                    await _start(send, 200, b"text/event-stream; charset=utf-8", None)
                await send({"type": "http.response.body", "body": self._dialect.event(event), "more_body": True})
            end = self._dialect.end
        except Exception as error:
            failure: ApiError = api_error(error, param=self._param)
            if not begun:
                await error_response(failure, self._dialect)(scope, receive, send)
                return
            end = error_event(failure, self._dialect)
        finally:
            close = getattr(events, "aclose", None)
            if close is not None:
                await close()
        if not begun:
            await _start(send, 200, b"text/event-stream; charset=utf-8", None)
        await send({"type": "http.response.body", "body": end, "more_body": False})


async def _unless_gone(work: Awaitable[T], receive: Receive) -> asyncio.Future[T] | None:
    """The work once done; None where the client left before, and then nothing of the work is left."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, content_type: bytes, length: int | None) -> None:
    headers = [(b"content-type", content_type)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    else:
        headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
