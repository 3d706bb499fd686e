"""A contestant's processes, by /proc: which they are, what they have mapped, how long they ran.

Linux only. A contestant leads a session of its own (`harness.run_contestant`), in which all
processes stay that it starts, whichever process has forked them.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

MB = 1e6


def session(leader: int) -> list[int]:
    """Living processes of a session: it is the 4th field after the name."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
            fields = stat.rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def server_pids(count: int = 1) -> list[int]:
    """The servers of this session, by what process lists show of them.

    Raises:
        LookupError: they are not `count`.
    """
    names = [f"paramserve server {number}" for number in range(count)]
    found = {_shown(pid): pid for pid in session(os.getsid(0))}
    missing = [name for name in names if name not in found]
    if missing:
        raise LookupError(f"no process is shown as {', '.join(missing)}: there are {found}")
    return [found[name] for name in names]


def _shown(pid: int) -> str:
    """The last of a process's arguments."""
    try:
        return Path("/proc", str(pid), "cmdline").read_text().rstrip("\0").rpartition("\0")[2]
    except OSError:
        return ""


def cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have run.

    Source: Linux, Documentation/scheduler/sched-stats.rst: schedstat's first field, in ns.
    """
    tasks = Path("/proc", str(pid), "task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def private_mb(pid: int) -> float:
    """Memory that only this process has."""
    text = Path("/proc", str(pid), "smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M)) * 1024 / MB


def arena_mb(pid: int) -> float:
    """All shared arenas that a process maps."""
    text = Path("/proc", str(pid), "maps").read_text()
    spans = re.findall(r"^(\w+)-(\w+) .*memfd:paramserve", text, re.M)
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans) / MB
