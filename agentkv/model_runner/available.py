"""How much memory this process may still take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory"]


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be had without swapping: what the machine has left, or its container or this process where less.

    `root` is where proc/ and sys/ are. Reads a few small files.
    """
    limits = [_left_to_process(root), *(_left_in_group(group) for group in _groups(root))]
    return min([_left_on_machine(root), *(left for left in limits if left is not None)])


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


def _groups(root: Path) -> Iterator[Path]:
    """The control groups that bound this process, its own first, then those around it; of both versions of them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
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
