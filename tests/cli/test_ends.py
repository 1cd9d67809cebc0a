"""How the process ends, whoever ends it: real signals and real pipes, and never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.chat_models import save_chat_model
from support.ctrl_c import heed_ctrl_c

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("module", ["typer", "rich.console", "agentkv.cli.demo"])
def test_ctrl_c_while_the_program_is_imported_ends_with_130_and_one_line(tmp_path: Path, module: str) -> None:
    interrupted = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *rest):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
wanted = sys.argv.pop()
sys.meta_path.insert(0, Interrupting())
from agentkv.cli import program
program()
"""
    command = [sys.executable, "-c", interrupted, "models", module]
    environment = ENVIRONMENT | {"AGENTKV_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=heed_ctrl_c)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "agentkv: stopped\n")


def test_a_pipe_that_is_closed_ends_the_program_quietly_also_where_a_task_prints() -> None:
    prints = """
import asyncio
from agentkv.cli.console import console
async def main():
    async def endless():
        while True:
            out.print("line")
            await asyncio.sleep(0)
    await asyncio.gather(endless(), endless())
out = console()
asyncio.run(main())
"""
    assert first_line_of([sys.executable, "-c", prints], ENVIRONMENT) == ("line\n", 141, "")


def test_the_demo_ends_quietly_when_nobody_reads_on(tmp_path: Path) -> None:
    folder = save_chat_model(tmp_path / "tiny-chat")
    command = [sys.executable, "-m", "agentkv", "demo", "--model", str(folder)]
    line, code, err = first_line_of(command, ENVIRONMENT | {"AGENTKV_CACHE": str(tmp_path)})
    assert line.startswith("tiny-chat in fp32")
    assert (code, err) == (141, "")


def first_line_of(command: list[str], environment: dict[str, str]) -> tuple[str, int, str]:
    """What a program prints first, and how it ends when the pipe is closed after that: exit code and stderr."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        err = process.stderr.read()
        return line, process.wait(), err
