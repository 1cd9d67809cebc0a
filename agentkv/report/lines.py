"""The lines that every report begins with: what was saved, what could have been, and what it cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .layout import Line
from .numbers import count, known, percent, seconds

__all__ = ["saved_lines", "tool_lines"]

_FAILURES = ("malformed", "unknown_tool", "wrong_arguments", "denied", "raised", "timed_out")


def saved_lines(figures: Mapping[str, Any]) -> list[Line]:
    """Prompt tokens and the cached ones beside their ceiling; then why the others were computed."""
    best = "n/a"
    if figures["best_tokens"] is not None:
        best = f"{count(figures['best_tokens'])} ({percent(figures['best_rate'])})"
    saved = f"   cached {known(figures['cached_tokens'])} ({percent(figures['hit_rate'])})   best possible {best}"
    return [
        Line("prompt tokens", known(figures["prompt_tokens"]), saved, aligned=True),
        Line("recomputed", known(figures["computed_tokens"]), _causes(figures), aligned=True),
    ]


def _causes(figures: Mapping[str, Any]) -> str:
    misses = figures["misses"]
    if misses is None:
        return "   new, diverged or evicted: n/a"
    lost = f" ({seconds(figures['seconds_lost'])})" if figures["seconds_lost"] is not None else ""
    causes = [
        f"{count(misses['never_seen'])} new",
        f"{count(misses['diverged'])} diverged",
        f"{count(misses['evicted'])} evicted{lost}",
        *([f"{count(misses['last_token'])} last token"] if misses["last_token"] else []),
        *([f"{count(misses['cache_disabled'])} cache off"] if misses["cache_disabled"] else []),
    ]
    return " = " + " + ".join(causes)


def tool_lines(calls: Mapping[str, int]) -> list[Line]:
    """One line where calls of tools had errors for their results, none where all went well."""
    failed = [f"{count(calls[failure])} {failure.replace('_', ' ')}" for failure in _FAILURES if calls[failure]]
    return [Line("tool calls", count(calls["made"]), ": " + ", ".join(failed))] if failed else []
