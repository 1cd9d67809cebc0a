"""What can go wrong with one row of logits; each ends one request and never the batch it stood in."""

from __future__ import annotations

from agentkv.errors import AgentKVError

__all__ = ["BrokenLogits", "GrammarDeadEnd", "SamplingError"]


class SamplingError(AgentKVError, ValueError):
    """No token could be chosen for this request."""


class BrokenLogits(SamplingError):
    """The model gave NaN, +inf, or no possible token at all: its weights, dtype or kernels are at fault."""


class GrammarDeadEnd(SamplingError):
    """The request's mask leaves no token that the model can produce."""
