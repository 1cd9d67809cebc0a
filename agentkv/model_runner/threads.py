"""How many threads torch and the kernels take."""

from __future__ import annotations

import logging
import math
import os

import torch

from .available import available_cores

__all__ = ["default_threads", "set_threads"]

_log = logging.getLogger(__name__)

_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def default_threads() -> int:
    """The threads that torch has, but no more than this process may keep cores busy, rounded up.

    Torch takes one for each core of the machine. Where a container has the time of two of 64 cores, 64 threads have
    used it up after a thirtieth of each period, and sleep for the rest. Whoever set OMP_NUM_THREADS or MKL_NUM_THREADS
    is left alone; torch.set_num_threads leaves no trace that could be seen.
    """
    now = torch.get_num_threads()
    return now if any(name in os.environ for name in _SETTINGS) else min(now, max(1, math.ceil(available_cores())))


def set_threads(wanted: int | None) -> None:
    """Give torch, and so the kernels, that many threads; None: `default_threads`."""
    if wanted is None:
        wanted = default_threads()
        if wanted == torch.get_num_threads():
            return
        _log.info(
            "%d threads in place of %d: this process has the time of no more cores", wanted, torch.get_num_threads()
        )
    torch.set_num_threads(wanted)
