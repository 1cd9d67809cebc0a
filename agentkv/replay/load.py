"""Reading recorded agents: formats are told apart by what is in a file, not by what it is called."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from agentkv.tools import as_tools

from .conversation import conversations, is_conversation, messages_of, tools_of
from .faults import no_json, unlike
from .recording import Messages, Recording
from .text_calls import is_text_call, text_recordings
from .toolbench import is_tree, tree_recording

__all__ = ["load"]

_WANTED = (
    "lines of OpenAI messages, prompts as text, tau-bench episodes or a ToolBench tree, plain, .xz or .gz "
    "(docs/commands.md)"
)

_LONGEST = 2**28
"""Characters of one value: a line, or a file that is one value. What is longer has no end, or is no recording."""
_MOST = 2**30
"""Characters of one file, which is held whole while it is read."""
_OF_A_LINE = 256
"""Characters that a line counts at least: so much is held for each, however short it is."""


def load(path: str | Path, *, tools: str | Path | None = None) -> list[Recording]:
    """Every recording in a file, or in the files of a folder.

    tools: a file with the tools of conversations that bring none: a list in OpenAI's shape, or {"tools": …}. For
    tau-bench's episodes, whose tools are kept apart, a file beside them that holds the same system text is found.

    Raises ValueError that says what was wanted, OSError for what cannot be read. A file may be a pipe, and one without
    end is refused, too: it has 2**30 characters at most, and a line of it 2**28. A session is held once, whatever the
    number of its calls (see Recording); one file is held whole while it is read.
    """
    path = Path(path)
    given = _tools_in(Path(tools)) if tools is not None else ()
    if not path.is_dir():
        return _load_file(path, given)
    files = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
    found = [recording for file in files for recording in _load_file(file, given)]
    if not found:
        raise ValueError(f"{path} is a folder without a file; wanted: {_WANTED}")
    return found


def _load_file(path: Path, tools: Messages) -> list[Recording]:
    name = path.name.split(".")[0]
    with _reading(path) as file:
        numbered = _numbered(path, file)
        number, first = next(numbered, (0, ""))
        if not first:
            raise ValueError(f"{path} is empty; wanted: {_WANTED}")
        value = _parsed(first)
        if value is None:  # Not a value a line, but one that goes over lines.
            whole = first + _rest(path, file)
            value, numbered = _parsed(whole), iter(())
            if value is None:
                lines, why = no_json(whole)
                raise ValueError(_unknown(path, f"line {number + lines - 1} is {why}"))
        found = _recordings(path, name, tools, value, numbered)
    if not found:
        raise ValueError(f"{path} holds no call; wanted: {_WANTED}")
    for recording in found:
        _check_tools(path, recording.tools)
    return found


def _numbered(path: Path, file: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    """The lines that are not blank. Raises ValueError for more of them than can be held, or for one without end."""
    held, numbers = 0, count(1)
    while line := file.readline(_LONGEST + 1):
        number = next(numbers)
        held += max(len(line), _OF_A_LINE)
        if len(line) > _LONGEST:
            raise ValueError(f"line {number} of {path} is longer than {_LONGEST:,} characters; wanted: {_WANTED}")
        if held > _MOST:
            raise ValueError(
                f"{path} goes on after line {number}, and with it {_MOST:,} characters are held: make several files of "
                f"it, which may stand in one folder"
            )
        if line.strip():
            yield number, line


def _rest(path: Path, file: io.TextIOWrapper) -> str:
    """All that is left of a file that is one value."""
    text = file.read(_LONGEST + 1)
    if len(text) > _LONGEST:
        raise ValueError(f"{path} is one value of more than {_LONGEST:,} characters; wanted: {_WANTED}")
    return text


def _recordings(
    path: Path, name: str, tools: Messages, first: Any, numbered: Iterator[tuple[int, str]]
) -> list[Recording]:
    """Of a file's first value, and of the lines behind it, which are of the same kind."""
    kind = _kind(first)
    if kind is None:
        raise ValueError(_unknown(path, f"it begins with {unlike(first)}"))
    lines = _alike(path, first, kind, numbered)
    values = chain.from_iterable(lines) if kind.listed else lines
    if kind.word == "call":
        return text_recordings(values, name)
    if kind.word == "conversation":
        return conversations(values, name, tools=tools)
    whole = list(values)
    if kind.word == "episode":
        # An episode ends with the customer's last word, to which nobody was asked to answer.
        return conversations(whole, name, tools=tools or _tools_beside(path, whole), ends_asked=False)
    names = [name] if len(whole) == 1 else [f"{name}-{number}" for number in range(1, len(whole) + 1)]
    try:
        return [tree_recording(tree, each) for tree, each in zip(whole, names, strict=True)]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds a search tree that cannot be read ({error!r}); wanted: {_WANTED}") from error


def _unknown(path: Path, why: str) -> str:
    return f"{path} is no recorded agent that is known here: {why}; wanted: {_WANTED}"


class _Kind(NamedTuple):
    """What a value of a file is."""

    word: Literal["call", "episode", "conversation", "tree"]
    listed: bool
    """It is a list of such."""

    def named(self) -> str:
        """As an error names it."""
        return f"a list of {self.word}s" if self.listed else f"a {self.word}".replace("a e", "an e")


def _kind(value: object) -> _Kind | None:
    """None for what is not known here."""
    if (word := _word(value)) is not None:
        return _Kind(word, listed=False)
    words = {_word(each) for each in value} if isinstance(value, list) else set()
    word = words.pop() if len(words) == 1 else None
    return _Kind(word, listed=True) if word is not None else None


def _word(value: object) -> Literal["call", "episode", "conversation", "tree"] | None:
    if is_text_call(value):
        return "call"
    if is_conversation(value):
        return "episode" if isinstance(value, Mapping) and "traj" in value else "conversation"
    return "tree" if is_tree(value) else None


def _alike(path: Path, first: Any, kind: _Kind, numbered: Iterator[tuple[int, str]]) -> Iterator[Any]:
    """Each line's value. Raises ValueError with the line's number for one of another kind."""
    yield first
    for number, line in numbered:
        value = _parsed(line)
        if (own := _kind(value)) != kind:
            what = own.named() if own else unlike(value) if value is not None else no_json(line)[1]
            raise ValueError(
                f"line {number} of {path} is not of the kind of its first one: that is {kind.named()}, and this "
                f"{what}; wanted: {_WANTED}"
            )
        yield value


def _check_tools(path: Path, tools: Messages) -> None:
    """Tools that no call could bring are told before a model is loaded."""
    try:
        as_tools(tools)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} comes with tools that are none: {error}") from error


@contextmanager
def _reading(path: Path) -> Iterator[io.TextIOWrapper]:
    """The text of a file. Raises ValueError where it is no text, or packed and damaged."""
    try:
        with _opened(path) as file:
            yield file
    except (lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); wanted: {_WANTED}") from error


def _opened(path: Path) -> io.TextIOWrapper:
    """The text of a file, unpacked if its first bytes say that it is packed."""
    raw = path.open("rb")
    head = raw.peek(6)  # and not read: a pipe cannot be wound back
    if head.startswith(b"\xfd7zXZ\x00"):
        return io.TextIOWrapper(_Owning(lzma.open(raw), raw), encoding="utf-8")
    if head.startswith(b"\x1f\x8b"):
        return io.TextIOWrapper(_Owning(gzip.open(raw), raw), encoding="utf-8")
    return io.TextIOWrapper(raw, encoding="utf-8")


class _Owning(io.BufferedReader):
    """An unpacked file that closes the packed one, too, which the libraries leave open when they were handed it."""

    def __init__(self, unpacked: Any, packed: BinaryIO) -> None:
        super().__init__(unpacked)
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


def _parsed(text: str) -> Any:
    """The JSON value, or None where it is none, or is nested deeper than can be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _tools_in(path: Path) -> Messages:
    with _reading(path) as file:
        value = _parsed(_rest(path, file))
    tools = tuple(value) if isinstance(value, list) else tools_of(value)
    if not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f'{path} holds no tools; wanted: a list of them in OpenAI\'s shape, or {{"tools": …}}')
    _check_tools(path, tools)
    return tools


def _tools_beside(path: Path, episodes: list[Any]) -> Messages:
    """The tools of a file beside this one that names the episodes' system text as its own."""
    first = messages_of(episodes[0])[0]
    for beside in sorted(path.parent.glob("*tools*.json")):
        if not beside.is_file():  # A folder is none, and a pipe of this name would be waited for.
            continue
        with _reading(beside) as file:
            value = _parsed(_rest(beside, file))
        if isinstance(value, Mapping) and value.get("system") == first.get("content"):
            return tools_of(value)
    return ()
