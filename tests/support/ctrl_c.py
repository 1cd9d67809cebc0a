"""Programs that are to be interrupted, started so that they can be."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["heed_ctrl_c", "heeding_ctrl_c"]


def heed_ctrl_c() -> None:
    """For `preexec_fn`: a shell starts what runs in its background with SIGINT ignored, and Python keeps it so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def heeding_ctrl_c() -> Iterator[None]:
    """The same for this process, for as long as the block lasts: a KeyboardInterrupt in the main thread."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
