"""Compiled attention for CPUs: C++ in `src`, reached through ctypes."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
