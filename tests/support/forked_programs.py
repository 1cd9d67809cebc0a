"""Programs run as `python program.py` would run them, without the seconds that their imports take each time.

A server, which is this file run as a program, imports what the programs import, runs nothing of it, and forks for each
program. It has one thread, so a fork copies all there is. The child has the program's folder, arguments, environment
and files, runs the program as `__main__`, and ends as an interpreter ends: with its exit hooks, its teardown and its
exit code. Where there is no safe fork, as on macOS, each program gets an interpreter of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["ProgramServer", "program_server", "run_fresh"]


def run_fresh(
    program: Path, *, cwd: Path, env: Mapping[str, str], timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the program in an interpreter of its own, with no input."""
    return subprocess.run(
        [sys.executable, str(program)],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


class ProgramServer:
    """The side that asks. One program at a time."""

    def __init__(self, served: subprocess.Popen[str] | None) -> None:
        self._served = served

    def run(
        self, program: Path, *, cwd: Path, env: Mapping[str, str], files: Path, timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the program; what it writes goes through two files in the folder `files`."""
        if self._served is None:
            return run_fresh(program, cwd=cwd, env=env, timeout=timeout)
        out, err = files / "stdout", files / "stderr"
        asked = {"program": str(program), "cwd": str(cwd), "env": dict(env), "out": str(out), "err": str(err)}
        assert self._served.stdin is not None
        self._served.stdin.write(json.dumps(asked) + "\n")
        self._served.stdin.flush()
        child = self._answer()
        late = threading.Event()

        def kill() -> None:
            late.set()
            os.kill(child, signal.SIGKILL)

        timer = threading.Timer(timeout, kill) if timeout is not None else None
        if timer is not None:
            timer.start()
        try:
            code = self._answer()
        finally:
            if timer is not None:
                timer.cancel()
        if timeout is not None and late.is_set():
            raise subprocess.TimeoutExpired([str(program)], timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess([str(program)], code, out.read_text("utf-8"), err.read_text("utf-8"))

    def _answer(self) -> int:
        assert self._served is not None
        assert self._served.stdout is not None
        line = self._served.stdout.readline()
        assert line, "the server of programs is gone: what it said is in this test's stderr"
        return int(line)


@contextlib.contextmanager
def program_server(modules: Sequence[str], env: Mapping[str, str]) -> Iterator[ProgramServer]:
    """A server that has imported these modules under this environment. It ends with the block."""
    if sys.platform != "linux":
        yield ProgramServer(None)
        return
    with subprocess.Popen(
        [sys.executable, __file__, *modules], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as served:
        try:
            yield ProgramServer(served)
        finally:
            assert served.stdin is not None
            served.stdin.close()


def _become(asked: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """In the child: have the files, the folder, the environment, the arguments and the path of the program."""
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, asked["err"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(asked["cwd"])
    for name in environment.keys() - asked["env"]:
        del os.environ[name]
    os.environ.update(asked["env"])  # type: ignore[arg-type]
    program = asked["program"]
    sys.argv[:] = [program]
    sys.path[0] = os.path.dirname(program)
    return program


def _serve(modules: Sequence[str]) -> str | None:
    """The program that this process, a child, is to run; None in the server, when it is asked for no more."""
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
    # What is imported stays: no child's collections need to look at it, nor so copy its pages.
    gc.collect()
    gc.freeze()
    # Not `for line in sys.stdin`: what it has read ahead the child would have, too.
    while line := sys.stdin.readline():
        asked = json.loads(line)
        child = os.fork()
        if child == 0:
            return _become(asked, dict(os.environ))
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


if __name__ == "__main__":
    asked_for = _serve(sys.argv[1:])
    if asked_for is not None:
        runpy.run_path(asked_for, run_name="__main__")
