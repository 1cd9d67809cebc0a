"""The two ways to a server: each test that takes `door` goes through both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx2 as httpx
import pytest

from support.families import family
from support.runtimes import own_cache, own_cache_folder
from support.servers import in_process, over_http

__all__ = ["family", "own_cache", "own_cache_folder"]

Door = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture(params=[in_process, over_http], ids=["in process", "http"])
def door(request: pytest.FixtureRequest) -> Door:
    way: Door = request.param
    return way
