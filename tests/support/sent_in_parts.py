"""A request whose body comes when a test says so, to an application that no socket carries."""

from __future__ import annotations

import asyncio
import json
from typing import Any

__all__ = ["SentInParts"]


class SentInParts:
    """A POST, begun at once."""

    def __init__(self, app: Any, path: str, length: int | None) -> None:
        """length: what is told of the body's; None where nothing is."""
        headers = [(b"host", b"localhost")] + ([] if length is None else [(b"content-length", b"%d" % length)])
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": headers, "client": ("127.0.0.1", 0), "server": ("localhost", 80), "state": {},
        }  # fmt: skip
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._sent: list[Any] = []
        self._answering = asyncio.ensure_future(app(scope, self._parts.get, self._take))

    async def send(self, part: bytes, *, more: bool) -> None:
        """A part of the body; returns once it was taken, or the answer is there."""
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": more})
        while not self._parts.empty() and not self._answering.done():
            await asyncio.sleep(0)

    async def status(self) -> int:
        """Of the answer, once it is whole."""
        await self._answering
        return int(self._sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        """Of the answer."""
        return {name.decode(): value.decode() for name, value in self._sent[0]["headers"]}

    @property
    def error(self) -> dict[str, Any]:
        """What the answer holds where it is no success."""
        body = b"".join(message.get("body", b"") for message in self._sent[1:])
        error: dict[str, Any] = json.loads(body)["error"]
        return error

    async def _take(self, message: Any) -> None:
        self._sent.append(message)
