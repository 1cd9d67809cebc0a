"""What a model writes, told apart while it comes: text, reasoning, and calls of tools.

    text --opening marker--> reasoning --closing marker--> text
    text --marker of calls--> a block of calls --its end--> text
    nothing yet --{, [ or a fence--> maybe calls and nothing else --> calls at the end, or text
    nothing yet --anything else, where JSON is wanted--> text to its end

Nothing that was handed out is taken back, so what may become a marker waits until it is clear; a text without markers
passes unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass

from agentkv.events import ReasoningDelta, TextDelta, ToolCallDelta
from agentkv.tool_calls import CallFormat, ToolCall

from .bare_calls import BareCalls
from .call_block import CallBlock, CallIds
from .call_formats import closing_marker, markers
from .marker_search import MarkerSearch
from .reasoning import ReasoningMarkers
from .text_parts import TextParts

__all__ = ["ReadTurn", "TurnDelta", "TurnReader"]

TurnDelta = TextDelta | ReasoningDelta | ToolCallDelta

_PIECE = 4096
"""Characters that are read at once."""


@dataclass(frozen=True, slots=True)
class ReadTurn:
    """A finished answer in its parts."""

    text: str
    """What is neither reasoning nor a call. Parts between which one of these stood are on lines of their own."""
    reasoning: str | None
    """None where none was opened; blocks of it are on lines of their own."""
    calls: tuple[ToolCall, ...]
    """In the order in which they were written, malformed ones among them; whether a tool is known is not judged."""


class TurnReader:
    """Reads one answer. The parts depend on its whole text alone, not on the pieces in which it comes.

    The texts of the TextDeltas joined are the turn's text, those of the ReasoningDeltas its reasoning, and the
    token_ids of both joined are all that were fed: a delta without text may bear them. A call whose name is readable
    is told by ToolCallDeltas of the id that it will have; the arguments_texts of a well-formed one joined are its
    arguments as written. One without a readable name is told whole, with the name "", where its block ends. A reply
    that is bare JSON is told at its end.

    reasoning: the model's markers, or None: no text is reasoning
    inside_reasoning: the prompt has opened the reasoning already
    call_format: the template's; with None, or no tool_names, no text is a call
    is_call: given where the answer is calls or JSON and nothing else. Then what does not begin with a marker is text to
    its end, markers in it too; but where the format's calls stand bare, one object with the format's own two keys and
    no other, of which this says so, is a call
    id_seed: equal seeds give equal ids to the calls of equal answers
    index: which of the n choices

    Costs O(1) for each character, amortised.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningMarkers | None,
        inside_reasoning: bool,
        call_format: CallFormat | None,
        tool_names: Collection[str],
        id_seed: int,
        index: int = 0,
        is_call: Callable[[ToolCall], bool] | None = None,
    ) -> None:
        if inside_reasoning and reasoning is None:
            raise ValueError("inside_reasoning needs the markers of the reasoning, and there are none")
        self._reasoning = reasoning
        self._call_format = call_format if tool_names else None
        self._tool_names = frozenset(tool_names)
        self._id_seed = id_seed
        self._index = index
        opening = () if reasoning is None else (reasoning.opening,)
        calling = () if self._call_format is None else markers(self._call_format)
        self._openings = MarkerSearch([*opening, *calling])
        self._closing = MarkerSearch([] if reasoning is None else [reasoning.closing])
        self._text = TextParts()
        self._thoughts = TextParts(held="\n")
        self._has_reasoned = False
        self._calls: list[ToolCall] = []
        self._told: set[str] = set()
        """Ids of calls that deltas were made of."""
        self._is_call = is_call
        self._may_be_bare = self._call_format is not None or is_call is not None
        """Neither text nor a call came yet."""
        self._bare: BareCalls | None = None
        self._block: CallBlock | None = None
        self._held = ""
        self._read: Callable[[str], str] = self._read_text
        """Takes the text that is there and returns what is left for the state that follows."""
        self._deltas: list[TurnDelta] = []
        if inside_reasoning:
            self._open_reasoning()

    def feed(self, text: str, token_ids: tuple[int, ...]) -> list[TurnDelta]:
        """The next piece of the answer and the tokens that made it; either may be empty."""
        self._resume(text)
        deltas, self._deltas = self._deltas, []
        if token_ids:
            _bear(deltas, self._empty_delta(), token_ids)
        return deltas

    @property
    def lacks(self) -> str | None:
        """What has to follow for the answer to be over with its first call, mostly ""; None before that call is whole.

        None, too, where calls stand bare, which are calls only if nothing else follows, and behind a second call.
        """
        if self._calls:
            return "" if self._block is None and len(self._calls) == 1 else None
        return None if self._block is None else self._block.lacks

    def finish(self, cut: str | None = None) -> tuple[list[TurnDelta], ReadTurn]:
        """The answer is complete: what was held back, and the whole in its parts. Once, and nothing after it.

        cut: what ended the answer before its end, told as the reason of a call that is not whole.
        """
        if self._bare is not None:
            deltas, calls = self._bare.finish(cut, self._tool_names)
            if calls and self._takes(calls, self._bare.raw):
                self._text.end_part()
                self._deltas += deltas
                self._calls += calls
            else:
                self._resume(self._leave_bare())
        while self._block is not None:
            self._block.finish(cut or "the text ended inside it")
            self._resume(self._leave_block())
        held, self._held = self._held, ""
        if self._read == self._read_reasoning:
            self._say(ReasoningDelta, self._thoughts.write(held))
        else:
            self._say(TextDelta, self._text.write(held))
            self._say(TextDelta, self._text.finish())
        reasoning = self._thoughts.text if self._has_reasoned else None
        deltas_left, self._deltas = self._deltas, []
        return deltas_left, ReadTurn(self._text.text, reasoning, tuple(self._calls))

    def _resume(self, text: str) -> None:
        """Let one state after the other read on, in pieces, since each copies what it leaves for the next."""
        waiting = [text]
        while waiting:
            text = waiting.pop()
            if len(text) > _PIECE:
                waiting += reversed([text[start : start + _PIECE] for start in range(0, len(text), _PIECE)])
            elif text:
                waiting.append(self._read(text))

    def _read_text(self, text: str) -> str:
        buffer, self._held = self._held + text, ""
        if not self._openings.markers:
            # Nothing can be beside a marker, so nothing waits.
            self._say(TextDelta, self._text.write(buffer) + self._text.finish())
            return ""
        if self._may_be_bare:
            body = buffer.lstrip()
            self._say(TextDelta, self._text.write(buffer[: len(buffer) - len(body)]))
            if body and not self._openings.may_open(body):
                if body[0] in "{[`" and self._bare_may_call():
                    return self._enter_bare(body)
                if self._is_call is not None:
                    self._read = self._read_plain
                    return body
            buffer = body
        cut = self._openings.cut(buffer)
        if cut.before:
            self._may_be_bare = self._may_be_bare and cut.before.isspace()
            self._say(TextDelta, self._text.write(cut.before))
        if cut.marker is None:
            self._held = cut.rest
        elif self._reasoning is not None and cut.marker == self._reasoning.opening:
            self._open_reasoning()
        else:
            self._enter_block(cut.marker)
        return "" if cut.marker is None else cut.rest

    def _bare_may_call(self) -> bool:
        """Where JSON is wanted too, what stands bare is that, unless the format's own calls stand bare."""
        call_format = self._call_format
        return call_format is not None and (self._is_call is None or not call_format.before.strip())

    def _takes(self, calls: list[ToolCall], raw: str) -> bool:
        """Where JSON is wanted too, a call is what the mask's calls are: one object with the format's keys alone."""
        if self._is_call is None:
            return True
        call_format = self._call_format
        assert call_format is not None, "without a format nothing is a call"
        value = json.loads(raw) if len(calls) == 1 and calls[0].error is None and raw.lstrip()[0] == "{" else None
        return (
            isinstance(value, dict) and value.keys() == {"name", call_format.arguments_key} and self._is_call(calls[0])
        )

    def _read_plain(self, text: str) -> str:
        self._say(TextDelta, self._text.write(text) + self._text.finish())
        return ""

    def _read_reasoning(self, text: str) -> str:
        cut = self._closing.cut(self._held + text)
        self._held = ""
        self._say(ReasoningDelta, self._thoughts.write(cut.before))
        if cut.marker is None:
            self._held = cut.rest
            return ""
        self._text.end_part(strip_next="\n")
        self._read = self._read_text
        return cut.rest

    def _open_reasoning(self) -> None:
        self._text.end_part()
        self._thoughts.end_part(strip_next="\n")
        self._has_reasoned = True
        self._read = self._read_reasoning

    def _enter_block(self, marker: str) -> None:
        call_format = self._call_format
        assert call_format is not None, "without a format no marker of calls is looked for"
        self._text.end_part()
        self._may_be_bare = False
        self._block = CallBlock(
            self._next_ids(),
            closing=closing_marker(marker, call_format),
            stops=self._openings.markers,
            arguments_key=call_format.arguments_key,
            named=call_format.name == "bracket",
        )
        self._read = self._read_block

    def _read_block(self, text: str) -> str:
        assert self._block is not None, "in this state a block is open"
        deltas = self._block.feed(text)
        self._told.update(delta.id for delta in deltas)
        self._deltas += deltas
        return self._leave_block() if self._block.ended else ""

    def _leave_block(self) -> str:
        assert self._block is not None, "a block is left once"
        self._calls += self._block.calls
        untold = (call for call in self._block.calls if call.id not in self._told)
        self._deltas += (ToolCallDelta(self._index, call.id, call.name, call.raw) for call in untold)
        rest, self._block = self._block.rest, None
        self._read = self._read_text
        return rest

    def _enter_bare(self, body: str) -> str:
        call_format = self._call_format
        assert call_format is not None, "without a format nothing is a call"
        self._may_be_bare = False
        known = self._tool_names
        anything = call_format.name in ("bare", "parameters")
        self._bare = BareCalls(
            self._next_ids(),
            may_call=lambda name: anything or name in known,
            arguments_key=call_format.arguments_key,
            several=call_format.name == "parameters",
        )
        self._read = self._read_bare
        return body

    def _read_bare(self, text: str) -> str:
        assert self._bare is not None, "in this state a reply may be bare"
        self._bare.feed(text)
        return self._leave_bare() if self._bare.failed else ""

    def _leave_bare(self) -> str:
        assert self._bare is not None, "that a reply is not bare is found once"
        raw, self._bare = self._bare.raw, None
        self._read = self._read_text if self._is_call is None else self._read_plain
        return raw

    def _next_ids(self) -> CallIds:
        return CallIds(self._id_seed, len(self._calls), self._index)

    def _say(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        if text:
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, TextDelta | ReasoningDelta) and type(last) is kind:
                self._deltas[-1] = kind(last.text + text, last.token_ids, last.index)
            else:
                self._deltas.append(kind(text, (), self._index))

    def _empty_delta(self) -> TextDelta | ReasoningDelta:
        kind = ReasoningDelta if self._read == self._read_reasoning else TextDelta
        return kind("", (), self._index)


def _bear(deltas: list[TurnDelta], empty: TextDelta | ReasoningDelta, token_ids: tuple[int, ...]) -> None:
    """Put the tokens on the first delta that can bear them, else on an empty one before all others."""
    for place, delta in enumerate(deltas):
        if not isinstance(delta, ToolCallDelta):
            deltas[place] = type(delta)(delta.text, token_ids, delta.index)
            return
    deltas.insert(0, type(empty)(empty.text, token_ids, empty.index))
