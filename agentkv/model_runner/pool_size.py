"""How many pages of KV a device gets when nobody says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentkv.errors import ConfigError
from agentkv_kernels import LayerSpec, bytes_per_page

from .available import available_memory

__all__ = ["default_pool_bytes", "num_pages_for"]

_CPU_SHARE, _CPU_MOST = 0.25, 8 * 2**30
_GPU_SHARE = 0.9


def num_pages_for(layers: Sequence[LayerSpec], page_size: int, device: torch.device, memory: int | None) -> int:
    """Pages, the null page among them, that `memory` bytes hold.

    memory=None: on a GPU 90 % of what is free now, after the weights; on a CPU a quarter of the available memory, at
    most 8 GiB. Raises ConfigError where that is less than two pages.
    """
    page = bytes_per_page(layers, page_size)
    if memory is None:
        memory = default_pool_bytes(device)
    if memory < 2 * page:
        raise ConfigError(
            f"a pool needs at least two pages of {page} bytes; memory= allows {memory} bytes. Give it more."
        )
    return memory // page


def default_pool_bytes(device: torch.device) -> int:
    """What a pool on this device takes when nobody says, as things are now."""
    if device.type == "cuda":
        return _free_on_gpu(device)
    return min(int(available_memory() * _CPU_SHARE), _CPU_MOST)


def _free_on_gpu(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free * _GPU_SHARE)
