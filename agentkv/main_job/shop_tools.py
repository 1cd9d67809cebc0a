"""Tools that read the shop's files, and the plan. Each argument is one of a few, so any model can write a call.

What they return is 50 to 300 tokens long, whatever the arguments. They read real files, and write nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Literal, get_args

from pydantic import Field

__all__ = ["PATHS", "TASKS", "WORDS", "Path", "TaskId", "Word", "outline", "plan", "read_file", "search"]

Path = Literal["rules.md", "complaints.md", "prices.py", "orders.py"]
Word = Literal["price", "item", "ten", "free", "fee"]
TaskId = Literal["rules", "complaints", "prices", "orders", "delivery"]

PATHS: tuple[Path, ...] = get_args(Path)
WORDS: tuple[Word, ...] = get_args(Word)

TASKS: dict[TaskId, str] = {
    "rules": "Find the rule that says what ten equal items cost.",
    "complaints": "Find what the customers complain about, and the amounts that they name.",
    "prices": "Find how the price of many equal items is made, and what happens with exactly ten.",
    "orders": "Find how a basket is added up.",
    "delivery": "Find who pays for delivery, and where that is decided.",
}

_AROUND = 3
"""Lines that are shown before and behind a line that was found."""
_MOST_FOUND = 2
"""Places of a file that are shown whole; the others are named by their lines."""


def plan(
    tasks: Annotated[list[TaskId], Field(min_length=4, max_length=4, json_schema_extra={"uniqueItems": True})],
) -> str:
    """Give each of four workers a task."""
    given = "; ".join(f"worker {number}: {task}" for number, task in enumerate(tasks, 1))
    return f"{given}. The workers begin."


def read_file(path: Path) -> str:
    """Read a file."""
    lines = _lines(path)
    return "\n".join([f"{path}, {len(lines)} lines:", *_numbered(lines, range(len(lines)))])


def search(word: Word, path: Path) -> str:
    """Find a word in a file, with the lines around it."""
    lines = _lines(path)
    found = [number for number, text in enumerate(lines) if word in text.lower()]
    shown: set[int] = set()
    for number in found[:_MOST_FOUND]:
        shown.update(range(max(0, number - _AROUND), min(len(lines), number + _AROUND + 1)))
    rest = [str(number + 1) for number in found if number not in shown]
    elsewhere = ", ".join(f"{_count(word, other)} of {other}" for other in PATHS if other != path)
    return "\n".join(
        [
            f"{path} has {word!r} in {len(found)} of its {len(lines)} lines:",
            *(_numbered(lines, sorted(shown)) if shown else ["nothing to show; another file may have it"]),
            *([f"and in lines {', '.join(rest)}"] if rest else []),
            f"Lines with {word!r} in other files: {elsewhere}.",
        ]
    )


def outline(path: Path) -> str:
    """Show what a file is made of."""
    lines = _lines(path)
    parts = _headings(lines) if path.endswith(".md") else _definitions("\n".join(lines))
    return "\n".join([f"{path}, {len(lines)} lines, is made of these parts:", *parts])


def _lines(path: Path) -> list[str]:
    return (files("agentkv.main_job") / "shop" / path).read_text(encoding="utf-8").splitlines()


def _count(word: Word, path: Path) -> int:
    return sum(word in text.lower() for text in _lines(path))


def _numbered(lines: list[str], numbers: range | list[int]) -> Iterator[str]:
    return (f"{number + 1}: {lines[number]}" for number in numbers)


def _headings(lines: list[str]) -> Iterator[str]:
    """Each heading with the first line of text below it."""
    for number, text in enumerate(lines):
        if text.startswith("#"):
            below = next((line for line in lines[number + 1 :] if line and not line.startswith("#")), "")
            yield f"line {number + 1}: {text.lstrip('# ')}: {below}"


def _definitions(source: str) -> Iterator[str]:
    """Each function with its parameters and the first line of its docstring, each name, each import."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            about = (ast.get_docstring(node) or "").partition("\n")[0]
            yield f"line {node.lineno}: def {node.name}({ast.unparse(node.args)}): {about}"
        elif isinstance(node, ast.Assign | ast.ImportFrom):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Expr) and node.lineno == 1:
            yield f"line 1: {ast.unparse(node)}"
