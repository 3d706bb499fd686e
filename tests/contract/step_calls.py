"""Counts what a step calls, as a profiler would: Python functions and builtins, by thread.

The number depends on no machine: where a processor is slow, or has slept, each call costs the same
share of a step. What polls and what asks for the time is left out: how often depends on the wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from tests.contract.role_cluster import RoleCluster

LEFT_OUT = frozenset({"poll", "sched_yield", "monotonic", "perf_counter", "time", "setprofile"})
STEPS = 8
"""That are counted, after as many that are not."""


class Calls:
    """What one thread calls; to be its `sys.setprofile`.

    Args:
        within: begins the path of each file whose functions, and what they call of builtins, count.
    """

    def __init__(self, within: str = "") -> None:
        self.by_name = Counter[str]()
        self._within = within

    def __call__(self, frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(self._within):
            return
        if event == "call":
            self.by_name[f"{code.co_filename.rpartition('/')[2]}:{code.co_qualname}"] += 1
        elif event == "c_call" and called.__name__ not in LEFT_OUT:
            self.by_name[called.__qualname__] += 1

    def take(self) -> Counter[str]:
        """What was called since the last time."""
        found, self.by_name = self.by_name, Counter()
        return found


class Counted(NamedTuple):
    """The calls of one step."""

    client: Counter[str]
    """Calls of the step with the fewest: one whose wait was not cut into slices."""
    server: float
    """Calls of the servers together, on average."""


def counted(
    cluster: RoleCluster,
    step: Callable[[], object],
    before: Callable[[], object] | None = None,
    within: str = "",
) -> Counted:
    """Count a step of the client in this thread, and what the servers do for it.

    Args:
        before: is done before each step, and not counted.
        within: as `Calls` takes it, for the client.
    """
    on_server, on_client = Calls(), Calls(within)
    steps: list[Counter[str]] = []
    for number in range(2 * STEPS):
        if number == STEPS:
            cluster.on_server(lambda: sys.setprofile(on_server))
        if before is not None:
            before()
        sys.setprofile(on_client)
        try:
            step()
        finally:
            sys.setprofile(None)
        steps.append(on_client.take())
    cluster.on_server(lambda: sys.setprofile(None))
    fewest = min(steps[STEPS:], key=lambda calls: calls.total())
    return Counted(fewest, on_server.take().total() / STEPS)


def table(calls: Counter[str]) -> str:
    """The calls one below the other, for the message of a test that has failed."""
    lines = [f"{count:5d} {name}" for name, count in sorted(calls.items(), key=lambda c: -c[1])]
    return "\n".join([f"{calls.total()} calls", *lines])
