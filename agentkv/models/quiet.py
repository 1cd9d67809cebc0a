"""Loading without noise and without pauses."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_garbage_collection", "quiet_transformers"]

# Both switches are the process's, so the first to enter sets them and the last to leave restores them.
_lock = threading.Lock()
_quiet_users = 0
_paused_users = 0
_collect_before = True
_bars_before = True
_verbosity_before = 0


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers draws no bars and logs only errors meanwhile; the user's settings come back afterwards."""
    from transformers.utils import logging as transformers_logging

    global _quiet_users, _bars_before, _verbosity_before
    with _lock:
        if _quiet_users == 0:
            _bars_before = transformers_logging.is_progress_bar_enabled()
            _verbosity_before = transformers_logging.get_verbosity()
            transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            transformers_logging.set_verbosity(logging.ERROR)
        _quiet_users += 1
    try:
        yield
    finally:
        with _lock:
            _quiet_users -= 1
            if _quiet_users == 0:
                if _bars_before:
                    transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
                transformers_logging.set_verbosity(_verbosity_before)


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    transformers imports a few thousand modules when it first loads a model. They make millions of objects and
    next to no garbage, and walking them again and again takes a quarter of the time until a model is ready.
    """
    global _paused_users, _collect_before
    with _lock:
        if _paused_users == 0:
            _collect_before = gc.isenabled()
            gc.disable()
        _paused_users += 1
    try:
        yield
    finally:
        with _lock:
            _paused_users -= 1
            if _paused_users == 0 and _collect_before:
                gc.enable()
