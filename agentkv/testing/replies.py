"""What a scripted model is to say: from a list or a function to the text of one answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentkv.chat import Traits
from agentkv.chat.call_formats import render_calls

__all__ = ["Answer", "Replies", "Reply", "ScriptEnded", "written"]


class ScriptEnded(AssertionError):
    """A call came for which the list of replies holds none: the test, or the program under test, is at fault.

    An AssertionError, so that no program catches it as one of the errors that it knows what to do with.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer by its parts, written in the markers that the model's chat template uses.

    text       what is said
    calls      calls of tools: (name, arguments)
    reasoning  what is thought before; ValueError where the template knows no markers of reasoning
    token_ids  these ids instead of the text's own encoding, the end token left out; nothing else is given then
    """

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    reasoning: str | None = None
    token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.token_ids is not None and (self.text or self.calls or self.reasoning is not None):
            raise ValueError("token_ids stand for the whole answer: give neither text, calls nor reasoning with them")


Reply = str | Answer | Exception | list[str | Answer | Exception] | tuple[str | Answer | Exception, ...] | None
"""One call's answer; a list has one for each of n choices; None lets the model speak for itself."""


class Replies:
    """Gives the reply for each call. Called from any thread."""

    def __init__(self, replies: Iterable[Reply] | Callable[[Any], Reply]) -> None:
        if isinstance(replies, (str, bytes, Mapping)):
            raise TypeError(
                f"replies is a list of replies or a function from messages to one, not {type(replies).__name__}"
            )
        self._function = replies if callable(replies) else None
        self._left = deque(() if callable(replies) else replies)
        self._given = 0
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """How many of the list nobody has asked for."""
        return len(self._left)

    def next(self, asked: Any) -> Reply:
        """The reply to what is asked; ScriptEnded where there is none, and what the function raises."""
        if self._function is not None:
            return self._function(asked)
        with self._lock:
            if not self._left:
                given = self._given
                raise ScriptEnded(
                    f"call {given + 1} came, and the script has {given} replies. It was asked: {_short(asked)}"
                )
            self._given += 1
            return self._left.popleft()


def written(answer: Answer, traits: Traits | None) -> str:
    """The text of an answer. traits: of the chat template; None where there is none."""
    calls = ""
    if answer.calls:
        if traits is None:
            raise ValueError("an Answer with calls needs a chat template, whose form the calls take")
        calls = render_calls(answer.calls, traits.call_format)
    said = "\n".join(part for part in (answer.text, calls) if part)
    if answer.reasoning is None:
        return said
    markers = traits.reasoning if traits is not None else None
    if traits is None or markers is None:
        raise ValueError("an Answer with reasoning needs a chat template that knows markers of reasoning")
    opening = "" if traits.opens_reasoning else f"{markers.opening}\n"
    return f"{opening}{answer.reasoning}\n{markers.closing}\n\n{said}"


def _short(asked: Any) -> str:
    last = asked[-1] if isinstance(asked, list) and asked else asked
    text = repr(last)
    return text if len(text) <= 200 else f"{text[:200]}…"
