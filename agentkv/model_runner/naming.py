"""Short names of what computes, for people to read."""

from __future__ import annotations

import torch

__all__ = ["device_name", "dtype_name"]

_DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    """ "bf16", "fp32"; torch's own name for what is rarer."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def device_name(device: torch.device) -> str:
    """The device and what tells its speed: "cpu avx512" by the instructions that torch uses, "cuda NVIDIA H200"."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability().lower()
        return "cpu" if capability in ("default", "no avx") else f"cpu {capability}"
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return device.type
