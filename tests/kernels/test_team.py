"""Threads of the compiled kernels: one team a caller, which ends with it, and which a forked child has anew."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial

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


def num_tasks() -> int:
    return len(os.listdir("/proc/self/task"))


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
        during.append(num_tasks())

    def in_child() -> bool:
        in_thread(call).join()
        # Python calls a thread ended a little before the system does.
        return during == [1 + THREADS] and any(num_tasks() == 1 for _ in range(100_000))

    assert ended_well(forked(in_child))


@pytest.mark.skipif(sys.platform != "linux", reason="a fork is safe there, and threads are counted where /proc is")
def test_a_forked_child_has_threads_of_its_own_and_its_parent_keeps_its(cpu: CpuBackend) -> None:
    linear, rows = made(cpu, 1), draw(2, 50, 24)
    expected = multiplied(linear, rows)
    of_parent = num_tasks()

    def in_child() -> bool:
        equal = all(torch.equal(multiplied(linear, rows), expected) for _ in range(3))
        grandchild = forked(lambda: torch.equal(multiplied(linear, rows), expected) and num_tasks() == THREADS)
        return equal and num_tasks() == THREADS and ended_well(grandchild)

    child = forked(in_child)
    assert torch.equal(multiplied(linear, rows), expected)
    assert ended_well(child)
    assert torch.equal(multiplied(linear, rows), expected)
    # None was added; those of callers before may have ended meanwhile.
    assert num_tasks() <= of_parent
