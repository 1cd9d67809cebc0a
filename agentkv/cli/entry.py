"""The process's own command line, from its first import to its end."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from agentkv.cli.streams import mend_streams

__all__ = ["INTERRUPTED", "leave_at_once", "program"]

INTERRUPTED = 130


def program() -> NoReturn:
    """Run it, and end the process."""
    # Read by OpenMP when torch is imported. By default its threads spin while they wait for each other, so on a machine
    # whose cores have other work, too, they burn the time of the one they wait for: a prefill was seen to take three
    # times as long with two threads as with one. Asleep they cost some microseconds a wake-up, which the kernels' loops
    # cannot spare where these threads run them.
    if os.environ.get("AGENTKV_OPENMP") != "1":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        mend_streams()
        # Imported here: half a second, in which Ctrl-C is an end like any other. What was imported before, up to the
        # first line of this function, is Python itself and little more, for `agentkv` imports its names when needed.
        from agentkv.cli.commands import main

        code = main()
        if code != INTERRUPTED:
            sys.exit(code)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("agentkv: stopped", file=sys.stderr)
    # What had to be put away was, while the interrupt went up, and whoever pressed Ctrl-C waits.
    leave_at_once(INTERRUPTED)


def leave_at_once(code: int) -> NoReturn:
    """End the process now. Taking torch and transformers down in order costs over a second."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # Nobody reads it any more, or it was closed.
    os._exit(code)
