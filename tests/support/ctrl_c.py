"""Programs that are to be interrupted, started so that they can be."""

from __future__ import annotations

import signal

__all__ = ["heed_ctrl_c"]


def heed_ctrl_c() -> None:
    """For `preexec_fn`: a shell starts what runs in its background with SIGINT ignored, and Python keeps it so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
