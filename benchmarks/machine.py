"""One line about the machine that a table was made on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

__all__ = ["describe_machine"]


def describe_machine() -> str:
    """Processor, cores that this process may use, memory, Python and, where it was imported, torch with its threads."""
    parts = [_processor(), f"{len(os.sched_getaffinity(0))} cores", _memory(), f"Python {platform.python_version()}"]
    torch = sys.modules.get("torch")
    if torch is not None:
        parts.append(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    return ", ".join(parts)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
