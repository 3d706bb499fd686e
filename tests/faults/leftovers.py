"""Checks that a run leaves nothing behind: no process, folder, descriptor or thread."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ENDS_WITHIN_S = 2.0
SETTLE_S = 5.0


def settle() -> None:
    """Wait until the transport's thread, which looks after TCP connections, has seen their end."""
    for thread in threading.enumerate():
        if thread.name == "paramserve-lost-hosts":
            thread.join(SETTLE_S)


def folders() -> set[str]:
    """Run directories that exist now; the folder of names is this user's, and stays."""
    found = {path.name for path in Path(tempfile.gettempdir()).glob("paramserve-*")}
    return {name for name in found if not name.startswith("paramserve-names-")}


def descriptors() -> Counter[str]:
    """What this process's descriptors are, and how many of each kind."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{name}").partition(":")[0]] += 1
    return found


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Around whole runs: soon afterwards this process is as it was."""
    fds, threads = descriptors(), set(threading.enumerate())
    yield
    until = time.monotonic() + ENDS_WITHIN_S
    while True:
        gc.collect()  # Python's mmap keeps a copy of an arena's descriptor as long as it lives
        left = folders(), set(threading.enumerate()) - threads, descriptors() - fds
        if not any(left) or time.monotonic() >= until:
            break
        time.sleep(0.01)  # a thread that has just ended its work may still hold objects
    assert not any(left), f"left behind: {left}"


@contextlib.contextmanager
def all_end(pids: list[int]) -> Iterator[None]:
    """Check that processes, anybody's children, end within the block or soon after it."""
    with contextlib.ExitStack() as stack:
        watched = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # ended already
                watched.append((pid, os.pidfd_open(pid)))
                stack.callback(os.close, watched[-1][1])
        yield
        left = [pid for pid, fd in watched if not select.select([fd], [], [], ENDS_WITHIN_S)[0]]
        assert not left, f"processes {left} still run"
