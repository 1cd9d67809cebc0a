"""Which dtype a model computes in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "choose_device", "choose_dtype", "multiplies_bfloat16"]

DTYPES = ("auto", "bfloat16", "float16", "float32")

_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""As reports print them."""


def choose_device(device: object = None) -> torch.device:
    """The device that is asked for, else the first GPU, else the CPU. ConfigError if it is not here."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f'device={device!r} is no device: use "cpu", "cuda" or "cuda:1"') from error
    assert isinstance(chosen, torch.device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r} is not here: torch sees {torch.cuda.device_count()} GPUs")
    return chosen


def choose_dtype(dtype: object, device: torch.device) -> torch.dtype:
    """`dtype` as torch knows it. "auto" is bfloat16 where the device multiplies it, float32 elsewhere.

    Accepts a name of `DTYPES`, a short one (bf16, fp16, fp32) or one of torch's own dtypes; ConfigError for any other.
    """
    import torch

    if dtype == "auto":
        return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32
    named = {name: getattr(torch, name) for name in DTYPES if name != "auto"}
    if isinstance(dtype, str) and (name := _SHORT.get(dtype, dtype)) in named:
        chosen: torch.dtype = named[name]
        return chosen
    if isinstance(dtype, torch.dtype) and dtype in named.values():
        return dtype
    raise ConfigError(f"dtype={dtype!r} is not known; known are {', '.join(DTYPES)}")


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions that multiply bfloat16, instead of emulating it in float32."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        # x86 says avx512_bf16 or amx_bf16, ARM says bf16; AVX-NE-CONVERT only converts.
        capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
        names = ("avx512_bf16", "amx_bf16", "bf16")
        return any(capabilities.get(name) for name in names) or _older_torch_says_so()
    return False


def _older_torch_says_so() -> bool:
    """torch before 2.11 has no `get_capabilities`; single questions, private ones, came earlier."""
    import torch

    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        question = getattr(torch.cpu, name, None)
        if question is not None and question():
            return True
    return False
