"""Which kernels a device gets when nobody names some, and why."""

from __future__ import annotations

import torch

from agentkv_kernels import CpuBackend, choose_backend

__all__ = ["backend_of"]


def backend_of(device: torch.device) -> tuple[str, str]:
    """The backend's name, and the reason in words."""
    choice = choose_backend(device)
    backend = choice.backend
    if isinstance(backend, CpuBackend):
        return backend.name, backend.description
    if backend.name == "reference":
        return backend.name, f"torch's own operations: {'; '.join(choice.passed_over) or _no_kernels(device)}"
    return backend.name, f"kernels made for {device.type}"


def _no_kernels(device: torch.device) -> str:
    return f"no kernels made for {device.type} are here"
