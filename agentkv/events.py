"""What a stream yields, in order, for each choice: text and reasoning as they come, calls of tools, the turn's end."""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.reply import Reply
from agentkv.tool_calls import ToolCall, ToolCallCounts, ToolFailure

__all__ = ["ReasoningDelta", "StreamEvent", "TextDelta", "ToolCallDelta", "ToolResult", "TurnEnd"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens and the text that is certain with them; `text` may be empty while a character is incomplete.

    The texts of a choice joined are its reply's text; the token_ids of its text and reasoning deltas joined are its
    reply's token_ids.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the n choices."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """As TextDelta, of what the model wrote between its markers of reasoning."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call that the model is writing: deltas of one `id` belong together.

    The arguments_texts joined are the JSON of the arguments as the model writes them, not yet checked. A call that
    has no readable name is one delta, with the name "" and all that the model wrote.
    """

    index: int
    id: str
    name: str
    arguments_text: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call was answered: by its tool, or with the reason why it was not run."""

    call: ToolCall
    content: str
    """What the model reads."""
    error: str | None
    """None where the tool returned; else why it did not run, or what it raised."""
    duration: float
    """Seconds that the tool took."""
    index: int = 0
    failure: ToolFailure | None = None
    """Which kind of error it is; None where the tool returned."""

    @property
    def counts(self) -> ToolCallCounts:
        """What this result adds to the counts of the reply that made the call: what went wrong since."""
        since = self.failure if self.call.failure is None else None
        return ToolCallCounts() if since is None else ToolCallCounts(**{since: 1})


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The choice is complete."""

    reply: Reply
    index: int = 0


StreamEvent = TextDelta | ReasoningDelta | ToolCallDelta | ToolResult | TurnEnd
