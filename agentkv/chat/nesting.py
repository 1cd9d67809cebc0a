"""How deep values lie within values: what is nested deeper than this is refused, wherever it would be copied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MAX_DEPTH", "nested_too_deep"]

MAX_DEPTH = 100
"""Levels of objects and lists. Templates, copies and JSON writers go down by calls of their own, and Python's limit
on those depends on who calls: below this none of them comes near it. pydantic reads 200."""


def nested_too_deep(value: Any) -> bool:
    """Whether mappings, lists and tuples lie in each other more than MAX_DEPTH deep, or in themselves.

    O(size of what is not too deep), and no recursion.
    """
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        seen: set[int] = set()
        for each in level:
            # What stands in many places of a level is looked into once: shared lists would multiply else.
            if isinstance(each, Mapping | list | tuple) and id(each) not in seen:
                seen.add(id(each))
                inner += each.values() if isinstance(each, Mapping) else each
        if seen and depth == MAX_DEPTH:
            return True
        level, depth = inner, depth + 1
    return False
