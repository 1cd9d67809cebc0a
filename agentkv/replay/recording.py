"""What one agent asked, as a tree of calls: each holds only what its prompt adds to an earlier one.

A session of thirty calls whose last prompt has 145,000 characters takes 145,000 characters so, and not two million.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Messages", "Recording", "Step"]

Messages = tuple[Mapping[str, Any], ...]
"""Messages in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class Step:
    """One recorded call."""

    parent: int | None
    """The call of the same recording, an earlier one, whose prompt this one's begins with; None: it stands alone."""
    added: str | Messages
    """What this prompt adds behind its parent's: what was answered there, and what came after it. May be empty."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of one agent, in the order in which they were made; several children of a call are branches.

    All prompts are text, or all are messages.
    """

    name: str
    steps: tuple[Step, ...]
    tools: Messages = ()
    """In OpenAI's shape; they stand at the head of every prompt of messages."""

    @property
    def is_text(self) -> bool:
        """Whether prompts are raw text, which no chat template touches."""
        return bool(self.steps) and isinstance(self.steps[0].added, str)

    def path(self, index: int) -> list[int]:
        """The calls whose additions make this call's prompt, the first one first."""
        path: list[int] = []
        step: int | None = index
        while step is not None:
            path.append(step)
            step = self.steps[step].parent
        return path[::-1]

    def text(self, index: int) -> str:
        """The prompt of a call of text. O(its length)."""
        pieces = [self.steps[step].added for step in self.path(index)]
        return "".join(piece for piece in pieces if isinstance(piece, str))

    def messages(self, index: int) -> list[Mapping[str, Any]]:
        """The prompt of a call of messages."""
        return [
            message for step in self.path(index) for message in self.steps[step].added if not isinstance(message, str)
        ]

    def prompt(self, index: int) -> str | list[Mapping[str, Any]]:
        """The prompt of a call: text or messages."""
        return self.text(index) if self.is_text else self.messages(index)

    def children(self) -> list[list[int]]:
        """For each call, those that go on from it."""
        children: list[list[int]] = [[] for _ in self.steps]
        for index, step in enumerate(self.steps):
            if step.parent is not None:
                children[step.parent].append(index)
        return children
