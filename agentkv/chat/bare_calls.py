"""A reply that may be nothing but the JSON of calls: nothing of it can be handed on until that is clear."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from agentkv.events import ToolCallDelta
from agentkv.tool_calls import ToolCall

from .call_block import CallBlock, CallIds

__all__ = ["BareCalls"]

_FENCE = "```"
_HEAD = re.compile(r"```[a-z_]{0,20}[ \t]{0,4}\r?")
_BEGINNING_OF_HEAD = re.compile(r"`{1,3}|```[a-z_]{0,20}[ \t]{0,4}\r?")


class BareCalls:
    """Holds a text from its first character until its end, or until it cannot be calls any more.

    It is calls if it holds nothing but objects that have each a name, one that `may_call` accepts, and arguments: one
    object, a list of them, or, with `several`, objects that follow each other; in a fence or not.
    """

    def __init__(self, ids: CallIds, *, may_call: Callable[[str], bool], arguments_key: str, several: bool) -> None:
        self.failed = False
        self._ids = ids
        self._may_call = may_call
        self._arguments_key = arguments_key
        self._several = several
        self._pieces: list[str] = []
        self._head = ""
        self._block: CallBlock | None = None
        self._deltas: dict[str, ToolCallDelta] = {}

    @property
    def raw(self) -> str:
        """All that was fed."""
        return "".join(self._pieces)

    def feed(self, text: str) -> None:
        """Read on; `failed` says whether it is text after all. The first text begins with {, [ or a backtick."""
        self._pieces.append(text)
        if self._block is None:
            text = self._open(self._head + text)
        block = self._block
        if block is None or self.failed:
            return
        if not block.ended:
            for delta in block.feed(text):
                former = self._deltas.get(delta.id)
                joined = delta.arguments_text if former is None else former.arguments_text + delta.arguments_text
                self._deltas[delta.id] = ToolCallDelta(delta.index, delta.id, delta.name, joined)
                self.failed = self.failed or not self._may_call(delta.name)
            text, block.rest = block.rest, ""
        self.failed = self.failed or not block.sound or bool(text.strip())

    def finish(self, cut: str | None = None, known: Collection[str] = ()) -> tuple[list[ToolCallDelta], list[ToolCall]]:
        """The text ended here: its calls and one delta for each; none if it is text after all.

        cut: why it ends before its end. Then what was to be a call of a tool that is known is a malformed call.
        """
        if self.failed or self._block is None:
            return [], []
        if not self._block.complete:
            if cut is None or not self._deltas or any(delta.name not in known for delta in self._deltas.values()):
                return [], []
            self._block.finish(cut)
        return list(self._deltas.values()), self._block.calls

    def _open(self, text: str) -> str:
        closing = ""
        if text.startswith("`"):
            line, newline, body = text.partition("\n")
            self.failed = (_HEAD if newline else _BEGINNING_OF_HEAD).fullmatch(line) is None
            self._head = text
            if self.failed or not newline:
                return ""
            closing, text = _FENCE, body
        self._block = CallBlock(self._ids, closing=closing, arguments_key=self._arguments_key, several=self._several)
        return text
