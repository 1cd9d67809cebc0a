"""What a stream yields, in order, for each choice: text as it comes, then the end of the turn."""

from __future__ import annotations

from dataclasses import dataclass

from agentkv.reply import Reply

__all__ = ["StreamEvent", "TextDelta", "TurnEnd"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New tokens and the text that is certain with them; `text` may be empty while a character is incomplete.

    All deltas of a choice joined are its reply's text and token_ids.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the n choices."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """The choice is complete."""

    reply: Reply
    index: int = 0


StreamEvent = TextDelta | TurnEnd
