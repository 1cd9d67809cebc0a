"""Recorded agents, asked again: what the cache saves on their prompts, and what it could have saved at best."""

from __future__ import annotations

from .asking import Asked, Replayed, replay, room_for_prompts
from .ceiling import UnlimitedCache
from .cutting import Cut, cut
from .load import load
from .recording import Messages, Recording, Step

__all__ = [
    "Asked",
    "Cut",
    "Messages",
    "Recording",
    "Replayed",
    "Step",
    "UnlimitedCache",
    "cut",
    "load",
    "replay",
    "room_for_prompts",
]
