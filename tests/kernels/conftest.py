"""Every backend that is registered goes through every test here that does not look inside one of them."""

from __future__ import annotations

from typing import Any

import pytest

from agentkv_kernels import Backend, BackendUnavailable, CpuBackend, get_backend, known_backends
from agentkv_kernels.cpu.interface import INSTRUCTION_SETS


# The triton backend computes on a CPU only in its interpreter, in a process and on shapes of its own: test_triton.py.
@pytest.fixture(scope="session", params=[name for name in known_backends() if name != "triton"])
def backend(request: Any) -> Backend:
    """One of the registered backends, by name."""
    try:
        return get_backend(request.param, "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def cpu(request: Any) -> CpuBackend:
    """The compiled kernels, for each instruction set that this machine has."""
    try:
        return CpuBackend(request.param)
    except BackendUnavailable as error:
        pytest.skip(str(error))
