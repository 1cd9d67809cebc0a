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

Path = Literal["prices.py", "orders.py", "receipts.py", "README.md", "complaints.md"]
Word = Literal["price", "total", "item", "ten", "free", "basket"]
TaskId = Literal["rules", "complaints", "prices", "orders", "receipts", "delivery"]

PATHS: tuple[Path, ...] = get_args(Path)
WORDS: tuple[Word, ...] = get_args(Word)

TASKS: dict[TaskId, str] = {
    "rules": "Find out what the rules of the shop say a customer pays, and name the line that says it.",
    "complaints": "Find out what the customers complain about, and which amounts they name.",
    "prices": "Find out how the price of many equal items is made, and what happens with exactly ten.",
    "orders": "Find out how a basket is added up, and whether that could be where the fault is.",
    "receipts": "Find out what a receipt shows, and whether that could be where the fault is.",
    "delivery": "Find out when a customer pays for delivery, and where that is decided.",
}

_AROUND = 3
"""Lines that are shown before and behind a line that was found."""
_MOST_FOUND = 2
"""Places of a file that are shown whole; the others are named by their lines."""


def plan(
    tasks: Annotated[list[TaskId], Field(min_length=4, max_length=4, json_schema_extra={"uniqueItems": True})],
) -> str:
    """Hand four different tasks out to four workers, who work on them at the same time.

    Args:
        tasks: which tasks, by their names
    """
    given = "\n".join(f"worker {number}: {task}. {TASKS[task]}" for number, task in enumerate(tasks, 1))
    return f"The plan stands, and each worker is told its task.\n{given}"


def read_file(path: Path) -> str:
    """Read a whole file of the shop, with the numbers of its lines.

    Args:
        path: which file
    """
    lines = _lines(path)
    return "\n".join([f"{path}, {len(lines)} lines:", *_numbered(lines, range(len(lines)))])


def search(word: Word, path: Path) -> str:
    """Find a word in one file of the shop, with the lines around it, and count it in all the others.

    Args:
        word: what to look for
        path: the file to look in
    """
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
            *_numbered(lines, sorted(shown)),
            *([f"and in lines {', '.join(rest)}"] if rest else []),
            f"Lines with {word!r} in other files: {elsewhere}.",
        ]
    )


def outline(path: Path) -> str:
    """Show what a file of the shop is made of, part by part: headings, names and functions, with their first lines.

    Args:
        path: which file
    """
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
