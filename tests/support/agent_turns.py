"""What the tests of every agent framework share: a script for an agent with two tools, and what its turns must hit."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentkv import Runtime
from agentkv.testing import Answer
from agentkv.testing.tokenizer import chat_tokenizer

__all__ = [
    "FOLLOW_UP",
    "INSTRUCTIONS",
    "LAST_ANSWER",
    "QUESTION",
    "Turn",
    "check_resent_history",
    "find_book",
    "find_one_of_two",
    "in_odd_cuts",
    "librarian",
    "nth_answer",
    "shelf_of",
    "thoughtful",
    "tool_call",
]

INSTRUCTIONS = "You look after a small library. Say where a book stands, and never guess: look it up. " * 3
QUESTION = 'Do you have "Zürich, alt"?'
FOLLOW_UP = "And the atlas?"
LAST_ANSWER = "The atlas is lent until Friday."


def find_book(title: str, section: Literal["maps", "novels"]) -> str:
    """Look a book up by its title."""
    return f"{title}: number 7, in {section}"


def find_one_of_two(title: Literal["atlas", "novel"], section: Literal["maps", "novels"]) -> str:
    """Look a book up by its title."""
    return find_book(title, section)


# For real models, whose calls are short and whole then, whatever they would say.
find_one_of_two.__name__ = "find_book"


def shelf_of(numbers: list[int], lent: bool) -> str:
    """Say on which shelves books stand."""
    return f"shelves {[number % 5 for number in numbers]}, lent: {lent}"


@dataclass(frozen=True, slots=True)
class Turn:
    """What the usage of one answer says, in tokens."""

    prompt: int
    cached: int
    output: int


def check_resent_history(turns: Sequence[Turn], runtime: Runtime, name: str, *, least: int = 3) -> None:
    """From the second turn on, at least 0.90 of what was sent or answered before came out of the cache.

    The report tells the same of `name`, to the token.
    """
    assert len(turns) >= least
    shares = [now.cached / (before.prompt + before.output) for before, now in itertools.pairwise(turns)]
    assert min(shares) >= 0.90, f"shares of the resent history that were cached: {shares}, of {turns}"
    row = runtime.report().to_dict()["by_name"][name]
    told = (row["calls"], row["prompt_tokens"], row["cached_tokens"])
    assert told == (len(turns), sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns))
    runtime.check()


def nth_answer(replies: Sequence[str | Answer]) -> Callable[[Any], str | Answer]:
    """A script for conversations that may run side by side: each gets the reply of its own place."""

    def reply(messages: Any) -> str | Answer:
        return replies[sum(message["role"] == "assistant" for message in messages)]

    return reply


def tool_call(name: str, **arguments: Any) -> str:
    """A call as a model may write it and as no template does: without spaces in its JSON, not in the schema's order."""
    written = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def in_odd_cuts(text: str) -> Answer:
    """A text in ids that no tokenizer cuts it into: each letter by itself, but for the markers.

    Coming back as text it is encoded in other ids, and is found only where the produced ones are remembered.
    """
    tokenizer = chat_tokenizer()
    pieces = re.findall(r"</?tool_call>|.", text, re.S)
    return Answer(
        token_ids=[each for piece in pieces for each in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    )


def librarian() -> Callable[[Any], str | Answer]:
    """Two questions: a call, a text with two calls, an answer; then a call and the last answer."""
    texts = [
        tool_call("find_book", section="maps", title='Zürich, "alt"\\'),
        "It is there.\n"
        + "\n".join([tool_call("shelf_of", lent=False, numbers=[7, 12]), tool_call("shelf_of", numbers=[], lent=True)]),
        "It stands on shelf 2. 📚",
        tool_call("find_book", section="maps", title="atlas"),
        LAST_ANSWER,
    ]
    return nth_answer([in_odd_cuts(text) for text in texts])


def thoughtful() -> Callable[[Any], str | Answer]:
    """One question: a call with reasoning before it, a call without, and the last answer."""
    return nth_answer(
        [
            Answer(
                reasoning="A map. " * 20,
                calls=[("find_book", {"title": "atlas", "section": "maps"})],
            ),
            Answer(calls=[("shelf_of", {"numbers": [7], "lent": False})]),
            LAST_ANSWER,
        ]
    )
