"""How the process ends, whoever ends it: real signals and real pipes, and never a traceback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.chat_models import save_chat_model
from support.ctrl_c import heed_ctrl_c

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("module", ["typer", "rich.console", "agentkv.errors", "agentkv.cli.demo"])
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


@pytest.mark.parametrize("command", ["chat", "replay", "serve"])
def test_ctrl_c_while_the_model_is_loaded_leaves_at_once(tmp_path: Path, command: str) -> None:
    """The loading never ends, and whoever waited for it would do so for an hour."""
    loading = """
import threading
import agentkv.models, agentkv.runtime.opening
from agentkv.cli import program
def never(*given, **options):
    print("loading", flush=True)
    threading.Event().wait()
agentkv.models.resolve = never
agentkv.runtime.opening.JOIN_SECONDS = 3600
program()
"""
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text('[{"role": "user", "content": "Hello."}]\n')
    words = {"chat": (), "replay": (str(recorded),), "serve": ("--port", "0")}
    with subprocess.Popen(
        [sys.executable, "-c", loading, command, *words[command]],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_ctrl_c,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "agentkv: stopped\n")


def test_little_is_imported_before_the_program_can_meet_ctrl_c() -> None:
    code = "import agentkv.cli, sys; print(*sorted(name for name in sys.modules if name.startswith('agentkv')))"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    ours = ["agentkv", *(f"agentkv.{name}" for name in ("cli", "cli.entry", "cli.streams", "public_names", "version"))]
    assert done.stdout.split() == ours


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("chat") / "tiny-chat")


@pytest.fixture
def words(folder: Path, tmp_path: Path) -> dict[str, Sequence[str]]:
    """A command line of every command that prints."""
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text('[{"role": "user", "content": "Hello."}]\n')
    return {
        "": (),
        "--version": ("--version",),
        "models": ("models",),
        "models path": ("models", "path", "mine"),
        "models --check": ("models", "--check", str(folder), "--json"),
        "doctor": ("doctor",),
        "chat": ("chat", str(folder), "--max-tokens", "4"),
        "demo": ("demo", "--model", str(folder)),
        "replay": ("replay", str(recorded), "--model", str(folder), "--max-tokens", "4"),
    }


PRINTING = ["", "--version", "models", "models --check", "doctor", "chat", "demo", "replay"]


def ended(
    words: Sequence[str], tmp_path: Path, redirected: str, said: bytes = b"hi\n", **variables: str
) -> tuple[int, str, str]:
    """How the program ends under a shell's redirections; with what it is told on stdin."""
    command = ["sh", "-c", f'"$@" {redirected}', "sh", sys.executable, "-m", "agentkv", *words]
    environment = ENVIRONMENT | {"AGENTKV_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"} | variables
    done = subprocess.run(command, env=environment, input=said, capture_output=True)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode()


@pytest.mark.parametrize("command", ["", "--version", "models", "chat", "replay"])
def test_what_cannot_be_written_ends_with_1_and_one_line(
    tmp_path: Path, words: dict[str, Sequence[str]], command: str
) -> None:
    (tmp_path / "file").touch()
    # What is opened for reading takes no byte, as a full disk takes none, and needs no full disk.
    code, _, err = ended(words[command], tmp_path, f"1<{tmp_path / 'file'}")
    assert code == 1
    assert err == "agentkv: what it prints cannot be written (Bad file descriptor)\n"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no disk that is always full here")
def test_a_full_disk_is_named(tmp_path: Path, words: dict[str, Sequence[str]]) -> None:
    code, _, err = ended(words["chat"], tmp_path, ">/dev/full")
    assert (code, err) == (1, "agentkv: what it prints cannot be written (No space left on device)\n")


@pytest.mark.parametrize("command", PRINTING)
def test_a_closed_stdout_ends_with_2_and_one_line(
    tmp_path: Path, words: dict[str, Sequence[str]], command: str
) -> None:
    code, _, err = ended(words[command], tmp_path, ">&-")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("agentkv: stdout is closed")


def test_with_all_streams_closed_it_ends_all_the_same(tmp_path: Path, words: dict[str, Sequence[str]]) -> None:
    assert ended(words["models"], tmp_path, "<&- >&- 2>&-") == (2, "", "")


@pytest.mark.parametrize("redirected", ["2>&-", "2<file"])
def test_where_nobody_can_be_told_the_answer_and_the_code_stay_the_same(
    tmp_path: Path, words: dict[str, Sequence[str]], redirected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert ended(words["models path"], tmp_path, redirected) == (2, "", "")
    code, out, _ = ended(words["chat"], tmp_path, redirected)
    assert code == 0
    assert " cached " in out


def test_a_closed_stdin_is_an_empty_one(tmp_path: Path, words: dict[str, Sequence[str]]) -> None:
    assert ended(words["chat"], tmp_path, "<&-") == (0, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_any_encoding_of_the_streams_is_written_and_read(
    tmp_path: Path, words: dict[str, Sequence[str]], encoding: str
) -> None:
    code, out, err = ended(words["chat"], tmp_path, "", b"one\n\xe9\xff\ntwo\n", PYTHONIOENCODING=encoding)
    readable = encoding == "latin-1"
    assert (code, err.count("\n")) == ((0, 0) if readable else (1, 1))
    assert err.startswith("" if readable else f"agentkv: a message that is no {encoding} text at character 1 is not")
    assert len(re.findall(r" of \d+ cached ", out)) == (3 if readable else 2)


@pytest.mark.parametrize("command", ["--version", "models", "chat"])
def test_a_pipe_that_nobody_reads_ends_every_command_with_141(
    tmp_path: Path, words: dict[str, Sequence[str]], command: str
) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = ENVIRONMENT | {"AGENTKV_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    process = [sys.executable, "-m", "agentkv", *words[command]]
    done = subprocess.run(process, env=environment, input=b"hi\n", stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
