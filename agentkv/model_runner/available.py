"""How much memory this process may still take, and how many cores it may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["available_cores", "available_memory", "tells_of_short_memory"]


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: what the machine has left, or its container or this process where less.

    `root` is where proc/ and sys/ are. Reads a few small files.
    """
    limits = [_left_to_process(root), *(_left_in_group(group) for group in _groups(root, "memory"))]
    return min([_left_on_machine(root), *(left for left in limits if left is not None)])


def tells_of_short_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had; torch has a class for that on devices, and words on CPUs."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def available_cores(root: Path = Path("/")) -> float:
    """Cores that this process may keep busy: those it may run on, or the share of time that its container has.

    Of a quota of 150 ms in every 100 ms it is 1.5. Threads beyond that only wait, all at once, for the next period.
    """
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota_of_group(group) for group in _groups(root, "cpu")]
    return min([float(here), *(quota for quota in quotas if quota is not None)])


def _left_to_process(root: Path) -> int | None:
    """Bytes below this process's own limit of addresses (`ulimit -v`); None: no limit."""
    try:
        import resource  # Not everywhere there is one.

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        if most == resource.RLIM_INFINITY:
            return None
        taken = int((root / "proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError, ValueError):
        return None
    return max(0, most - taken * os.sysconf("SC_PAGE_SIZE"))


def _left_on_machine(root: Path) -> int:
    """What Linux estimates, or half of what there is where nothing estimates it."""
    try:
        for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The control groups that bound this process, its own first, then those around it; of both versions of them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            if not top.is_dir():  # Some systems name the same controllers in another order.
                top = root / "sys/fs/cgroup" / controller
            own = top / path.lstrip("/")
            # In a container the path may be the host's, and what bounds the container stands at the top.
            yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _left_in_group(group: Path) -> int | None:
    """Bytes below the group's limit, what it could drop of its file cache counted as free; None: no limit."""
    for limit, used, dropped in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (group / limit).read_text(encoding="ascii").strip()
            if not most.isdecimal():
                return None
            stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
            taken = int((group / used).read_text(encoding="ascii")) - int(stat.get(dropped, 0))
            return max(0, int(most) - taken)
        except (OSError, ValueError):
            continue
    return None


def _quota_of_group(group: Path) -> float | None:
    """Cores' worth of time that the group may use in each of its periods; None: no limit."""
    try:
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        except OSError:
            return None
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
