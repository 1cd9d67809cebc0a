"""What a stream drives: one call, how its tokens are read, and what becomes of its replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentkv.calls import ChoiceEnded, TokensAdded
from agentkv.events import ReasoningDelta, TextDelta, ToolCallDelta
from agentkv.reply import Reply
from agentkv.worker import Worker

from .bridge import Mailbox
from .written import Written

__all__ = ["AtOnce", "Delta", "Submitted", "Turn"]

Delta = TextDelta | ReasoningDelta | ToolCallDelta


class AtOnce(Protocol):
    """Reads deltas where they come: called on the loop, between its tasks."""

    def ready(self) -> bool:
        """Whether the next deltas can be taken now."""

    def take(self, delta: Delta) -> None:
        """Take one; it must return soon."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """A call that is in the engine: where to abort it, and where its updates arrive."""

    worker: Worker
    call_id: int
    mailbox: Mailbox
    written: Written | None = None
    """What makes text of its tokens; None where the engine does."""


class Turn(Protocol):
    """One call. Its methods are called on the loop and task that reads the stream, in this order."""

    n: int

    async def begin(self) -> Submitted:
        """Make the prompt and hand the call to the engine. What it raises is the stream's error."""

    def read(self, update: TokensAdded) -> Sequence[Delta]:
        """What new tokens of one choice say."""

    def end(self, update: ChoiceEnded, *, counts: bool) -> tuple[Sequence[Delta], Reply]:
        """What was held back of a choice, and its reply; `counts`: it becomes part of the conversation."""

    def left(self) -> None:
        """Nothing of the call runs any more, however it ended; called once, if `begin` was."""
