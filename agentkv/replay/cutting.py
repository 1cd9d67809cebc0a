"""Prompts that a model cannot read whole, cut so that one prompt's beginning stays the beginning of the next.

messages  in the middle of results of tools, the oldest first: a result is cut where it first appears, for all prompts
          that hold it, so that the longest of them can be read
text      in the middle of the first prompt that is too long: it stands for itself from there on, and all that follow
          go on from it, with the same cut at the same place

What is still too long afterwards is for the caller to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .recording import Recording, Step

__all__ = ["Cut", "cut"]

Count = Callable[[Any], int]
"""Tokens of a prompt: of a text, or of a list of messages."""

_LEAST_KEPT = 200
"""Characters of a result that are always left: half of them its beginning, half its end."""
_MARK = "\n[… {cut:,} characters cut …]\n"
_ROOM_FOR_MARK = 32
"""Tokens: what the mark takes, and what two texts put together may take more than each alone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A recording whose prompts are cut, and which calls have a prompt that lost something."""

    recording: Recording
    steps: frozenset[int] = frozenset()


def cut(recording: Recording, *, limit: int, count: Count) -> Cut:
    """The recording with prompts of at most `limit` tokens, as far as that can be had.

    count: tokens of a prompt. Costs a few counts for each prompt that is too long, and one for each that is not.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1 token, got {limit}")
    return _cut_text(recording, limit, count) if recording.is_text else _cut_messages(recording, limit, count)


# -- text -----------------------------------------------------------------------------------------------------------


def _cut_text(recording: Recording, limit: int, count: Count) -> Cut:
    children, touched = recording.children(), frozenset[int]()
    for index in range(len(recording.steps)):
        text = recording.text(index)
        if index in touched or (tokens := count(text)) <= limit:
            continue
        followers = _followers(index, children)
        longest = max(count(recording.text(each)) for each in followers if not children[each])
        # Enough is left out to read the longest that follows, but never so much that less than half is left.
        kept = min(limit, max(tokens - (longest - limit), limit // 2)) - _ROOM_FOR_MARK
        steps = list(recording.steps)
        steps[index] = Step(None, _without_middle(text, max(2, kept), count))
        recording, touched = replace(recording, steps=tuple(steps)), touched | followers
    return Cut(recording, touched)


def _followers(index: int, children: list[list[int]]) -> frozenset[int]:
    """A call and all that go on from it."""
    found, waiting = set(), [index]
    while waiting:
        found.add(step := waiting.pop())
        waiting += children[step]
    return frozenset(found)


def _without_middle(text: str, tokens: int, count: Count) -> str:
    """The text's beginning and end, of about so many tokens together and never of more."""
    head = text[: _fitting(lambda size: count(text[:size]), len(text), tokens // 2)]
    rest = text[len(head) :]
    size = _fitting(lambda size: count(rest[len(rest) - size :]), len(rest), tokens - tokens // 2)
    tail = rest[len(rest) - size :]
    return f"{head}{_MARK.format(cut=len(rest) - size)}{tail}"


def _fitting(count: Callable[[int], int], most: int, tokens: int) -> int:
    """The greatest size whose count is within `tokens`, by halving."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if count(middle) <= tokens:
            low = middle
        else:
            high = middle - 1
    return low


# -- messages -------------------------------------------------------------------------------------------------------


def _cut_messages(recording: Recording, limit: int, count: Count) -> Cut:
    results = _Results(recording)
    children = recording.children()
    for index, followers in enumerate(children):
        if not followers:
            results.shorten(index, limit, count)
    return results.cut()


class _Results:
    """The results of tools in a recording, while it is found out which of them have to be cut."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._kept: dict[tuple[int, int], int] = {}
        """By step and place in it: how many characters of a result are left."""

    def shorten(self, index: int, limit: int, count: Count) -> None:
        """Cut the oldest results of one prompt until it can be read, or until there is nothing left to cut."""
        recording = self._recording
        places = [
            (step, place)
            for step in recording.path(index)
            for place, message in enumerate(recording.steps[step].added)
            if isinstance(message, Mapping)
            and message.get("role") == "tool"
            and isinstance(message.get("content"), str)
        ]
        tokens = count(self._prompt(index))
        for at in places:
            while tokens > limit and (left := self._left(at)) > _LEAST_KEPT:
                # Characters for the tokens that are too many, at the rate of this text; the next round mends the rest.
                a_token = max(1.0, left / max(1, count([{"role": "tool", "content": self._content(at)}])))
                self._kept[at] = max(_LEAST_KEPT, int(left - a_token * (tokens - limit + _ROOM_FOR_MARK)))
                tokens = count(self._prompt(index))
            if tokens <= limit:
                return

    def cut(self) -> Cut:
        """What has been found out so far."""
        if not self._kept:
            return Cut(self._recording)
        changed = {step for step, _ in self._kept}
        steps = tuple(replace(step, added=self._added(index)) for index, step in enumerate(self._recording.steps))
        touched = [index for index in range(len(steps)) if changed.intersection(self._recording.path(index))]
        return Cut(replace(self._recording, steps=steps), frozenset(touched))

    def _left(self, at: tuple[int, int]) -> int:
        return self._kept.get(at, len(self._original(at)))

    def _original(self, at: tuple[int, int]) -> str:
        message: Any = self._recording.steps[at[0]].added[at[1]]
        content: str = message["content"]
        return content

    def _content(self, at: tuple[int, int]) -> str:
        content = self._original(at)
        if at not in self._kept:
            return content
        kept = self._kept[at]
        head, tail = content[: kept - kept // 2], content[len(content) - kept // 2 :]
        return f"{head}{_MARK.format(cut=len(content) - kept)}{tail}"

    def _added(self, step: int) -> tuple[Mapping[str, Any], ...]:
        messages = self._recording.steps[step].added
        return tuple(
            {**message, "content": self._content((step, place))} if (step, place) in self._kept else message
            for place, message in enumerate(messages)
            if isinstance(message, Mapping)
        )

    def _prompt(self, index: int) -> list[Mapping[str, Any]]:
        return [message for step in self._recording.path(index) for message in self._added(step)]
