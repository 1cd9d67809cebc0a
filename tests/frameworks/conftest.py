"""Each framework asks in two ways: over HTTP on this machine, and in this process without a port."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from agentkv import Runtime
from agentkv.clients.openai_client import openai_client
from support.loopback import on_loopback

ClientOf = Callable[[Runtime], AbstractAsyncContextManager[Any]]


@asynccontextmanager
async def _over_http(runtime: Runtime) -> AsyncIterator[Any]:
    import openai

    with on_loopback(runtime) as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client


@asynccontextmanager
async def _in_process(runtime: Runtime) -> AsyncIterator[Any]:
    async with openai_client(runtime) as client:
        yield client


@pytest.fixture(params=[_over_http, _in_process], ids=["http", "in_process"])
def client_of(request: pytest.FixtureRequest) -> ClientOf:
    """Makes an `openai.AsyncOpenAI` that asks a runtime."""
    way: ClientOf = request.param
    return way
