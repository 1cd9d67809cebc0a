"""Bodies of megabytes, which other requests do not wait for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

__all__ = ["LargeBodyRoute", "is_large"]

_LARGE = 2**16
"""Bytes that are read in less time than another thread takes to begin with them is worth."""


async def is_large(request: Request) -> bool:
    """Whether what is made of its body is to be made beside the event loop."""
    return len(await request.body()) >= _LARGE


class LargeBodyRoute(APIRoute):
    """A route that reads large JSON beside the event loop, so that a step of the engine or a token goes between."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_large(request: Request) -> Response:
            return await handle(_LargeRequest(request.scope, request.receive))

        return handle_large


class _LargeRequest(Request):
    _read: Any
    """The body, once it was read."""

    async def json(self) -> Any:
        if not hasattr(self, "_read"):
            body = await self.body()
            self._read = await asyncio.to_thread(_read, body) if await is_large(self) else _read(body)
        return self._read


def _read(body: bytes) -> Any:
    return json.loads(body, parse_constant=_refuse_constant)


def _refuse_constant(constant: str) -> NoReturn:
    """NaN and the infinities, which Python reads and JSON has not: no schema and no template can write them again."""
    raise json.JSONDecodeError(f"{constant} is no JSON", constant, 0)
