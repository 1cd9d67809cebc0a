"""How many threads torch and the kernels take, and how long those of torch wait beside those of the kernels."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import sys
import threading

import torch

from .available import available_cores

__all__ = ["default_threads", "let_openmp_sleep", "set_threads"]

_log = logging.getLogger(__name__)

_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_PARTED = 1 << 17
"""Elements, of which torch gives one thread no more than 32,768."""


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


_letting = threading.Lock()
_let = False


def let_openmp_sleep() -> None:
    """Have the threads of torch's OpenMP sleep soon after their work, as OMP_WAIT_POLICY=PASSIVE would have had them.

    For a process that has imported torch without it. GNU's runtime lets its threads spin for some milliseconds behind
    every operation, unless it has made more threads than there are processors; the kernels' own threads do without
    these meanwhile, and a step of 8 sequences on two cores takes 1.4 times as long. So a thread that waits for ever
    calls it once, with one more than itself. Whoever has said how threads are to wait is left alone, and so is another
    runtime than GNU's, and one with threads for some of the processors only. It is so for the whole process from then
    on, and costs it two threads that sleep. A second call does nothing.
    """
    global _let
    if sys.platform != "linux" or any(name in os.environ for name in _WAITING):
        return
    if not 1 < len(os.sched_getaffinity(0)) <= torch.get_num_threads():
        return
    openmp = ctypes.CDLL(None)
    if not hasattr(openmp, "omp_set_num_threads") or hasattr(openmp, "kmp_set_blocktime"):
        return
    with _letting:
        if _let:
            return
        called = threading.Event()
        try:
            threading.Thread(target=_call_once, args=(openmp, called), name="agentkv-openmp", daemon=True).start()
        except RuntimeError as error:
            _log.info("OpenMP's threads wait as before: %s", error)
            return
        _let = True
        called.wait()


def _call_once(openmp: ctypes.CDLL, called: threading.Event) -> None:
    try:
        torch.get_num_threads()  # Gives this thread as many as torch has; from then on it may have its own number.
        openmp.omp_set_num_threads(2)
        torch.zeros(_PARTED).add_(1)
    finally:
        called.set()
    threading.Event().wait()
