"""What became of the demo, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentkv.main_job import Played, Positions

__all__ = ["Outcome", "Way"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of doing the job, or a part of it."""

    name: str
    played: Played
    warm: Played
    """The same calls with the cache; `seconds` is how long these took, one behind the other where they are a part."""

    @property
    def is_warm(self) -> bool:
        return self.played is self.warm

    @property
    def equal(self) -> bool:
        """Every prompt and every answer, token by token."""
        return [(call.agent, call.prompt_token_ids, call.token_ids) for call in self.played.calls] == [
            (call.agent, call.prompt_token_ids, call.token_ids) for call in self.warm.calls
        ]

    @property
    def ratio(self) -> float:
        """Of wall time, to the same calls with the cache."""
        return self.played.seconds / self.warm.seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """All ways, the warm one first."""

    ways: tuple[Way, ...]
    positions: Positions
    """Of the warm one."""

    @property
    def warm(self) -> Played:
        return self.ways[0].played

    @property
    def holds(self) -> bool:
        """The answers are equal, and nothing was computed twice but what calls at the same time may."""
        return all(way.equal for way in self.ways) and self.positions.run <= self.positions.allowed
