"""Runs in a driver of their own, so that a test can kill or interrupt the driver."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import paramserve as ps
from tests.faults import victims

job = ps.start(victims.{train}, args=(sys.argv[1], {at}), workers=2, servers=2)
print(*(process.pid for process in job._supervisor._processes), flush=True)
{then}
"""


class Driver(NamedTuple):
    """A driver whose workers have done the steps that were asked for."""

    process: subprocess.Popen[str]
    children: list[int]
    """Pids of coordinator, servers and workers."""


@contextlib.contextmanager
def driver(
    pipe: str, then: str, *, train: str = "regress", at: int = 5, script: str = SCRIPT
) -> Iterator[Driver]:
    """Start a run in another process; the block begins when rank 0 is at step `at`.

    Args:
        then: what the driver does meanwhile.
        script: the driver; its first line of output is the pids of its processes.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script.format(train=train, at=at, then=then), pipe],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    with process:
        try:
            children = [int(pid) for pid in process.stdout.readline().split()]
            assert Path(pipe).read_text() == "here\n"
            yield Driver(process, children)
        finally:
            process.kill()
