"""How many threads torch and the kernels take."""

from __future__ import annotations

import logging
import math
import os

import torch

from .available import available_cores

__all__ = ["set_threads"]

_log = logging.getLogger(__name__)


def set_threads(wanted: int | None) -> None:
    """Give torch so many threads, in all of the process. None: those it has, but no more than a container lets run.

    Torch takes one for each core of the machine. Where a container may use the time of two of 64 cores, 64 threads have
    used up its share after a thirtieth of each period, and sleep for the rest. Who set OMP_NUM_THREADS is left alone.
    """
    if wanted is None:
        most, now = max(1, math.ceil(available_cores())), torch.get_num_threads()
        if now <= most or "OMP_NUM_THREADS" in os.environ:
            return
        _log.info("%d threads in place of %d: this container has the time of %.3g cores", most, now, available_cores())
        wanted = most
    torch.set_num_threads(wanted)
