"""Where a marker begins in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Cut", "MarkerSearch"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A text cut at the first marker; without one, before what may still become one."""

    before: str
    marker: str | None
    rest: str
    """After the marker; without one, the end of the text that is the beginning of a marker, to be seen again."""


class MarkerSearch:
    """Finds the first of some markers, which is the one whose last character comes first.

    By that rule the cut depends on the text alone and not on how it was divided.
    """

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(dict.fromkeys(marker for marker in markers if marker))
        beginnings = {marker[:length] for marker in self.markers for length in range(1, len(marker))}
        self._longest = max(map(len, beginnings), default=0)
        self._beginnings = frozenset(beginnings)

    def cut(self, text: str) -> Cut:
        """O(len(text) + total length of the markers)."""
        found = [
            (start + len(marker), -len(marker), marker) for marker in self.markers if (start := text.find(marker)) >= 0
        ]
        if found:
            end, negative_length, marker = min(found)
            return Cut(text[: end + negative_length], marker, text[end:])
        for length in range(min(self._longest, len(text)), 0, -1):
            if text[-length:] in self._beginnings:
                return Cut(text[:-length], None, text[-length:])
        return Cut(text, None, "")

    def may_open(self, text: str) -> bool:
        """Whether `text`, not empty, begins with a marker or is the beginning of one."""
        return text in self._beginnings or text.startswith(self.markers)
