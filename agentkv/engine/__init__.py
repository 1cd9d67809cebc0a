"""The engine: calls in, tokens out, one step at a time."""

from .engine import Engine, Runner

__all__ = ["Engine", "Runner"]
