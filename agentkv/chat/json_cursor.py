"""Strict JSON (RFC 8259) read as it is written: where a value ends, and the first place where it is none.

The standard library reads finished texts only. A cursor tells, after each piece of a text, whether the value is
complete, still open, or broken, and what was wanted at the place where it broke. It builds no values.
"""

from __future__ import annotations

import re
from enum import Enum

__all__ = ["JsonCursor", "Want"]

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*", re.ASCII)
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


class Want(Enum):
    """What may come next. The values are words for an error's text."""

    VALUE = "a value"
    ITEM = "a value or ]"
    MEMBER = "a key in double quotes or }"
    KEY = "a key in double quotes after the comma"
    COLON = "a colon after the key"
    MORE = "a comma or the end of what was opened"
    STRING = "the end of the string, or a character that may stand in one"
    ESCAPE = "an escape that JSON knows"
    HEX = "four hexadecimal digits"
    SCALAR = "a number, true, false or null"


class JsonCursor:
    """Reads one value; `done` after its last character, `error` at the first that cannot be.

    A number at the top level never ends by itself; calls are objects, so none is read here.
    """

    __slots__ = ("_hex_digits", "_in_key", "_stack", "_word", "done", "error", "want")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._word: list[str] = []
        self._in_key = False
        self._hex_digits = 0
        self.want = Want.VALUE
        self.done = False
        self.error: str | None = None

    @property
    def depth(self) -> int:
        """Objects and lists that are open."""
        return len(self._stack)

    def advance(self, text: str, start: int) -> int:
        """Read one character, or one run of characters of a kind, and return where to go on.

        Where it returns `start`, either a number or word ended before `text[start]`, or `error` is set.
        """
        if self.want is Want.STRING:
            return self._advance_string(text, start)
        if self.want is Want.ESCAPE or self.want is Want.HEX:
            return self._advance_escape(text, start)
        if self.want is Want.SCALAR:
            return self._advance_word(text, start)
        end = _match_end(_SPACE, text, start)
        return end if end > start else self._advance_structure(text, start)

    def _advance_structure(self, text: str, start: int) -> int:
        char = text[start]
        want = self.want
        if want in (Want.VALUE, Want.ITEM) and char in '{["' + "-0123456789tfn":
            return self._open_value(text, start)
        if want in (Want.MEMBER, Want.KEY) and char == '"':
            self.want, self._in_key = Want.STRING, True
        elif want is Want.COLON and char == ":":
            self.want = Want.VALUE
        elif want is Want.MORE and char == ",":
            self.want = Want.KEY if self._stack[-1] == "{" else Want.VALUE
        elif (want in (Want.MORE, Want.MEMBER) and char == "}" and self._stack[-1] == "{") or (
            want in (Want.MORE, Want.ITEM) and char == "]" and self._stack[-1] == "["
        ):
            self._stack.pop()
            self._end_value()
        else:
            return self._fail(char, start)
        return start + 1

    def _open_value(self, text: str, start: int) -> int:
        char = text[start]
        if char == "{" or char == "[":
            self._stack.append(char)
            self.want = Want.MEMBER if char == "{" else Want.ITEM
        elif char == '"':
            self.want, self._in_key = Want.STRING, False
        else:
            self.want = Want.SCALAR
            return self._advance_word(text, start)
        return start + 1

    def _end_value(self) -> None:
        self.want = Want.MORE
        self.done = not self._stack

    def _advance_string(self, text: str, start: int) -> int:
        end = _match_end(_PLAIN, text, start)
        if end > start:
            return end
        char = text[start]
        if char == "\\":
            self.want = Want.ESCAPE
        elif char != '"':
            return self._fail(char, start)
        elif self._in_key:
            self.want = Want.COLON
        else:
            self._end_value()
        return start + 1

    def _advance_escape(self, text: str, start: int) -> int:
        char = text[start]
        if self.want is Want.HEX and char in "0123456789abcdefABCDEF":
            self._hex_digits -= 1
            self.want = Want.HEX if self._hex_digits else Want.STRING
        elif self.want is Want.ESCAPE and char == "u":
            self.want, self._hex_digits = Want.HEX, 4
        elif self.want is Want.ESCAPE and char in '"\\/bfnrt':
            self.want = Want.STRING
        else:
            return self._fail(char, start)
        return start + 1

    def _advance_word(self, text: str, start: int) -> int:
        end = _match_end(_WORD, text, start)
        if end > start:
            self._word.append(text[start:end])
            return end
        word = "".join(self._word)
        self._word.clear()
        if _SCALAR.fullmatch(word) is None:
            return self._fail(word, start)
        self._end_value()
        return start

    def _fail(self, found: str, start: int) -> int:
        shown = found if len(found) <= 20 else found[:19] + "…"
        self.error = f"wanted {self.want.value}, there was {shown!r}"
        return start


def _match_end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Where the run of `pattern`, which may be empty, ends."""
    match = pattern.match(text, start)
    assert match is not None, "a pattern of runs matches the empty run"
    return match.end()
