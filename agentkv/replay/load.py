"""Reading recorded agents: formats are told apart by what is in a file, not by what it is called."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .conversation import conversations, is_conversation, messages_of, tools_of
from .recording import Messages, Recording
from .text_calls import is_text_call, text_recordings
from .toolbench import is_tree, tree_recording

__all__ = ["load"]

_WANTED = (
    'lines of {"session_id": …, "input": …} (prompts as text), tau-bench episodes, a ToolBench tree, or lines of '
    'OpenAI messages (a list, or {"messages": …, "tools": …}), as they are or compressed by xz or gzip'
)


def load(path: str | Path, *, tools: str | Path | None = None) -> list[Recording]:
    """Every recording in a file, or in the files of a folder.

    tools: a file with the tools of conversations that bring none: a list in OpenAI's shape, or {"tools": …}. For
    tau-bench's episodes, whose tools are kept apart, a file beside them that holds the same system text is found.

    Raises ValueError that says what was wanted, OSError for what cannot be read. A session is held once, whatever the
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
    found = _recordings(path, name, tools)
    if not found:
        raise ValueError(f"{path} holds no call; wanted: {_WANTED}")
    return found


def _recordings(path: Path, name: str, tools: Messages) -> list[Recording]:
    try:
        with _opened(path) as file:
            first = next((line for line in file if line.strip()), "")
            if not first:
                raise ValueError(f"{path} is empty; wanted: {_WANTED}")
            value = _parsed(first)
            if is_text_call(value):
                return text_recordings(_lines(path, first, file, is_text_call), name)
            if is_conversation(value) and not _is_episode(value):
                return conversations(_lines(path, first, file, is_conversation), name, tools=tools)
            if value is None:
                value = _parsed(first + file.read())
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); wanted: {_WANTED}") from error
    return _document(path, value, name, tools)


def _document(path: Path, value: Any, name: str, tools: Messages) -> list[Recording]:
    """Of a file that is one JSON value."""
    if is_tree(value):
        return [tree_recording(value, name)]
    if is_conversation(value):
        value = [value]
    if isinstance(value, list) and value and all(is_text_call(each) for each in value):
        return text_recordings(value, name)
    if isinstance(value, list) and value and all(is_conversation(each) for each in value):
        if not _is_episode(value[0]):
            return conversations(value, name, tools=tools)
        # An episode ends with the customer's last word, to which nobody was asked to answer.
        return conversations(value, name, tools=tools or _tools_beside(path, value), ends_asked=False)
    raise ValueError(f"{path} is no recorded agent that is known here; wanted: {_WANTED}")


def _is_episode(value: object) -> bool:
    return isinstance(value, Mapping) and "traj" in value


def _opened(path: Path) -> io.TextIOWrapper:
    """The text of a file, unpacked if its first bytes say that it is packed."""
    raw: BinaryIO = path.open("rb")
    head = raw.read(6)
    raw.seek(0)
    if head == b"\xfd7zXZ\x00":
        return io.TextIOWrapper(_Owning(lzma.open(raw), raw), encoding="utf-8")
    if head[:2] == b"\x1f\x8b":
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
    """The JSON value, or None where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _lines(path: Path, first: str, file: Iterable[str], is_known: Any) -> Iterator[Any]:
    """Each line's value. Raises ValueError with the line's number for one of another kind."""
    yield _parsed(first)
    for number, line in enumerate(file, 2):
        if line.strip():
            value = _parsed(line)
            if not is_known(value):
                raise ValueError(f"line {number} of {path} is not of the kind of its first one; wanted: {_WANTED}")
            yield value


def _tools_in(path: Path) -> Messages:
    with _opened(path) as file:
        value = _parsed(file.read())
    tools = tuple(value) if isinstance(value, list) else tools_of(value)
    if not tools or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f'{path} holds no tools; wanted: a list of them in OpenAI\'s shape, or {{"tools": …}}')
    return tools


def _tools_beside(path: Path, episodes: list[Any]) -> Messages:
    """The tools of a file beside this one that names the episodes' system text as its own."""
    first = messages_of(episodes[0])[0]
    for beside in sorted(path.parent.glob("*tools*.json")):
        with _opened(beside) as file:
            value = _parsed(file.read())
        if isinstance(value, Mapping) and value.get("system") == first.get("content"):
            return tools_of(value)
    return ()
