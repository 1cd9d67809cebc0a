"""The token ledger: the exact ids a model saw and produced, and how a next turn is put behind them.

    |---------------- ledger ----------------|------------- suffix --------------|
    | prompt of turn 1 | reply | … | reply k |  end of turn · messages · opening  |
                                             ^ ends where the reply's text ends

Produced ids are never encoded again: a text has many encodings, and the model's own is the one whose keys and values
are cached. The suffix is what the template puts between two turns. Where the template's own rendering of the
conversation so far is still there when more follows, it is simply the rest. Templates that render earlier turns
differently once others follow (and leave out their reasoning, for one) have the choice that `exact` makes.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .messages import Message
from .template import ChatTemplate

__all__ = ["Change", "Ledger", "Scribe", "TurnPrompt"]


class _Encode(Protocol):
    """The ids of a text that stands behind so many others."""

    def __call__(self, text: str, behind: int = 0) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where a reply ended."""

    num_messages: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Change:
    """Where a template renders a conversation otherwise than it did when the ids were made."""

    message: int
    """The first message whose rendering changed."""
    dropped: str
    """What of it is not rendered any more: "reasoning", "text" or "calls"; "form": only how it is written changed."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ids of a conversation up to the end of its last reply. Never changes: forks and marks share it."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    num_messages: int = 0
    """How many messages of the conversation the ids hold; those behind are encoded with the next call."""
    turns: tuple[_Turn, ...] = ()
    follows_template: bool = True
    """The ids say what the template would render, but for the model's own way to write a reply."""
    seam_tokens: int = 0
    """Ids at the end that were encoded again, because the text ended inside a token."""
    change: Change | None = None
    """The first that the template made in what the ids say, where they were kept all the same."""

    def packed(self) -> bytes:
        """All of it in one object, of four bytes an id. Copies the ids at once, and no number by number.

        Only of a ledger that follows the template, in which no change was made.
        """
        assert self.follows_template, "a ledger that leaves its template is not packed"
        assert self.change is None, "a ledger with a change is not packed"
        head = array("i", (self.num_messages, self.seam_tokens, len(self.turns)))
        for turn in self.turns:
            head.extend((turn.num_messages, turn.num_tokens))
        return b"".join((head, self.token_ids))

    @classmethod
    def unpacked(cls, data: bytes) -> Ledger:
        """The ledger that was packed; the ids are copied at once."""
        numbers = array("i")
        numbers.frombytes(data)
        num_messages, seam_tokens, num_turns = numbers[:3]
        first_id = 3 + 2 * num_turns
        turns = numbers[3:first_id]
        return cls(
            numbers[first_id:],
            num_messages,
            tuple(map(_Turn, turns[::2], turns[1::2])),
            seam_tokens=seam_tokens,
        )


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """What the model is asked."""

    token_ids: tuple[int, ...]
    ledger: Ledger
    """What the ids begin with; its turns are those that are still told apart in them."""
    surplus_tokens: int = 0
    """With exact history: how many more ids these are than the template's own rendering of the conversation."""
    seam_tokens: int = 0
    change: Change | None = None
    """What the template renders otherwise; with exact history its tokens are the surplus."""
    rewritten_tokens: int = 0
    """By the template's history: ids of the ledger that are given up, from the change on."""


class Scribe:
    """Writes ledgers for one model: by its template, its tokenizer, and nothing else.

    encode: the ids of a text, no special tokens added. Rendering and encoding cost O(conversation) and O(suffix).
    fewest: how many ids a text has at least, without encoding it; 0 where that is not known
    """

    def __init__(
        self,
        template: ChatTemplate,
        encode: Callable[[str], list[int]],
        fewest: Callable[[str], int] = lambda text: 0,
    ) -> None:
        self.template = template
        self._encode, self._fewest = encode, fewest

    def encode(self, text: str) -> list[int]:
        """The ids of a text by itself. O(text)."""
        return self._encode(text)

    def fewest(self, text: str) -> int:
        """How many ids a text has at least, told by its length; 0 where that is not known."""
        return self._fewest(text)

    def prompt(
        self,
        ledger: Ledger,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        exact: bool = True,
        answer: bool = True,
        check: Callable[[int], None] = lambda at_least: None,
    ) -> TurnPrompt:
        """The ids for a conversation whose beginning is in the ledger.

        exact: keep the ledger's ids whatever the template makes of earlier turns; else keep those up to the last turn
        that the template still renders as it did, and encode the rest anew.
        answer: with the opening of the assistant's turn.
        check: called before a text is encoded, with the ids that the prompt has at least; what it raises comes out
        """

        def encode(text: str, behind: int = 0) -> list[int]:
            check(behind + self._fewest(text))
            return self._encode(text)

        rendered = self.template.render(messages, tools=tools, answer=answer, kwargs=kwargs)
        if not ledger.num_messages:
            return TurnPrompt(tuple(encode(rendered)), Ledger())
        if exact:
            return self._exact(ledger, messages, rendered, tools, kwargs, answer, encode)
        return self._by_template(ledger, messages, rendered, tools, kwargs, encode)

    def _exact(
        self,
        ledger: Ledger,
        messages: Sequence[Message],
        rendered: str,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None,
        answer: bool,
        encode: _Encode,
    ) -> TurnPrompt:
        known, new = messages[: ledger.num_messages], messages[ledger.num_messages :]
        text = self._still_there(rendered, known, tools, kwargs)
        follows = ledger.follows_template and text is not None
        if text is not None:
            suffix = rendered[len(text) :]
        else:
            calls = known[-1].tool_calls if new and new[0].role == "tool" else ()
            suffix = self.template.after_turn(new, calls=calls, tools=tools, answer=answer, kwargs=kwargs)
        token_ids = (*ledger.token_ids, *encode(suffix, len(ledger.token_ids)))
        surplus = 0 if follows else len(token_ids) - len(self._encode(rendered))
        change = ledger.change
        if not follows and change is None:
            # Looked for once, where it first came: what is kept is kept from there on.
            turns = ledger.turns
            first = bisect_left(turns, True, key=lambda turn: self._is_lost(turn, rendered, messages, tools, kwargs))
            change = self._change(turns[min(first, len(turns) - 1)], rendered, messages, tools, kwargs)
        kept = Ledger(ledger.token_ids, ledger.num_messages, ledger.turns, follows, change=change)
        return TurnPrompt(token_ids, kept, surplus, ledger.seam_tokens, change)

    def _by_template(
        self,
        ledger: Ledger,
        messages: Sequence[Message],
        rendered: str,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None,
        encode: _Encode,
    ) -> TurnPrompt:
        def lost(turn: _Turn) -> bool:
            return self._is_lost(turn, rendered, messages, tools, kwargs)

        # A turn that is rendered differently moves all that follow it, so the turns that are still there come first.
        # Mostly all of them are, so the last is tried before the middle.
        turns = ledger.turns
        count = len(turns) if not lost(turns[-1]) else bisect_left(turns, True, key=lost)
        change = self._change(turns[count], rendered, messages, tools, kwargs) if count < len(turns) else None
        if not count:
            rewritten = len(ledger.token_ids)
            return TurnPrompt(tuple(encode(rendered)), Ledger(), change=change, rewritten_tokens=rewritten)
        last = turns[count - 1]
        kept = Ledger(ledger.token_ids[: last.num_tokens], last.num_messages, turns[:count])
        suffix = rendered[len(self._still_there(rendered, messages[: last.num_messages], tools, kwargs) or "") :]
        seam = ledger.seam_tokens if count == len(turns) else 0
        rewritten = len(ledger.token_ids) - last.num_tokens
        token_ids = (*kept.token_ids, *encode(suffix, last.num_tokens))
        return TurnPrompt(token_ids, kept, 0, seam, change, rewritten)

    def _is_lost(
        self,
        turn: _Turn,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None,
    ) -> bool:
        return self._still_there(rendered, messages[: turn.num_messages], tools, kwargs) is None

    def _change(
        self,
        turn: _Turn,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None,
    ) -> Change:
        """What became of the reply that ends the first turn which is rendered differently."""
        number = turn.num_messages - 1
        reply = messages[number]
        before = self.template.render(messages[:number], tools=tools, answer=False, kwargs=kwargs)
        rest = rendered.removeprefix(before)
        if reply.reasoning and reply.reasoning.strip() not in rest:
            return Change(number, "reasoning")
        if reply.content and reply.content.strip() not in rest:
            return Change(number, "text")
        if any(call.name not in rest for call in reply.tool_calls):
            return Change(number, "calls")
        return Change(number, "form")

    def _still_there(
        self,
        rendered: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any] | None,
    ) -> str | None:
        """The text of a beginning of the conversation that ends with a reply, if `rendered` begins with it too."""
        text = self._text_of(messages, tools, kwargs)
        if rendered.startswith(text):
            return text
        reasoning = self.template.traits(kwargs).reasoning
        if reasoning is None or messages[-1].reasoning is not None:
            return None
        # Some templates put empty reasoning before a last reply that has none, and take it away once more follows.
        # The model wrote none, so without it the text is what the ids say.
        asked = self.template.render(messages[:-1], tools=tools, answer=True, kwargs=kwargs)
        empty = re.compile(rf"{re.escape(reasoning.opening)}\s*{re.escape(reasoning.closing)}\s*")
        found = empty.match(text, len(asked)) if text.startswith(asked) else None
        text = asked + text[found.end() :] if found is not None else ""
        return text if text and rendered.startswith(text) else None

    def _text_of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None
    ) -> str:
        """The template's rendering up to where the text of the last message, a reply, ends."""
        text = self.template.render(messages, tools=tools, answer=False, kwargs=kwargs)
        return text.removesuffix(self.template.traits(kwargs).end_of_turn)

    def after_reply(
        self,
        prompt: TurnPrompt,
        prompt_ids: array[int],
        num_messages: int,
        whole_token_ids: Sequence[int],
        cut_text: str,
    ) -> Ledger:
        """The ledger once the prompt was answered; the reply is message number `num_messages`, the last.

        prompt_ids: those of the prompt once more, which an array copies at once; it is not changed
        whole_token_ids: the produced ids that lie wholly in the reply's text, without the end token
        cut_text: text behind them that is part of the reply, because it was ended inside a token; encoded anew
        """
        seam = self._encode(cut_text) if cut_text else []
        token_ids = prompt_ids + array("i", (*whole_token_ids, *seam))
        return Ledger(
            token_ids,
            num_messages,
            (*prompt.ledger.turns, _Turn(num_messages, len(token_ids))),
            prompt.ledger.follows_template,
            len(seam),
            prompt.ledger.change,
        )
