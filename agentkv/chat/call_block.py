"""Calls behind one marker, read while the model writes them.

    <tool_call>{…}</tool_call>      one object, or several
    [TOOL_CALLS][{…}, {…}]          a list of objects
    <|python_tag|>{…}; {…}          objects parted by ; or white space
    [TOOL_CALLS]name{…}             a name and the arguments alone

The end of a well-formed call is found by its JSON, so a marker inside of a string ends nothing. What is no JSON has no
such end: then the block ends at the first closing marker or other marker after its beginning, and what follows is read
anew, so that one unclosed quote does not swallow the calls that follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentkv.events import ToolCallDelta
from agentkv.tool_calls import ToolCall

from .call_reader import CallReader, call_id, malformed_call
from .marker_search import MarkerSearch

__all__ = ["CallBlock", "CallIds"]

_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?")
_LONGEST_NAME = 300


@dataclass(frozen=True, slots=True)
class CallIds:
    """Which call of which choice is next, so that its id is known before it is complete.

    seed: with the call's number in the reply, what its id is made of
    first: how many calls of the reply came before
    index: which of the n choices the reply is
    """

    seed: int
    first: int = 0
    index: int = 0


class CallBlock:
    """Takes what follows a marker until the block has ended; `rest` then holds what was read beyond it.

    closing: what ends the block, "" where nothing does
    stops: markers that begin something else, and so end a block that is not well-formed
    named: a name may stand before its arguments
    several: objects may follow each other
    """

    def __init__(
        self,
        ids: CallIds,
        *,
        closing: str = "",
        stops: Iterable[str] = (),
        arguments_key: str = "arguments",
        named: bool = False,
        several: bool = True,
    ) -> None:
        self.calls: list[ToolCall] = []
        self.ended = False
        self.rest = ""
        self.sound = True
        """Nothing that is not of a call was read so far."""
        self._ids = ids
        self._closing = closing
        self._ends = MarkerSearch([closing, *stops])
        self._arguments_key = arguments_key
        self._named = named
        self._several = several
        self._read: Callable[[str], str] = self._read_start
        """Takes the text that is there, holds back what must be seen again with more, and returns what is left."""
        self._held = ""
        self._item: list[str] = []
        """The text of the call that is being read."""
        self._beyond: list[str] = []
        """The text after a complete call, which may turn out not to be of the block."""
        self._listed = False
        self._reader: CallReader | None = None
        self._announced = False
        self._reason = ""
        self._deltas: list[ToolCallDelta] = []

    @property
    def complete(self) -> bool:
        """Whether the block may end here."""
        return self.ended or self._read == self._read_after

    @property
    def lacks(self) -> str | None:
        """What has to follow for the block to hold its first call alone; None before that call, or where more came.

        Behind a closing marker, or where none ends the block, it is nothing: "".
        """
        if len(self.calls) != 1:
            return None
        if self.ended or (self._read == self._read_after and not self._closing):
            return ""
        return "]" if self._read == self._read_after_item else None

    def feed(self, text: str) -> list[ToolCallDelta]:
        """Read on; the deltas of calls whose name is known. Not after the end."""
        assert not self.ended, "a block that has ended takes no text"
        buffer, self._held = self._held + text, ""
        while buffer and not self.ended:
            buffer = self._read(buffer)
        self._take_delta()
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: str = "the text ended inside it") -> None:
        """The text ended here: what is complete is a call, what is not is malformed, for this reason."""
        if self._read == self._read_after:
            self._end("")  # A closing marker that was cut off is not text.
        elif self._read == self._read_trailing:
            self._end("".join(self._beyond) + self._held)
        else:
            if self._read != self._read_broken:
                held, self._held = self._held, ""
                self._held = self._break(held, reason)
                self.feed("")
            if not self.ended:
                self._item.append(self._held)
                self._end_broken("")

    def _read_start(self, buffer: str) -> str:
        body = buffer.lstrip()
        if not body or body[0] == "{":
            return self._open_call(body)
        if body[0] == "[":
            self._listed = True
            self._item.append("[")
            self._read = self._read_item
            return body[1:]
        if self._named:
            self._read = self._read_name
            return body
        return self._break(body, "it does not begin with {")

    def _read_name(self, buffer: str) -> str:
        brace = buffer.find("{", 0, _LONGEST_NAME)
        if brace < 0 and len(buffer) < _LONGEST_NAME:
            self._held = buffer
            return ""
        match = _NAME.fullmatch(buffer, 0, max(brace, 0))
        if match is None:
            return self._break(buffer, "it begins neither with [ nor with a name and {")
        self._item.append(buffer[:brace])
        return self._open_call(buffer[brace:], match[1])

    def _read_item(self, buffer: str) -> str:
        body = buffer.lstrip()
        if not body or body[0] == "{":
            if body:
                self._item.clear()
            return self._open_call(body)
        return self._break(body, "an item of its list does not begin with {")

    def _read_call(self, buffer: str) -> str:
        reader = self._reader
        assert reader is not None, "a call is read by its reader"
        end = reader.feed(buffer)
        self._item.append(buffer[:end])
        if reader.error is not None:
            return self._break(buffer[end:], reader.error)
        if reader.done:
            self.sound = self.sound and reader.shaped
            self._take_delta()
            self.calls.append(reader.call(self._next_id(), "".join(self._item), self._arguments_key))
            self._item.clear()
            self._reader = None
            self._read = self._read_after_item if self._listed else self._read_after
        return buffer[end:]

    def _read_after_item(self, buffer: str) -> str:
        body = buffer.lstrip()
        if not body:
            return ""
        if body[0] == ",":
            self._read = self._read_item
        elif body[0] == "]":
            self._read = self._read_after
        else:
            return self._break(body, "in its list there is neither a comma nor ] after a call")
        return body[1:]

    def _read_after(self, buffer: str) -> str:
        body = buffer.lstrip()
        self._beyond.append(buffer[: len(buffer) - len(body)])
        if not body:
            return ""
        if self._closing and body.startswith(self._closing):
            return self._end(body[len(self._closing) :])
        if self._closing.startswith(body):
            self._held = body
            return ""
        if self._several and not self._listed:
            if body[0] == "{":
                self._beyond.clear()
                return self._open_call(body)
            if body[0] == ";" and not self._closing and ";" not in self._beyond:
                self._beyond.append(";")
                return body[1:]
        self.sound = False
        if not self._closing:
            return self._end("".join(self._beyond) + body)
        self._read = self._read_trailing
        return body

    def _read_trailing(self, buffer: str) -> str:
        """The closing marker is missing, or what stands before it belongs to no call: what comes first tells."""
        cut = self._ends.cut(buffer)
        self._beyond.append(cut.before)
        if cut.marker is None:
            self._held = cut.rest
            return ""
        if cut.marker != self._closing:
            return self._end("".join(self._beyond) + cut.marker + cut.rest)
        last = self.calls[-1]
        beyond = "".join(self._beyond).strip()
        self.calls[-1] = malformed_call(
            last.id, last.name, last.raw + beyond, f"it goes on after its JSON: {beyond[:20]!r}", self._arguments_key
        )
        return self._end(cut.rest)

    def _read_broken(self, buffer: str) -> str:
        cut = self._ends.cut(buffer)
        self._item.append(cut.before)
        if cut.marker is None:
            self._held = cut.rest
            return ""
        return self._end_broken(cut.rest if cut.marker == self._closing else cut.marker + cut.rest)

    def _open_call(self, body: str, name: str | None = None) -> str:
        if body:
            self._reader = CallReader(name)
            self._announced = False
            self._read = self._read_call
        return body

    def _break(self, buffer: str, reason: str) -> str:
        """Go back to where the broken call began, and look for the block's end from there."""
        self._take_delta()
        self.sound = False
        self._reason = reason
        text = "".join(self._item) + buffer
        self._item.clear()
        self._read = self._read_broken
        return text

    def _end_broken(self, rest: str) -> str:
        name = None if self._reader is None else self._reader.name
        raw = "".join(self._item)
        self.calls.append(malformed_call(self._next_id(), name or "", raw, self._reason, self._arguments_key))
        return self._end(rest)

    def _end(self, rest: str) -> str:
        self.ended = True
        self.rest = rest
        return ""

    def _next_id(self) -> str:
        return call_id(self._ids.seed, self._ids.first + len(self.calls))

    def _take_delta(self) -> None:
        """What the open call has to tell since the last delta, once its name is known."""
        reader = self._reader
        if reader is None or reader.name is None:
            return
        text = reader.take_arguments()
        if text or not self._announced:
            self._announced = True
            self._deltas.append(ToolCallDelta(self._ids.index, self._next_id(), reader.name, text))
