"""One call of a tool, read while the model writes it: its name, its arguments, or why it is malformed."""

from __future__ import annotations

import hashlib
import json
import string
from typing import Any

from agentkv.tool_calls import ToolCall

from .json_cursor import JsonCursor, Want
from .nesting import MAX_DEPTH, nested_too_deep

__all__ = ["ARGUMENTS_KEYS", "CallReader", "call_id", "malformed_call"]

ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
"""Models mix the two up, whatever their template shows; either is read."""

_ALPHABET = string.ascii_letters + string.digits
_SHOWN = 80
_TOO_DEEP = f"its arguments are nested more than {MAX_DEPTH} deep"


def call_id(seed: int, position: int) -> str:
    """The id of the reply's call number `position`: nine letters and digits, a pure function of both.

    Nine, because templates of Mistral's models refuse any other length.
    """
    number = int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "big")
    characters = []
    for _ in range(9):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    return "".join(characters)


def malformed_call(identity: str, name: str, raw: str, reason: str, arguments_key: str) -> ToolCall:
    """A call that cannot be run. Its error is one line, for the model to read and do better."""
    shown = " ".join(raw.split())
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
    reason = " ".join(reason.split())
    error = f'malformed call: {reason}. Wanted {{"name": …, "{arguments_key}": {{…}}}}; there was {shown or "nothing"}'
    return ToolCall(identity, name, raw=raw.strip(), error=error, failure="malformed")


class CallReader:
    """Reads {"name": …, "arguments": {…}}, in any order of keys; others are passed over.

    With `name` given, the object is the arguments themselves. Costs O(1) for each character, plus one json.loads
    of the arguments at the end.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        """None until it has been read whole."""
        self.error: str | None = None
        """What was wanted and what there was, at the first place where this is no JSON."""
        self._bare_arguments = name is not None
        self._cursor = JsonCursor()
        self._num_read = 0
        self._key: str | None = None
        self._token: list[str] | None = None
        """The top-level key or value that is being read."""
        self._num_names = 0
        self._num_arguments = 0
        self._arguments: list[str] = []
        self._num_taken = 0

    @property
    def done(self) -> bool:
        return self._cursor.done

    @property
    def shaped(self) -> bool:
        """Whether it has what makes an object a call: a name, and arguments of whatever kind."""
        return self.name is not None and (self._bare_arguments or self._num_arguments > 0)

    def feed(self, text: str, start: int = 0) -> int:
        """Read on from text[start]; return where the object ended, where it broke, or the end of the text."""
        cursor = self._cursor
        while start < len(text) and not cursor.done:
            depth, want = cursor.depth, cursor.want
            end = cursor.advance(text, start)
            if cursor.error is not None:
                self.error = f"at character {self._num_read + 1}: {cursor.error}"
                break
            if self._bare_arguments:
                self._arguments.append(text[start:end])
            else:
                self._observe(depth, want, text[start:end])
            self._num_read += end - start
            start = end
        return start

    def take_arguments(self) -> str:
        """The text of the arguments, as written, since it was last taken."""
        taken = "".join(self._arguments[self._num_taken :])
        self._num_taken = len(self._arguments)
        return taken

    def call(self, identity: str, raw: str, arguments_key: str) -> ToolCall:
        """The finished call, or a malformed one. Only once `done`."""
        assert self.done, "a call is made of a whole object"
        reason, arguments = self._read_arguments()
        if reason is not None:
            return malformed_call(identity, self.name or "", raw, reason, arguments_key)
        return ToolCall(identity, self.name or "", arguments, raw.strip())

    def _observe(self, depth: int, want: Want, piece: str) -> None:
        """Follow the object's own keys and values; `depth` and `want` are those before the piece."""
        cursor = self._cursor
        if self._token is None:
            begins = depth == 1 and want in (Want.MEMBER, Want.KEY, Want.VALUE)
            if not begins or cursor.done or piece.isspace():
                return
            self._token = []
        self._token.append(piece)
        if self._key in ARGUMENTS_KEYS:
            self._arguments.append(piece)
        if cursor.depth == 1 and cursor.want is Want.COLON:
            self._key, self._token = json.loads("".join(self._token)), None
        elif cursor.depth == 1 and cursor.want is Want.MORE:
            self._end_member("".join(self._token))
            self._key = self._token = None

    def _end_member(self, text: str) -> None:
        if self._key == "name":
            self._num_names += 1
            name = json.loads(text) if text.startswith('"') else None
            if self.name is None and name and _encodes(name):
                self.name = name
        elif self._key in ARGUMENTS_KEYS:
            self._num_arguments += 1

    def _read_arguments(self) -> tuple[str | None, dict[str, Any]]:
        """Why it cannot be run, or None and its arguments."""
        if self.name is None:
            return "it has no name that is a string", {}
        if self._num_names > 1 or self._num_arguments > 1:
            return "it names its tool or its arguments twice", {}
        if not self.shaped:
            return "it has no arguments", {}
        try:
            arguments = json.loads("".join(self._arguments))
            if isinstance(arguments, str):
                # OpenAI's shape: the arguments' JSON as a string.
                arguments = json.loads(arguments, parse_constant=_refuse)
            if nested_too_deep(arguments):
                return _TOO_DEEP, {}
            # What cannot be written as JSON cannot be shown in the next prompt: 1e999, half a character.
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError as error:
            return f"its arguments cannot be read: {error}", {}
        except RecursionError:
            return _TOO_DEEP, {}
        if not isinstance(arguments, dict):
            return "its arguments are no object", {}
        if not _encodes(written):
            return "its arguments hold half a character (a lone surrogate)", {}
        return None, arguments


def _encodes(text: str) -> bool:
    """A lone \\ud800 is JSON but no text that a tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
