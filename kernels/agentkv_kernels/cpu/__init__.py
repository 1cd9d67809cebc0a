"""Compiled attention for CPUs: C++ in `src`, reached through ctypes."""

from .backend import CpuBackend
from .tile_store import why_unsupported

__all__ = ["CpuBackend", "why_unsupported"]
