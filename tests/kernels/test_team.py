"""Threads of the compiled kernels: one team a caller, which ends with it, and which a forked child has anew."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentkv_kernels import BackendUnavailable, CpuBackend
from agentkv_kernels.cpu.linear import Linear, LinearPlan

THREADS = 3


@pytest.fixture(scope="module")
def cpu() -> CpuBackend:
    try:
        return CpuBackend()
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(cpu: CpuBackend, seed: int) -> Linear:
    return cpu.make_linears([LinearPlan((draw(seed, 200, 24),), (None,))]).linears[0]


def multiplied(linear: Linear, rows: Tensor) -> Tensor:
    return linear(rows, torch.empty(rows.shape[0], linear.out))


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def num_ours() -> int:
    """Threads of teams in this process. Others are torch's, which makes some for a forked child, too."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # It ended meanwhile.
            names.append((task / "comm").read_text().strip())
    return names.count("agentkv")


def test_callers_in_many_threads_at_once_get_what_one_gets_alone(cpu: CpuBackend) -> None:
    rows = [draw(count, count, 24) for count in (1, 50, 3, 1, 17, 2, 90)]
    expected = [[multiplied(made(cpu, seed), part) for part in rows] for seed in range(4)]
    wrong: list[str] = []

    def call(seed: int) -> None:
        linear = made(cpu, seed)
        for turn in range(20):
            torch.set_num_threads(1 + (turn + seed) % 4)  # Of the calling thread: its team grows and shrinks.
            for part, wanted in zip(rows, expected[seed], strict=True):
                if not torch.equal(multiplied(linear, part), wanted):
                    wrong.append(f"{part.shape[0]} rows in turn {turn} of caller {seed}")

    for thread in [in_thread(partial(call, seed)) for seed in range(4)]:
        thread.join()
    assert wrong == []


def forked(work: Callable[[], bool]) -> int:
    """The id of a child that works and ends. It has one thread, whatever its parent has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of forks beside threads: that is what is tested.
        child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return child


def ended_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted where /proc is")
def test_the_threads_of_a_caller_end_with_it(cpu: CpuBackend) -> None:
    during: list[int] = []

    def call() -> None:
        torch.set_num_threads(THREADS)
        multiplied(made(cpu, 1), draw(2, 5, 24))
        during.append(num_ours())

    def in_child() -> bool:
        in_thread(call).join()
        # Python calls a thread ended a little before the system does.
        return during == [THREADS - 1] and any(num_ours() == 0 for _ in range(100_000))

    assert ended_well(forked(in_child))


@pytest.mark.skipif(sys.platform != "linux", reason="a fork is safe there, and threads are counted where /proc is")
def test_a_forked_child_has_threads_of_its_own_and_its_parent_keeps_its(cpu: CpuBackend) -> None:
    linear, rows = made(cpu, 1), draw(2, 50, 24)
    expected = multiplied(linear, rows)
    of_parent = num_ours()

    def in_child() -> bool:
        equal = all(torch.equal(multiplied(linear, rows), expected) for _ in range(3))
        grandchild = forked(lambda: torch.equal(multiplied(linear, rows), expected) and num_ours() == THREADS - 1)
        return equal and num_ours() == THREADS - 1 and ended_well(grandchild)

    child = forked(in_child)
    assert torch.equal(multiplied(linear, rows), expected)
    assert ended_well(child)
    assert torch.equal(multiplied(linear, rows), expected)
    # None was added; those of callers before may have ended meanwhile.
    assert num_ours() <= of_parent


WITH_OPENMP = """
from pathlib import Path
import torch
torch.set_num_threads(3)
from agentkv_kernels import CpuBackend
from agentkv_kernels.cpu.linear import LinearPlan
cpu = CpuBackend()
weight, rows = torch.arange(4800.0).view(200, 24) / 4800, torch.arange(1200.0).view(50, 24) / 1200
tasks = lambda: [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
before = len(tasks())
out = cpu.make_linears([LinearPlan((weight,), (None,))]).linears[0](rows, torch.empty(50, 200))
print("by OpenMP" in cpu.description, len(tasks()) - before, tasks().count("agentkv"), float(out.double().sum()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted where /proc is")
def test_loops_are_run_by_the_openmp_of_torch_where_that_is_asked_for(cpu: CpuBackend) -> None:
    def told(**environment: str) -> list[str]:
        command = [sys.executable, "-c", WITH_OPENMP]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        kept["PYTHONPATH"] = os.pathsep.join(sys.path)
        done = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    # Whether it says so, threads that were added, ours among them, and the result.
    own, openmp = told(AGENTKV_OPENMP="0"), told(AGENTKV_OPENMP="1")
    assert own[:3] == ["False", "2", "2"]
    assert openmp[:3] == ["True", "2", "0"]
    alone = told(AGENTKV_OPENMP="1", OMP_THREAD_LIMIT="1")
    assert alone[:3] == ["True", "0", "0"]
    assert own[3] == openmp[3] == alone[3]


def test_without_an_openmp_in_the_process_nobody_waits_for_one(cpu: CpuBackend) -> None:
    library = str(cpu._library.path)
    ask = f"import ctypes; print(ctypes.CDLL({library!r}).akv_use_openmp(1))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "-3"
