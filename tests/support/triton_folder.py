"""Where triton is for those who test with it: not among the packages of every process, see scripts/check."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["triton_folder"]


def triton_folder() -> Path | None:
    """What to put on the path of a process that is to import triton; None: there is none."""
    beside = Path(sys.prefix) / "triton"
    if (beside / "triton").is_dir():
        return beside
    found = importlib.util.find_spec("triton")
    return Path(found.origin).parents[1] if found is not None and found.origin is not None else None
