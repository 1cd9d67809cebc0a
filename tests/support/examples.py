"""How many examples a property is tried with, where a hundred is not the right number."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["examples"]


def examples(usual: int) -> int:
    """`usual` by default, and as many times more as the profile asks for than Hypothesis's own 100."""
    return max(1, usual * settings().max_examples // 100)
