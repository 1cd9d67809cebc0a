"""Attention for CUDA in Triton. Importing this imports no triton; `backend` and `device` do."""

from .replay import ReplayableStep
from .store import PageMajorStore

__all__ = ["PageMajorStore", "ReplayableStep"]
