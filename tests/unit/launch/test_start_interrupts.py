"""Ctrl-C at any moment of a run's start ends what has started, and is not lost."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

from tests.interrupter import Interrupter
from tests.unit.launch.puppets import Puppets

import paramserve as ps
from paramserve.engine.base import Process, Role

SAMPLE = 64
"""Moments that are tried."""
FIRST = 8
"""Before these `run` has done nothing."""
LAST = 8
"""Moments at the end that are not: once it waits, it does not pass the same ones each time."""


class Ends(Puppets):
    """Its coordinator ends when all are launched."""

    def launch(self, role: Role) -> Process:
        process = super().launch(role)
        if role.name == "worker 1":
            self.processes["coordinator"].end(1)
        return process


def train(worker: ps.Worker) -> None: ...


def run(engine: Puppets, interrupts: list[KeyboardInterrupt]) -> None:
    try:
        ps.run(train, workers=2, engine=engine, timeout_s=5.0)
    except ps.errors.CoordinatorGone:
        if not isinstance(engine, Ends):
            raise
    except KeyboardInterrupt as interrupt:
        interrupts.append(interrupt)
        raise


def test_interrupt_at_any_moment_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    run(Ends(), [])  # imports what it needs
    whole = Interrupter()
    whole.run(lambda: run(Ends(), []))
    assert whole.passed > 300
    for at in sorted(random.Random(0).sample(range(FIRST, whole.passed - LAST), SAMPLE)):
        before, engine, one = set(threading.enumerate()), Puppets(), Interrupter(at)
        interrupts: list[Any] = []
        one.run(lambda engine=engine, interrupts=interrupts: run(engine, interrupts))
        assert [hasattr(each, "result") for each in interrupts] == [True], (at, one.where)
        assert not interrupts[0].result or not interrupts[0].result.values
        assert engine.closed.is_set() or not engine.roles, one.where
        for thread in set(threading.enumerate()) - before:
            thread.join(5.0)
            assert not thread.is_alive(), one.where
        assert not list(tmp_path.glob("paramserve-*")), one.where
