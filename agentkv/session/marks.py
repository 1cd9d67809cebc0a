"""Places in a session to go back to, and which of them a session knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .turns import Conversation

__all__ = ["Lineage", "Mark"]


@dataclass(frozen=True, slots=True, repr=False)
class Mark:
    """A place in a session to go back to."""

    conversation: Conversation
    turns: int
    owner: int
    serial: int

    def __repr__(self) -> str:
        return f"<Mark: {self.turns} turn{'' if self.turns == 1 else 's'}, {len(self.conversation.messages)} messages>"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which marks a session knows: its own, and those that its ancestors had when it was forked."""

    serials: Mapping[int, int] = field(default_factory=dict)

    def knows(self, mark: Mark) -> bool:
        return mark.serial <= self.serials.get(mark.owner, -1)
