"""Objects of the user that one Runtime at a time may change."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

__all__ = ["Claims"]


class Claims:
    """Who holds what, by identity: two equal objects are two. A claim on an object that is gone is gone too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, weakref.ref[object]] = {}

    def take(self, objects: Sequence[object]) -> object | None:
        """Claim all of them, or none: the first that is held already is returned instead of None."""
        with self._lock:
            for one in objects:
                held = self._held.get(id(one))
                if held is not None and held() is one:
                    return one
            for one in objects:
                self._held[id(one)] = weakref.ref(one)
            return None

    def give_back(self, objects: Sequence[object]) -> None:
        """Twice is harmless."""
        with self._lock:
            for one in objects:
                self._held.pop(id(one), None)
