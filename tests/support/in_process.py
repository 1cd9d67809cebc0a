"""What a test does in the moment in which a reader gives an application in the same process up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentkv.clients import asgi_transport

__all__ = ["when_left"]


def when_left(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do it before the application hears of it, which is waited for until it has ended."""
    exchange: Any = asgi_transport._Exchange
    leave = exchange.leave

    async def doing(self: Any) -> None:
        do()
        await leave(self)

    monkeypatch.setattr(exchange, "leave", doing)
