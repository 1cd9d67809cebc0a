"""Pool and threads are sized by what this process may take, which in a container is less than the machine has."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from agentkv.model_runner import set_threads, threads
from agentkv.model_runner.available import available_cores, available_memory

MACHINE = 64 * 2**30
V2 = ("0::/box\n", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")
V1 = (
    "4:memory:/box\n0::/\n",
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {MACHINE // 1024} kB\n")
    return tmp_path


def bound(machine: Path, version: tuple[str, ...], group: str, most: object, used: int, dropped: int) -> None:
    lines, top, limit, current, droppable = version
    write(machine / "proc/self/cgroup", lines)
    folder = machine / top / group
    write(folder / limit, f"{most}\n")
    write(folder / current, f"{used}\n")
    write(folder / "memory.stat", f"anon 5\n{droppable} {dropped}\n")


def test_without_groups_it_is_what_the_machine_has_left(machine: Path) -> None:
    assert available_memory(machine) == MACHINE


@pytest.mark.parametrize("version", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize("group", ["box", "."], ids=["its own group", "the one around it"])
def test_a_groups_limit_counts_where_it_is_lower_and_its_file_cache_is_free(
    machine: Path, version: tuple[str, ...], group: str
) -> None:
    bound(machine, version, group, most=2**30, used=700, dropped=300)
    assert available_memory(machine) == 2**30 - 400


@pytest.mark.parametrize("most", ["max", MACHINE * 2])
def test_a_group_without_a_limit_or_with_a_high_one_changes_nothing(machine: Path, most: object) -> None:
    bound(machine, V2, "box", most=most, used=700, dropped=0)
    assert available_memory(machine) == MACHINE


def test_a_group_that_is_full_leaves_nothing(machine: Path) -> None:
    bound(machine, V2, "box", most=1000, used=1500, dropped=0)
    assert available_memory(machine) == 0


def test_a_limit_of_the_process_bounds_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    write(machine / "proc/self/statm", "1000 10 10 1 0 10 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5000 * page, resource.RLIM_INFINITY))
    assert available_memory(machine) == 4000 * page
    monkeypatch.setattr(resource, "getrlimit", lambda _: (500 * page, resource.RLIM_INFINITY))
    assert available_memory(machine) == 0
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert available_memory(machine) == MACHINE


HERE = float(len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("group", ["box", "."], ids=["its own group", "the one around it"])
@pytest.mark.parametrize(
    ("quota", "cores"),
    [(50_000, 0.5), (150_000 if HERE > 1 else 75_000, 1.5 if HERE > 1 else 0.75), (10**9, HERE), (None, HERE)],
)
def test_cores_are_those_here_or_what_a_containers_quota_gives(
    machine: Path, quota: int | None, cores: float, group: str
) -> None:
    write(machine / "proc/self/cgroup", "0::/box\n")
    write(machine / "sys/fs/cgroup" / group / "cpu.max", f"{'max' if quota is None else quota} 100000\n")
    assert available_cores(machine) == cores


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
@pytest.mark.parametrize(("quota", "cores"), [(50_000, 0.5), (-1, HERE)])
def test_cores_by_the_older_control_groups(machine: Path, quota: int, cores: float, folder: str) -> None:
    write(machine / "proc/self/cgroup", "7:cpu,cpuacct:/box\n5:cpuset:/box\n")
    write(machine / f"sys/fs/cgroup/{folder}/box/cpu.cfs_quota_us", f"{quota}\n")
    write(machine / f"sys/fs/cgroup/{folder}/box/cpu.cfs_period_us", "100000\n")
    assert available_cores(machine) == cores


@pytest.mark.parametrize("text", ["", "max", "0 0", "x 100000", "5"])
def test_a_quota_that_cannot_be_read_bounds_nothing(machine: Path, text: str) -> None:
    write(machine / "proc/self/cgroup", "0::/box\n")
    write(machine / "sys/fs/cgroup/box/cpu.max", text)
    assert available_cores(machine) == HERE


@pytest.mark.parametrize(
    ("wanted", "quota", "environment", "then"),
    [
        (None, 1.5, {}, 2),
        (None, 0.2, {}, 1),
        (None, 9.0, {}, 3),
        (None, 1.5, {"OMP_NUM_THREADS": "3"}, 3),
        (None, 1.5, {"MKL_NUM_THREADS": "3"}, 3),
        (4, 1.5, {}, 4),
    ],
)
def test_threads_are_bounded_by_the_quota_unless_someone_said_how_many(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, quota: float, environment: dict[str, str], then: int
) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "available_cores", lambda: quota)
    try:
        torch.set_num_threads(3)
        set_threads(wanted)
        assert torch.get_num_threads() == then
    finally:
        torch.set_num_threads(before)
