"""What every request passes before a route sees it: draining, the key, the size and the time of its body.

Plain ASGI, so that it costs microseconds and works the same over HTTP and in process.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .dialect import Dialect, error_event, error_response
from .errors import ApiError, api_error, unavailable
from .serving import Serving

__all__ = ["Door"]

_LINGER_SECONDS = 2.0
_OPEN_TO_ALL = frozenset({"/health", "/docs", "/redoc", "/openapi.json"})


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        dialect = self._dialect_of(scope["path"])
        try:
            self._check(scope, dialect)
            body = await self._body(scope, receive)
        except ApiError as error:
            if error.status == 413:
                await _linger(receive)
            await error_response(error, dialect)(scope, receive, send)
            return
        if body is None:  # The client left while it was sending.
            return
        with self._serving.counted():
            await self._hand_on(scope, body, dialect, receive, send)

    async def _hand_on(self, scope: Scope, body: bytes, dialect: Dialect, receive: Receive, send: Send) -> None:
        """Call the application; what it raises, and what is cut off, is answered where that is still possible."""
        given = begun = streams = False

        async def receive_whole() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send_on(message: Message) -> None:
            nonlocal begun, streams
            if not begun:
                begun, streams = True, _is_stream(message)
            await send(message)

        try:
            await self._app(scope, receive_whole, send_on)
        except Exception as error:
            if begun:
                raise
            await error_response(api_error(error), dialect)(scope, receive, send)
        except asyncio.CancelledError:
            if not self._serving.was_cut_off or (begun and not streams):
                raise
            ended = unavailable("the server ended before this answer did", code="draining")
            if begun:
                await send({"type": "http.response.body", "body": error_event(ended, dialect), "more_body": False})
            else:
                await error_response(ended, dialect)(scope, receive, send)

    def _check(self, scope: Scope, dialect: Dialect) -> None:
        if scope["path"] in _OPEN_TO_ALL:
            return
        if self._keys:
            given = (dialect.key(Headers(scope=scope)) or "").encode("latin-1")
            # Every key is compared, in a time that does not tell how much of it was right, or which it was.
            right = sum(hmac.compare_digest(given, key) for key in self._keys)
            if not right:
                raise ApiError(
                    401,
                    f"a key is needed: send {dialect.how_to_send}"
                    if not given
                    else "this key opens nothing here; it was given to the server in --api-key-file",
                    code="invalid_api_key",
                    headers=dialect.challenge,
                )
        self._serving.require_open()

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        limit = self._config.max_body_bytes
        told = _header(scope, b"content-length")
        if told is not None and told.isdigit() and int(told[:20]) > limit:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._config.body_timeout):
                while True:
                    message: MutableMapping[str, Any] = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._config.body_timeout:g} s",
                code="body_timeout",
                headers={"Connection": "close"},
            ) from None

    def _too_large(self) -> ApiError:
        limit = self._config.max_body_bytes
        return ApiError(
            413, f"the body is larger than {limit:,} bytes", code="body_too_large", headers={"Connection": "close"}
        )


async def _linger(receive: Receive) -> None:
    """Read on for a moment and throw away: a connection closed on a client that still sends loses it the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])


def _header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None
