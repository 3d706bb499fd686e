"""Where a worker's program is, over fakes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paramserve.consistency.built_in import Sync
from paramserve.messages import PassBy
from paramserve.training.leases import Leases
from paramserve.training.position import Position


class Restarted:
    """A worker of the second incarnation at clock 3 of its only group, behind a loader's epoch."""

    def __init__(self) -> None:
        self.sent: list[PassBy] = []
        self.interrupts = 0
        """Calls that are still to be interrupted."""
        self.before_step: Callable[[], bytes | None]
        saving = SimpleNamespace(
            ask=self._ask,
            older=lambda name: None,
            stepping=["model"],
            stop_asking=lambda name: None,
        )
        connection = SimpleNamespace(restarts=True, incarnation=2, begin_steps=self._begin_steps)
        terms = SimpleNamespace(policy=Sync())
        steps = SimpleNamespace(clocks={"model": 3}, resumed={}, terms=lambda group: terms)
        course: Any = SimpleNamespace(
            place_known=True, in_pass=False, epoch_behind=lambda done: 0, look_left=lambda: 0
        )
        client: Any = SimpleNamespace(saving=saving, steps=steps, connection=connection)
        optimizers: Any = SimpleNamespace(groups=["model"])
        self.position = Position(client, optimizers, course, Leases(client, optimizers))

    def _ask(self, name: str, asked: Callable[[], bytes | None]) -> None:
        self.before_step = asked

    def _begin_steps(self, message: PassBy) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.sent.append(message)


def test_first_step_that_was_interrupted_lets_the_others_go_on_when_it_is_made_again() -> None:
    one = Restarted()
    one.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        one.before_step()
    assert one.sent == []
    one.before_step()
    one.before_step()
    assert [(each.place, each.ticks) for each in one.sent] == [(3, 3)]
