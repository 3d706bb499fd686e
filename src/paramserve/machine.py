"""What this process may use of its machine, as the system tells. Linux; elsewhere what is known."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cores() -> int:
    """CPU cores that this process may use: those it may run on, within the quota of its container.

    A quota counts in whole cores, rounded up: 1.5 cores are two threads' worth.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    quota = cpu_quota()
    return min(allowed, max(1, math.ceil(quota))) if quota is not None else allowed


def cpu_quota() -> float | None:
    """Cores' worth of time that this process's cgroups have at most; None: no limit is known.

    Source: cpu.max of cgroup v2, cpu.cfs_quota_us and cpu.cfs_period_us of v1 (Linux kernel
    documentation, admin-guide/cgroup-v2 and scheduler/sched-bwc).
    """
    limits = []
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                limits.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            us = int((folder / "cpu.cfs_quota_us").read_text())
            if us > 0:
                limits.append(us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def memory_bytes() -> int | None:
    """Memory that this process may still take: what is available, within the limit of its cgroups;
    None: not known."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(each for each in lines if each.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    for folder in _folders("memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                most = int((folder / limit).read_text())
                limits.append(max(most - int((folder / used).read_text()), 0))
    return min(limits, default=None)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared memory that it has touched included; 0: not
    known. Source: /proc/self/statm, whose second number is in pages (proc(5))."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _folders(controller: str) -> Iterator[Path]:
    """Folders of this process's limits: its cgroup and those around it, of v2 and of v1."""
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if names and controller not in names.split(","):
                continue
            root = CGROUPS / controller if names else CGROUPS
            folder = root / path.lstrip("/")
            yield folder
            for above in folder.parents:
                if not above.is_relative_to(root):
                    break
                yield above
