"""An asynchronous transport for callers that wait without await: each of its requests runs on one background loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx2 as httpx

from agentkv.loop_thread import LoopThread

__all__ = ["BlockingTransport"]


class BlockingTransport(httpx.BaseTransport):
    """May be used from several threads; what interrupts a wait (Ctrl-C) aborts the request."""

    def __init__(self, transport: httpx.AsyncBaseTransport, loop: LoopThread) -> None:
        self._transport, self._loop = transport, loop

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = httpx.Request(
            request.method,
            request.url,
            headers=request.headers,
            content=request.read(),
            extensions=request.extensions,  # Timeouts among them.
        )
        answer = self._loop.run(self._transport.handle_async_request(asked))
        assert isinstance(answer.stream, httpx.AsyncByteStream)
        return httpx.Response(answer.status_code, headers=answer.headers, stream=_Body(answer.stream, self._loop))

    def close(self) -> None:
        self._loop.run(self._transport.aclose())
        self._loop.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, body: httpx.AsyncByteStream, loop: LoopThread) -> None:
        self._body, self._loop = body, loop
        self._parts: AsyncIterator[bytes] | None = None

    def __iter__(self) -> Iterator[bytes]:
        parts = self._parts = self._body.__aiter__()
        while (part := self._loop.run(_next(parts))) is not None:
            yield part

    def close(self) -> None:
        self._loop.run(self._body.aclose())


async def _next(parts: AsyncIterator[bytes]) -> bytes | None:
    return await anext(parts, None)
