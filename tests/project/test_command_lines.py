"""Every command line of `agentkv` that a help text, the README or a page of the docs shows is one that it takes."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from agentkv.cli.commands import app, main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BEHIND = re.compile(r"\s+#|\s*[|>]\s|\s*&&|\s*;")
"""A comment, a pipe, a file or another command: what is not the program's own any more."""
SYNOPSIS = re.compile(r"\[|\.\.\.|…")
"""Brackets, as in `agentkv demo [--full]`, are no command line to copy."""

PROSE = {"agentkv over pages"}
"""What begins like a command line and is the row of a table."""


def commands(node: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, node
    for name, child in getattr(node, "commands", {}).items():
        yield from commands(child, *path, name)


def shown_in(text: str) -> Iterator[str]:
    """Command lines at the beginning of a line, behind a prompt or a pipe, or between backquotes."""
    text = re.sub(r"\n +(?=[^\n]*`)", " ", text)
    for match in re.finditer(r"(?m)(?:^ *(?:\$ )?(?:[^`\n]*\| )?|`)(agentkv(?: [^`\n]+)?)", text):
        line = BEHIND.split(match[1])[0].strip()
        if "   " not in line and line not in PROSE:  # A row of a table that a command prints has wide gaps.
            yield line


def in_helps() -> list[str]:
    return [
        line
        for path, command in commands(get_command(app))
        if command.epilog
        for line in shown_in(command.epilog.replace("\n\n", "\n"))
    ]


def in_documents() -> list[str]:
    return [line for path in DOCUMENTS for line in shown_in(path.read_text(encoding="utf-8"))]


def parse(line: str) -> None:
    """Read by the parser, and run by nobody. Raises what the program would end with."""
    _, *words = shlex.split(line)
    node, name = get_command(app), "agentkv"
    parent = None
    while True:
        # Resilient parsing calls no callback, so --help and --version end nothing.
        eager = {"--help", "-h", "--version"} & set(words[:1])
        context = node.make_context(name, list(words), parent=parent, resilient_parsing=bool(eager))
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if eager or not hasattr(node, "commands") or not rest:
            return
        name, *words = rest
        node, parent = node.commands[name], context


HELPS, SHOWN = in_helps(), in_documents()


@pytest.mark.parametrize("line", sorted(set(HELPS)))
def test_an_example_of_a_help_text_is_a_command_line(line: str) -> None:
    parse(line)


@pytest.mark.parametrize("line", sorted({line for line in SHOWN if not SYNOPSIS.search(line)}))
def test_a_command_line_of_the_documents_is_one(line: str) -> None:
    parse(line)


def test_every_command_has_examples_and_the_documents_name_every_command() -> None:
    names = {path for path, command in commands(get_command(app)) if path}
    without = {path for path, command in commands(get_command(app)) if not command.epilog and path[:1] != ("models",)}
    assert without == set()
    for path in names - {("models", "list")}:  # It is what `agentkv models` alone does.
        assert any(line.startswith(" ".join(("agentkv", *path))) for line in SHOWN), path
    assert len(HELPS) >= 15


@pytest.mark.parametrize("command", ["demo", "chat", "replay", "doctor", "models", "models add"])
def test_a_help_text_fills_its_lines_and_gives_flags_no_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "bool" not in text.lower()
    prose = text.partition("\n\n")[2].partition("Options:")[0].partition("Arguments:")[0]
    for paragraph in prose.rstrip().split("\n\n"):
        lines = paragraph.splitlines()
        for line, following in itertools.pairwise(lines):
            assert len(line) + 1 + len(following.split()[0]) > 78, f"{line!r} ends too early"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("replay x --limit x", r"--limit.* '?x'?"),
        ("replay x --limit 0", r"--limit.* 0"),
        ("chat --temperature hot", r"--temperature.* 'hot'"),
        ("chat --max-tokens 1.5", r"--max-tokens.* '1.5'"),
        ("chat --memory foo", r"--memory.* 'foo'"),
        ("chat --dtype foo", r"--dtype='foo'"),
        ("chat --kv-dtype foo", r"--kv-dtype='foo' is not known; known are auto, int8"),
    ],
)
def test_a_wrong_value_is_told_in_one_line_with_its_option(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error)
    assert "Input should" not in error


@pytest.mark.parametrize("line", ["agentkv demos", "agentkv demo --hot", "agentkv chat a b", "agentkv models drop x"])
def test_what_is_none_is_found_out(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|unexpected|drop|demos"):
        parse(line)


@pytest.mark.parametrize("line", sorted({line for line in SHOWN if SYNOPSIS.search(line)}))
def test_a_synopsis_names_options_that_its_command_has(line: str) -> None:
    words = shlex.split(line.replace("[", " ").replace("]", " "))[1:]
    path, node = max(
        ((path, node) for path, node in commands(get_command(app)) if words[: len(path)] == list(path)),
        key=lambda each: len(each[0]),
    )
    assert path, "no command"
    known = {option for parameter in node.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"--[a-z-]+", line)) <= known | {"--help"}
