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

    TypeError for a part of another kind.
    """

    text: str = ""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    reasoning: str | None = None
    token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Answer.text must be a str, got {self.text!r}")
        if self.reasoning is not None and not isinstance(self.reasoning, str):
            raise TypeError(f"Answer.reasoning must be a str or None, got {self.reasoning!r}")
        _check_calls(self.calls)
        _check_ids(self.token_ids)
        if self.token_ids is not None and (self.text or self.calls or self.reasoning is not None):
            raise ValueError("token_ids stand for the whole answer: give neither text, calls nor reasoning with them")


def _check_calls(calls: object) -> None:
    wanted = 'Answer.calls is a list of (name, arguments), such as [("add", {"a": 1})]'
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise TypeError(f"{wanted}, got {calls!r}")
    for call in calls:
        pair = isinstance(call, (tuple, list)) and len(call) == 2
        if not (pair and isinstance(call[0], str) and isinstance(call[1], Mapping)):
            raise TypeError(f"{wanted}, and one of them is {call!r}")


def _check_ids(token_ids: object) -> None:
    if token_ids is None:
        return
    ints = isinstance(token_ids, Sequence) and all(type(each) is int for each in token_ids)
    if not ints:
        raise TypeError(f"Answer.token_ids is a list of int or None, got {token_ids!r}")


Reply = str | Answer | Exception | list[str | Answer | Exception] | tuple[str | Answer | Exception, ...] | None
"""One call's answer; a list has one for each of n choices; None lets the model speak for itself."""


class Replies:
    """Gives the reply for each call. Called from any thread."""

    def __init__(self, replies: Iterable[Reply] | Callable[[Any], Reply]) -> None:
        if isinstance(replies, (str, bytes, Mapping)) or not (callable(replies) or isinstance(replies, Iterable)):
            raise TypeError(
                f"replies is a list of replies or a function from messages to one, not {type(replies).__name__}"
            )
        self._function = replies if callable(replies) else None
        self._left = deque(() if callable(replies) else replies)
        for place, reply in enumerate(self._left):
            _check_reply(reply, f"reply {place} of the list")
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


def _check_reply(reply: object, where: str) -> None:
    of_choices = reply if isinstance(reply, (list, tuple)) else [reply] if reply is not None else []
    for each in of_choices:
        if not isinstance(each, (str, Answer, Exception)):
            raise TypeError(
                f"{where} is {each!r}: a reply is a str, an Answer, an Exception, None or, for n choices, a list of "
                f"the first three"
            )


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
