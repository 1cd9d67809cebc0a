"""Which kernels a device gets when nobody names some, and why."""

from __future__ import annotations

import torch

from agentkv_kernels import get_backend

__all__ = ["backend_of"]


def backend_of(device: torch.device) -> tuple[str, str]:
    """The backend's name, and the reason in words."""
    name = get_backend(None, device).name
    if name == "reference":
        return name, f"torch's own operations: no kernels made for {device.type} are here"
    return name, f"kernels made for {device.type}"
