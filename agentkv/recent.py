"""What was made for a key and is wanted again, of the latest keys alone: keys come from callers, and have no end."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

__all__ = ["Recent"]

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """At most `most` values; the one that was not asked for the longest is forgotten first. Used from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[bytes, _T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> _T | None:
        """O(1); nobody holds the lock for longer than that."""
        with self._lock:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: bytes, value: _T) -> None:
        """O(1)."""
        with self._lock:
            self._values[key] = value
            self._values.move_to_end(key)
            if len(self._values) > self._most:
                self._values.popitem(last=False)
