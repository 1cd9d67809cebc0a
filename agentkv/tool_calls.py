"""A call of a tool as a model made it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

__all__ = ["CallFormat", "ToolCall", "ToolCallCounts", "ToolCallTally", "ToolFailure"]

ToolFailure = Literal["malformed", "unknown_tool", "wrong_arguments", "denied", "raised", "timed_out"]
"""Why a call has an error for its result. The first four are known before anything runs."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a kind of model writes a call: {before}{"name": …, "{arguments_key}": {…}}{after}."""

    name: str
    before: str
    """What stands before the JSON; "" where the JSON stands bare."""
    after: str
    arguments_key: str = "arguments"
    listed: bool = False
    """Calls are the items of one JSON list between `before` and `after`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: which tool, with which arguments, or why it cannot be run."""

    id: str
    """Nine letters and digits, the same whenever the same prompt gives the same call."""
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    raw: str = ""
    """The text that the model wrote, its markers left out."""
    error: str | None = None
    """None, or why it cannot be run: malformed, an unknown tool, wrong arguments, denied."""
    failure: ToolFailure | None = field(default=None, compare=False)
    """Which of these it is, once the call was compared with the tools that there are. Follows from `error`."""

    @property
    def message(self) -> dict[str, Any]:
        """The call as it stands in an assistant message's `tool_calls`, in OpenAI's shape.

        A malformed one has for its arguments what the model wrote, as it is: they are no JSON object.
        """
        arguments = self.raw if self.failure == "malformed" else json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ToolCallCounts:
    """How many calls of tools a model made, and how many of them had an error for their result, by why."""

    made: int = 0
    malformed: int = 0
    unknown_tool: int = 0
    wrong_arguments: int = 0
    denied: int = 0
    raised: int = 0
    timed_out: int = 0

    @classmethod
    def of_calls(cls, calls: Iterable[ToolCall]) -> ToolCallCounts:
        """Of calls that a reply holds, checked as they are there and not run yet."""
        calls = list(calls)
        failures = [call.failure for call in calls if call.failure is not None]
        return cls(made=len(calls), **{failure: failures.count(failure) for failure in failures})

    @property
    def failed(self) -> int:
        """Those that had an error for their result."""
        return sum(self.to_dict().values()) - self.made

    def __add__(self, other: ToolCallCounts) -> ToolCallCounts:
        if not isinstance(other, ToolCallCounts):
            return NotImplemented
        return ToolCallCounts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: ToolCallCounts) -> ToolCallCounts:
        if not isinstance(other, ToolCallCounts):
            return NotImplemented
        return ToolCallCounts(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))

    def to_dict(self) -> dict[str, int]:
        """Plain data for JSON."""
        return asdict(self)


class ToolCallTally:
    """Counts that grow, added to from several threads."""

    def __init__(self) -> None:
        self._counts = ToolCallCounts()
        self._lock = threading.Lock()

    def add(self, counts: ToolCallCounts) -> None:
        """Calls of a reply, and later what became of them."""
        with self._lock:
            self._counts += counts

    @property
    def counts(self) -> ToolCallCounts:
        """As they are now."""
        return self._counts
