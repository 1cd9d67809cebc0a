"""How benchmarks are asked and end, and what the agentic one tells while it runs."""

from __future__ import annotations

import argparse
import asyncio
import errno
import importlib
import io
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from agentkv.cli import entry, streams
from agentkv.errors import ModelNotFound
from agentkv_kernels import BackendUnavailable

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.setattr(sys, "argv", ["benchmarks/engine.py"])
    monkeypatch.delitem(sys.modules, "command", raising=False)
    return importlib.import_module("command")


@pytest.fixture
def agentic(command: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # The module would set it, for all tests behind this one.
    for name in ("agentic", "machine", "peers", "workload"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("agentic")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModelNotFound("no model 'nope'"), "no model 'nope'"),
        (BackendUnavailable("no compiled kernels"), "no compiled kernels"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/data/a.xz"), "/data/a.xz: No such file"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_code_2(
    error: Exception,
    told: str,
    command: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "mend_streams", lambda: None)

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        command.as_program(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"engine.py: {told}\n"


def test_a_fault_of_the_benchmark_itself_keeps_its_traceback(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "mend_streams", lambda: None)
    with pytest.raises(ZeroDivisionError):
        command.as_program(lambda: 1 // 0)


def test_ctrl_c_is_one_line_and_code_130(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "mend_streams", lambda: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    left: list[int] = []
    monkeypatch.setattr(entry, "leave_at_once", left.append)

    def main() -> None:
        raise KeyboardInterrupt

    command.as_program(main)
    assert (left, capsys.readouterr().err) == ([130], "engine.py: stopped\n")


def test_numbers_below_one_and_files_that_cannot_be_written_are_refused_before_anything_runs(
    command: ModuleType, tmp_path: Path
) -> None:
    for text in ("0", "-1", "two", "1.5", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="at least 1"):
            command.at_least_one(text)
    assert command.at_least_one("12") == 12
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: No such file"):
        command.writable(str(tmp_path / "none" / "a.json"))
    assert command.writable(str(tmp_path / "a.json")) == tmp_path / "a.json"
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_is_told_what_is_measured_and_its_line_is_gone_when_a_row_is_there(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    shown: list[str] = []

    def rows() -> Iterator[int]:
        for row in range(2):
            shown.append(sys.stderr.getvalue())  # type: ignore[attr-defined]
            yield row

    for _ in command.watched(rows(), "decode"):
        assert sys.stderr.getvalue().endswith("\r\x1b[2K")  # type: ignore[attr-defined]
    assert [each.rpartition("\x1b[2K")[2] for each in shown] == [
        "measuring decode, 0 rows done",
        "measuring decode, 1 rows done",
    ]


def test_the_agentic_benchmark_tells_and_writes_each_row_before_the_next_system_begins(
    agentic: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told, file = io.StringIO(), tmp_path / "rows.json"
    seen: list[tuple[list[str], int]] = []

    def row(system: str, seconds: float, answer: int, **more: Any) -> Any:
        return agentic.Row(system, seconds, 1000, 500, outputs=[[[answer]]], **more)

    async def run_all(*_: Any) -> AsyncIterator[Any]:
        yield row("agentkv", 20.0, 1, positions_run=500, cached_tokens=900)
        seen.append((told.getvalue().splitlines(), len(json.loads(file.read_text()))))
        yield row("transformers", 50.0, 2)

    monkeypatch.setattr(agentic, "run_all", run_all)
    progress = Progress(console=Console(file=told))
    rows = asyncio.run(agentic.told_rows(None, None, argparse.Namespace(json=file), progress))
    assert seen == [(["agentkv: 20.0 s (1.00x), hit rate 0.900, 500 positions run"], 1)]
    assert told.getvalue().splitlines()[1:] == ["transformers: 50.0 s (2.50x), some answers differ from agentkv's"]
    assert [each["system"] for each in json.loads(file.read_text())] == [each.system for each in rows]


def test_a_server_that_is_not_there_is_heard_of_before_any_system_runs(
    agentic: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(url: str) -> None:
        raise SystemExit(f"{url}: nobody answers")

    monkeypatch.setattr(sys, "argv", ["agentic.py", "--url", "http://server"])
    monkeypatch.setattr(agentic, "ask_who_serves", ask)
    monkeypatch.setattr(agentic, "told_rows", lambda *_: pytest.fail("systems were run"))
    with pytest.raises(SystemExit, match="http://server: nobody answers"):
        agentic.main()
