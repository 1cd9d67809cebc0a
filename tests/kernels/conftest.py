"""Every backend that is registered goes through every test here that does not look inside one of them."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv_kernels import Backend, get_backend, known_backends


@pytest.fixture(scope="session", params=known_backends())
def backend(request: Any) -> Backend:
    """One of the registered backends, by name."""
    return get_backend(request.param, "cpu")
