"""What every request passes before a route sees it: who asks, draining, the key, the size and the time of its body.

Plain ASGI, so that it costs microseconds and works the same over HTTP and in process.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .dialect import Dialect, error_event, error_response
from .errors import ApiError, api_error, unavailable
from .pages import refuse_other_pages
from .serving import Serving

__all__ = ["OPEN_TO_ALL", "Door"]

_LINGER_SECONDS = 2.0
OPEN_TO_ALL = frozenset({"/health", "/docs", "/redoc", "/openapi.json"})
_OPEN_BODY_BYTES = 4096
"""Of a request that brings no key: none of these paths wants a body at all."""


class Door:
    """Refuses in its client's dialect what must not come in, counts what did, and hands bodies on whole.

    The route's `receive` gives the body as one message and then, when the client leaves, `http.disconnect`.
    """

    def __init__(
        self, app: ASGIApp, *, serving: Serving, config: ServerConfig, dialect_of: Callable[[str], Dialect]
    ) -> None:
        """dialect_of: by path."""
        self._app, self._serving, self._config, self._dialect_of = app, serving, config, dialect_of
        self._keys = tuple(key.encode() for key in config.api_keys)
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            # The routes know GET; what stands behind its head stays here.
            scope, send = {**scope, "method": "GET"}, _without_body(send)
        with self._serving.counted():
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """What is raised, and what is cut off, is answered where that is still possible."""
        dialect, answer, body = self._dialect_of(scope["path"]), _Answer(send), _Body(receive)
        try:
            headers = Headers(scope=scope)
            self._check(scope, headers, dialect)
            try:
                if not await self._read(body, scope, headers):
                    return  # The client left while it was sending.
                self._require_open(scope)  # The server may have begun to drain while the body came.
                await self._app(scope, body.receive, answer.send)
            finally:
                self._held -= body.size
        except Exception as error:
            if answer.begun:
                raise
            await error_response(api_error(error), dialect)(scope, receive, send)
        except asyncio.CancelledError:
            if not self._serving.was_cut_off or (answer.begun and not answer.streams):
                raise
            ended = unavailable("the server ended before this answer did", code="draining")
            if answer.begun:
                await send({"type": "http.response.body", "body": error_event(ended, dialect), "more_body": False})
            else:
                await error_response(ended, dialect)(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers, dialect: Dialect) -> None:
        refuse_other_pages(scope, headers, self._config)
        if self._keys and scope["path"] not in OPEN_TO_ALL:
            given = (dialect.key(headers) or "").encode("latin-1")
            # Every key is compared, in a time that does not tell how much of it was right, or which it was.
            right = sum(hmac.compare_digest(given, key) for key in self._keys)
            if not right:
                raise ApiError(
                    401,
                    f"a key is needed: send {dialect.how_to_send}"
                    if not given
                    else "this key is none of those in the server's --api-key-file",
                    code="invalid_api_key",
                    headers=dialect.challenge,
                )
        self._require_open(scope)

    def _require_open(self, scope: Scope) -> None:
        if scope["path"] not in OPEN_TO_ALL:
            self._serving.require_open()

    async def _read(self, body: _Body, scope: Scope, headers: Headers) -> bool:
        """The whole body; False where the client left before its end."""
        limit = self._config.max_body_bytes
        if scope["path"] in OPEN_TO_ALL:
            limit = min(limit, _OPEN_BODY_BYTES)
        told = headers.get("content-length", "")
        expected = int(told[:20]) if told.isdecimal() else 0
        try:
            self._require_room(expected, limit, more=expected)
            async with asyncio.timeout(self._config.body_timeout):
                while (came := await body.part()) is not None:
                    self._held += came
                    self._require_room(body.size, limit)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._config.body_timeout:g} s",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None
        except ApiError:
            # One that waits to be asked for its body is not asked: reading would ask it.
            if body.size or "expect" not in headers:
                await body.pour_away()
            raise
        return not body.left

    def _require_room(self, size: int, limit: int, *, more: int = 0) -> None:
        """Raise 413 for a body above its own limit, 503 where all bodies together, and more, are above theirs."""
        if size > limit:
            raise ApiError(
                413, f"the body is larger than {limit:,} bytes", code="body_too_large", headers={"Connection": "close"}
            )
        if self._held + more > self._config.max_held_bytes:
            full = unavailable("the server holds as much of other requests as it may; ask again", code="no_room")
            full.headers["Connection"] = "close"
            raise full


class _Body:
    """A request's body: read in parts, then given on whole."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []
        self._more = True
        self._given = False
        self.size = 0
        self.left = False
        """The client is gone, and the rest will not come."""

    async def part(self) -> int | None:
        """Read one; its size, None where there are no more."""
        if not self._more:
            return None
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.left, self._more = True, False
            return None
        part: bytes = message.get("body", b"")
        self._parts.append(part)
        self.size += len(part)
        self._more = message.get("more_body", False)
        return len(part)

    async def receive(self) -> Message:
        if self._given:
            return await self._receive()
        self._given = True
        body = b"".join(self._parts)
        self._parts.clear()
        return {"type": "http.request", "body": body, "more_body": False}

    async def pour_away(self) -> None:
        """Read on for a moment: a connection that is closed on a client that still sends loses it the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while self._more:
                    message = await self._receive()
                    self._more = message["type"] == "http.request" and message.get("more_body", False)


class _Answer:
    """How far the answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = self.streams = False

    async def send(self, message: Message) -> None:
        if not self.begun:
            self.begun, self.streams = True, _is_stream(message)
        await self._send(message)


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    return send_head


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])
