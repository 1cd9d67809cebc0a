"""A forked program is run, and ends, as one in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forked_programs import ProgramServer, program_server, run_fresh

PROGRAMS = {
    "its names": "import os, sys; print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), *sorted(os.environ))",
    "an exit code": "raise SystemExit(3)",
    "an exit with words, and a hook": "import atexit, sys; atexit.register(print, 'bye'); sys.exit('no')",
    "a thread that goes on": "import threading; threading.Timer(0.1, print, ['late']).start()",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "no input": "import sys; print(repr(sys.stdin.read()))",
}


@pytest.fixture(scope="module")
def programs() -> Iterator[ProgramServer]:
    with program_server(["json"], os.environ) as server:
        yield server


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_forked_program_ends_and_says_the_same(name: str, tmp_path: Path, programs: ProgramServer) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    env = {**os.environ, "ONLY_HERE": "é"}
    forked = programs.run(program, cwd=tmp_path, env=env, files=tmp_path)
    fresh = run_fresh(program, cwd=tmp_path, env=env)
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_an_uncaught_error_is_written_with_its_traceback(tmp_path: Path, programs: ProgramServer) -> None:
    program = tmp_path / "program.py"
    program.write_text("1 / 0\n")
    done = programs.run(program, cwd=tmp_path, env=os.environ, files=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_program_that_takes_too_long_is_ended_and_the_next_one_runs(tmp_path: Path, programs: ProgramServer) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; print('begun', flush=True); time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run(program, cwd=tmp_path, env=os.environ, files=tmp_path, timeout=0.5)
    program.write_text("print('next')")
    assert programs.run(program, cwd=tmp_path, env=os.environ, files=tmp_path).stdout == "next\n"
