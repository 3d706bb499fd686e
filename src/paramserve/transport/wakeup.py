"""What it costs on this machine to wake a thread that sleeps, and on which core one runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from functools import cache

ROUNDS = 9
IDLE_S = 300e-6
"""Seconds before each round: a core that has nothing to do for so long is halted."""
COST_S_MAX = 500e-6
"""What costs more was measured on a busy machine."""
_GO, _END = b"g", b"e"


def wake_s() -> float:
    """Seconds from a write until the thread that waits for it runs, on an idle machine. Measured
    once in a process, in some milliseconds.

    The lower quartile of the rounds: what else the machine does only ever adds to them.
    """
    return _measured(os.getpid())


def leave_core() -> None:
    """Let the calling thread go on at once on another core, if it may use one; where it runs later
    is the system's choice, as before. Linux only: elsewhere nothing happens.

    Source: proc_pid_stat(5), field 39.
    """
    with contextlib.suppress(OSError, AttributeError):
        allowed = os.sched_getaffinity(0)
        with open("/proc/thread-self/stat", "rb") as file:
            core = int(file.read().rpartition(b")")[2].split()[36])
        if others := allowed - {core}:
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)


@cache
def _measured(_pid: int) -> float:
    ask, answer = os.pipe(), os.pipe()
    woken_at: list[float] = []

    def sleeper() -> None:
        while os.read(ask[0], 1) == _GO:
            woken_at.append(time.monotonic())
            os.write(answer[1], _GO)

    thread = threading.Thread(target=sleeper, name="paramserve-wake")
    thread.start()
    costs: list[float] = []
    try:
        for _ in range(ROUNDS):
            time.sleep(IDLE_S)
            began = time.monotonic()
            os.write(ask[1], _GO)
            os.read(answer[0], 1)
            costs.append(woken_at[-1] - began)
    finally:
        os.write(ask[1], _END)
        thread.join()
        for fd in (*ask, *answer):
            os.close(fd)
    return min(sorted(costs)[len(costs) // 4], COST_S_MAX)
