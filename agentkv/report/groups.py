"""Names that differ only by a number stand together: worker-1, worker-2, … are worker-*."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

__all__ = ["group_names"]

_NUMBERED = re.compile(r"(.*[-/])\d+", re.DOTALL)


def group_names(names: Collection[str]) -> dict[str, str]:
    """The group of each name: what stands before its last number and a star where two or more share it, else itself."""
    stems = {name: match[1] for name in names if (match := _NUMBERED.fullmatch(name))}
    sizes = Counter(stems.values())
    return {name: f"{stems[name]}*" if sizes[stems.get(name, "")] > 1 else name for name in names}
