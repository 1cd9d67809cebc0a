"""What goes over the net: one JSON object up, one down, or server-sent events until the reader has enough."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentkv.errors import AgentKVError, ConfigError, RuntimeClosed, ServerUnreachable

from .errors import error_of, error_of_body

if TYPE_CHECKING:
    import httpx2 as httpx

__all__ = ["Connection", "Events"]

_CONNECT_SECONDS = 10.0
_MOST_EVENT_BYTES = 64 * 2**20


class Connection:
    """To one server. Belongs to the event loop on which it is first used."""

    def __init__(self, url: str, *, api_key: str | None, transport: Any) -> None:
        """ConfigError for an address or a key that cannot be one, and where httpx2 is missing."""
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigError(f'url is the address of a server such as "http://127.0.0.1:8000", got {url!r}')
        try:
            import httpx2 as httpx
        except ImportError as error:
            raise ConfigError(
                "connect needs httpx2, which is not installed: install the extra 'server' of agentkv-runtime"
            ) from error
        headers = {}
        if api_key is not None:
            if not (isinstance(api_key, str) and api_key and api_key.isascii() and api_key.isprintable()):
                raise ConfigError("api_key must be printable ASCII, and not empty")
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._errors = (httpx.HTTPError, httpx.StreamError)
        try:
            self._client = httpx.AsyncClient(
                base_url=self.url,
                headers=headers,
                transport=transport,
                # How long an answer may take is for each call to say; what cannot be reached is told soon.
                timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
                limits=httpx.Limits(max_connections=None),
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"url {url!r} is no address: {error}") from None
        self._has_key = api_key is not None
        self._open: set[Events] = set()
        self._closed = False

    async def get(self, path: str) -> Any:
        """The JSON at a path."""
        self.require_open()
        try:
            response = await self._client.get(path)
        except self._errors as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise self._refused(response.status_code, response.content, path)
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise ServerUnreachable(f"{self.url}{path} gave no JSON: is it the address of a server?") from None

    async def post(self, path: str, body: Mapping[str, Any]) -> Events:
        """Ask; returns once the server has said that it will answer. What is returned is the caller's to close."""
        self.require_open()
        # Escaped, so that a lone surrogate in a text, which UTF-8 cannot hold, arrives as it is.
        request = self._client.build_request(
            "POST", path, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        try:
            response = await self._client.send(request, stream=True)
            if response.status_code == 200:
                events = Events(response, self._broken, self._open.discard)
                self._open.add(events)
                return events
            try:
                raise self._refused(response.status_code, await response.aread(), path)
            finally:
                await response.aclose()
        except self._errors as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        """Answers that are still read raise RuntimeClosed. Twice is harmless."""
        self._closed = True
        for events in list(self._open):
            await events.close()
        await self._client.aclose()

    def require_open(self) -> None:
        """Raise RuntimeClosed."""
        if self._closed:
            raise RuntimeClosed("this connection is closed; connect again")

    def _broken(self, error: Exception) -> AgentKVError:
        """What it means that reading an answer raised this."""
        if self._closed:
            return RuntimeClosed("this connection was closed while the answer was read")
        return ServerUnreachable(f"the answer of {self.url} broke off: {type(error).__name__} {error}".rstrip())

    def _refused(self, status: int, body: bytes, path: str) -> AgentKVError:
        error = error_of_body(status, body, f"{self.url}{path}")
        if isinstance(error, ConfigError) and status == 401 and not self._has_key:
            return ConfigError(f"{self.url} wants a key: connect(url, api_key=…)")
        return error

    def _unreachable(self, error: Exception) -> AgentKVError:
        if self._closed:
            return RuntimeClosed("this connection was closed while the call was running")
        why = f"{type(error).__name__} {error}".rstrip(" .")
        return ServerUnreachable(f"{self.url} does not answer: {why}. Start `agentkv serve`, or check the address.")


class Events:
    """The data of server-sent events, as they come."""

    def __init__(
        self,
        response: httpx.Response,
        broken: Callable[[Exception], AgentKVError],
        closed: Callable[[Events], None],
    ) -> None:
        """broken: what an error in reading means; closed: hears of the end."""
        self._response, self._broken, self._closed = response, broken, closed
        self._parts = response.aiter_bytes()
        self._buffer = bytearray()
        self._searched = 0
        """How much of the buffer has no newline."""

    async def next(self) -> dict[str, Any] | None:
        """The next one; None at the end that the server marks. Raises what the server says went wrong."""
        while True:
            line = await self._line()
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return None
            try:
                chunk: dict[str, Any] = json.loads(data)
                failed = chunk.get("error")
            except (ValueError, AttributeError, RecursionError) as error:
                raise self._broken(error) from error
            if failed is not None:
                raise error_of(failed)
            return chunk

    async def close(self) -> None:
        """The server hears of it, and ends what it still did for this answer."""
        self._closed(self)
        await self._response.aclose()

    async def _line(self) -> bytes:
        """Without its newline, which the last one need not have; each part is searched once.

        By bytes and newlines alone: JSON may hold characters that other readers of lines take for an end.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > _MOST_EVENT_BYTES:
                raise self._broken(ValueError(f"an event has more than {_MOST_EVENT_BYTES:,} bytes"))
            part = await self._part()
            if part is None:
                if not self._buffer:
                    raise self._broken(EOFError("it has no end"))
                part = b"\n"
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line

    async def _part(self) -> bytes | None:
        """None at the end."""
        try:
            return await anext(self._parts, None)
        except Exception as error:
            raise self._broken(error) from error
