"""What a runtime's cache saved and what it cost, as figures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from agentkv.counters import Snapshot
from agentkv.usage import MISS_CAUSES

__all__ = ["Report"]


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of one runtime, since it started or since an earlier report of it."""

    model: str
    snapshot: Snapshot
    since: Snapshot | None = None

    def to_dict(self) -> dict[str, Any]:
        """Counters (differences where `since` was given), pages as they are now, and the rates made of them.

        hit_rate is cached_tokens / prompt_tokens, None where nothing was asked.
        """
        counters = _difference(self.snapshot.counters, self.since.counters if self.since else None)
        prompt, cached = counters["prompt_tokens"], counters["cached_tokens"]
        return {
            "model": self.model,
            **counters,
            "hit_rate": cached / prompt if prompt else None,
            "pages": dict(self.snapshot.pages),
            "running": self.snapshot.running,
            "waiting": self.snapshot.waiting,
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)


def _difference(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    if before is None:
        return {key: dict(value) if isinstance(value, dict) else value for key, value in now.items()}
    return {
        key: {cause: value[cause] - before[key][cause] for cause in MISS_CAUSES}
        if isinstance(value, dict)
        else value - before[key]
        for key, value in now.items()
    }
