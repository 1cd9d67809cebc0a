"""What every object of an answer begins with, chat or not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Head", "head"]


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with."""

    id: str
    object: str
    created: int
    model: str

    def with_choices(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The object."""
        return {
            "id": self.id, "object": self.object, "created": self.created, "model": self.model,
            "system_fingerprint": None, "choices": list(choices), **more,
        }  # fmt: skip


def head(kind: str, prefix: str, model: str) -> Head:
    """A new answer's id and time."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", kind, int(time.time()), model)
