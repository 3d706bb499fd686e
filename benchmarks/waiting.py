"""Waits that never poll, that poll when it pays, and that always poll: the same steps under each.

What a process measures of its wake-ups decides how long it polls. A process that always polls is
one that finds them as long as the longest wait: a module that Python imports as it starts says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import numpy as np

import paramserve as ps
from benchmarks.ours import InPlace
from benchmarks.processes import cpu_s, server_pids
from benchmarks.workloads import timed

LONGEST_S = 10e-3
"""Longest of the waits here; `Waiting` has none above."""
ALWAYS = f"""\
from paramserve.transport import timing
timing.SystemTiming.wake_s = staticmethod(lambda: {LONGEST_S})
"""


@dataclass(frozen=True)
class Waiting:
    """One worker and one server, 8 KB of float32, one `push_pull` at a time.

    Attributes:
        sleeps_s: between two calls; 0.0: a tight loop.
        computes_s: between two calls, in the row where a worker computes.
    """

    bytes: int = 8_192
    calls: int = 2_000
    slow_calls: int = 500
    sleeps_s: tuple[float, ...] = (0.0, 200e-6, 2e-3)
    computes_s: float = 2e-3

    @property
    def gaps(self) -> dict[str, tuple[float, float]]:
        """Seconds of computing and of sleep between two calls, by name."""
        names = {_name(sleep_s): (0.0, sleep_s) for sleep_s in self.sleeps_s}
        return names | {f"{_time(self.computes_s)} of computing": (self.computes_s, 0.0)}


def _name(sleep_s: float) -> str:
    return f"{_time(sleep_s)} of sleep" if sleep_s else "tight loop"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:g} us"


def off(load: Waiting, scratch: Path) -> dict[str, float]:
    """Every wait sleeps at once."""
    return _run(load, ps.Limits(poll_s_max=0.0))


def adaptive(load: Waiting, scratch: Path) -> dict[str, float]:
    """Measure paramserve with its defaults."""
    return _run(load, ps.Limits())


def always(load: Waiting, scratch: Path) -> dict[str, float]:
    """Every wait of these steps polls to its end."""
    (scratch / "sitecustomize.py").write_text(ALWAYS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(scratch), os.environ.get("PYTHONPATH", "")])
    return _run(load, ps.Limits(poll_s_max=LONGEST_S))


def _run(load: Waiting, limits: ps.Limits) -> dict[str, float]:
    engine = ps.Local(limits=limits)
    result = ps.run(_worker, args=(load,), consistency=ps.Async(), engine=engine)
    figures: dict[str, float] = result.returns[0]
    return figures


def _worker(worker: ps.Worker, load: Waiting) -> dict[str, float]:
    """Seconds of a call, and of processor time of both sides for it: of the worker within its calls
    only, of the server in all."""
    worker.client.define("w", np.zeros(load.bytes // 4, np.float32), rule=ps.Add())
    call = InPlace(worker.client, "w")
    (server,) = server_pids()
    figures: dict[str, float] = {}
    for name, (work_s, sleep_s) in load.gaps.items():
        count = load.slow_calls if max(work_s, sleep_s) > 1e-3 else load.calls
        clocked = Clocked(call)

        def step(
            clocked: Clocked = clocked, work_s: float = work_s, sleep_s: float = sleep_s
        ) -> float:
            return timed(clocked, work_s, call.fill, sleep_s)

        for _ in range(count // 10 + 1):
            step()
        clocked.ran_s = 0.0
        before_s = cpu_s(server)
        times = [step() for _ in range(count)]
        figures |= {
            f"{name}: median": median(times),
            f"{name}: p90": quantiles(times, n=10)[-1],
            f"{name}: client": clocked.ran_s / count,
            f"{name}: server": (cpu_s(server) - before_s) / count,
        }
    return figures


class Clocked:
    """A call, with the processor time of this process that it has taken in all."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.ran_s = 0.0

    def __call__(self) -> None:
        began = time.process_time()
        self._call()
        self.ran_s += time.process_time() - began
