"""Calls that were recorded as whole prompts of text, with the session that each belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .recording import Recording, Step

__all__ = ["is_text_call", "text_recordings"]

_PROMPT = ("input", "prompt")
_ID_SHOWN = 8


def is_text_call(value: object) -> bool:
    """Whether this is one call: {"input": text, "session_id": …, "timestamp": …}, the last two if need be."""
    return isinstance(value, Mapping) and any(isinstance(value.get(key), str) for key in _PROMPT)


def text_recordings(calls: Iterable[Mapping[str, Any]], name: str) -> list[Recording]:
    """One recording for each session, in the order of their first calls; a session's calls by their timestamps."""
    sessions: dict[str, list[tuple[float, str]]] = {}
    for call in calls:
        text = next(call[key] for key in _PROMPT if isinstance(call.get(key), str))
        when = call.get("timestamp")
        timed = sessions.setdefault(str(call.get("session_id", "")), [])
        if text:
            timed.append((when if isinstance(when, (int, float)) else len(timed), text))
    ordered = sorted(((key, timed) for key, timed in sessions.items() if timed), key=lambda item: min(item[1])[0])
    return [_recording(f"{name}-{key[:_ID_SHOWN]}" if key else name, timed) for key, timed in ordered]


def _recording(name: str, timed: list[tuple[float, str]]) -> Recording:
    timed.sort(key=lambda call: call[0])
    steps: list[Step] = []
    # The calls that the last one's prompt begins with; where the next one begins differently, it branched off earlier.
    path: list[tuple[int, str]] = []
    for _, text in timed:
        while path and not text.startswith(path[-1][1]):
            path.pop()
        parent, known = path[-1] if path else (None, "")
        path.append((len(steps), text))
        steps.append(Step(parent, text[len(known) :]))
    return Recording(name, tuple(steps))
