"""Whatever python the README and the docs show runs, each block by itself, as a reader would paste it.

A block that cannot run is preceded by the line `<!-- not run: the reason -->`. A block may await at its top
level.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL_MODEL = "smollm2-135m"
IMPORT = re.compile(r"^(?:from|import) (agents|langchain|openai|pydantic_ai)\b", re.M)
"""Packages of extras that not everybody has who runs the tests."""
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```python[^\n]*\n(?P<code>.*?)^```", re.M | re.S)


class Block(NamedTuple):
    where: str
    line: int
    code: str
    reason: str


def blocks_of(text: str, where: str) -> list[Block]:
    return [
        Block(where, text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"] or "")
        for match in BLOCK.finditer(text)
    ]


def all_blocks() -> list[object]:
    found: list[object] = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in blocks_of(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()):
            marks = [pytest.mark.real_model] if REAL_MODEL in block.code else []
            named = sorted(set(IMPORT.findall(block.code)))
            absent = [name for name in named if importlib.util.find_spec(name) is None]
            if reason := block.reason or (f"not installed: {', '.join(absent)}" if absent else ""):
                marks.append(pytest.mark.skip(reason=reason))
            found.append(pytest.param(block, id=f"{block.where}:{block.line}", marks=marks))
    return found


def run(block: Block) -> dict[str, object]:
    # Line numbers of a failure are those of the document.
    source = "\n" * (block.line - 1) + block.code
    compiled = compile(source, block.where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert isinstance(compiled, CodeType)
    names: dict[str, object] = {"__name__": "__main__"}
    if compiled.co_flags & inspect.CO_COROUTINE:

        async def main() -> None:
            await eval(compiled, names)

        asyncio.run(main())
    else:
        exec(compiled, names)
    return names


@pytest.mark.parametrize("block", all_blocks())
def test_a_block_of_python_in_the_documents_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(block)


# -- the collector itself --

SAMPLE = """\
Text.

```python
a = 1
```

<!-- not run: it needs a server -->
```python
import server
```

```console
$ make test
```

```python
import asyncio

await asyncio.sleep(0)
b = 2
```
"""


def test_blocks_are_found_with_their_line_and_their_reason() -> None:
    found = blocks_of(SAMPLE, "sample.md")
    assert [(block.line, block.reason) for block in found] == [(4, ""), (9, "it needs a server"), (17, "")]


def test_each_block_runs_in_a_namespace_of_its_own_and_may_await() -> None:
    first, _, last = blocks_of(SAMPLE, "sample.md")
    assert run(first)["a"] == 1
    names = run(last)
    assert names["b"] == 2
    assert "a" not in names


def test_a_failing_block_names_the_line_of_the_document() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        run(Block("sample.md", 7, "c = 1\n1 / 0\n", ""))
    assert caught.traceback[-1].lineno == 7  # Counted from zero.
    assert str(caught.traceback[-1].path).endswith("sample.md")
