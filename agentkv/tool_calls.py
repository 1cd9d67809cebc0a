"""A call of a tool as a model made it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallFormat", "ToolCall"]


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

    @property
    def message(self) -> dict[str, Any]:
        """The call as it stands in an assistant message's `tool_calls`, in OpenAI's shape."""
        arguments = json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}
