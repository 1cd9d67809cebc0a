"""The runtime: an engine behind an async interface."""

from .admission import Rate
from .config import RuntimeConfig
from .runtime import Runtime

__all__ = ["Rate", "Runtime", "RuntimeConfig"]
