"""Rules for the tests themselves."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
FILES = sorted(TESTS.rglob("*.py"))


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def gives_a_reason(call: ast.Call) -> bool:
    called = ast.unparse(call.func)
    if called in {"pytest.skip", "pytest.xfail"}:
        return bool(call.args) or any(keyword.arg in {"reason", "msg"} for keyword in call.keywords)
    if called.startswith("pytest.mark.") and called.rsplit(".", 1)[1] in {"skip", "skipif", "xfail"}:
        return any(keyword.arg == "reason" for keyword in call.keywords)
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_whatever_is_skipped_says_why(path: Path) -> None:
    assert [call.lineno for call in calls(path) if not gives_a_reason(call)] == []
    bare = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for mark in node.decorator_list
        if ast.unparse(mark) in {"pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"}
    ]
    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_waits_for_luck(path: Path) -> None:
    naps = []
    for call in calls(path):
        called = ast.unparse(call.func)
        yields = bool(call.args) and ast.unparse(call.args[0]) == "0"  # sleep(0) lets other tasks run, and ends.
        if called in {"time.sleep", "sleep", "asyncio.sleep"} and not yields:
            naps.append(call.lineno)
    assert naps == []
