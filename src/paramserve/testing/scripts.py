"""What simulated clients do: workers that step, and a reader that belongs to no rank."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING

from paramserve.core.partition import Block
from paramserve.core.session import Operation
from paramserve.errors import WorkerFenced, rebuild
from paramserve.messages import Defined, Failed, Leave, Ok, PlaceBlock, Placed
from paramserve.rules.registry import spec
from paramserve.testing.client import SimulatedClient
from paramserve.testing.history import Call

if TYPE_CHECKING:
    from paramserve.testing.simulated import SimulatedCluster

WAIT_S = 60.0
"""A define waits this long for another client's define."""
PAUSE_S = 0.002
"""A client computes for up to this between two calls."""


class ScriptedClient(SimulatedClient):
    """A client that first defines the blocks, or waits until another has."""

    def __init__(self, cluster: SimulatedCluster, writer: int, rank: int) -> None:
        super().__init__(cluster, writer, rank)
        self.left = cluster.scenario.steps
        """Steps still to be begun."""
        self._undefined = list(cluster.workload.blocks)
        self._thinking = False

    @property
    def every(self) -> list[Block]:
        """All blocks."""
        return list(self.blocks.values())

    def script(self) -> None:
        if self._undefined:
            self._place()
        elif not self._thinking:
            self._thinking = True
            self.later(self.cluster.random.random() * PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._thinking = False
        while self.alive and self.in_flight < self.window and not self.full and self.next():
            pass
        if self.alive and self.in_flight == 0 and self.left == 0:
            self.left = -1
            self.step(pull=self.every, state=self.state(), then=self.last)

    @abstractmethod
    def next(self) -> bool:
        """Begin the next call, if one is left; whether another may follow at once."""

    def state(self) -> int | None:
        """How many synchronous clocks a read contains that is begun now; None: not known."""
        return None

    def answered(self, call: Call, operation: Operation) -> None:
        """A call is complete."""
        if isinstance(operation.error, WorkerFenced):
            self._fence(operation.error)
        else:
            self.script()

    def last(self, call: Call, operation: Operation) -> None:
        """The last read is complete: leave."""
        if isinstance(operation.error, WorkerFenced):
            self._fence(operation.error)
        else:
            self.call(Leave(0), lambda _: self.end())

    # --- define -------------------------------------------------------------------------

    def _place(self) -> None:
        workload = self.cluster.workload
        name = self._undefined[0]
        call = PlaceBlock(
            0,
            "default",
            workload.dtype.name,
            spec(workload.rule),
            workload.blocks[name],
            True,
            WAIT_S,
        )
        self.call(call, self._placed)

    def _placed(self, reply: Placed | Failed) -> None:
        if isinstance(reply, Failed):
            self._fence(rebuild(reply.kind, reply.failed, "no", reply.fix))
            return
        block = Block(reply.spec)
        self.cluster.blocks[block.id] = self.blocks[self._undefined[0]] = block
        if reply.attempt == 0:
            self._known()
        else:
            call = Defined(0, block.id, reply.attempt)
            self.define(block, reply.attempt, partial(self._defined, call))

    def _defined(self, call: Defined, operation: Operation) -> None:
        if operation.error is not None:
            self._fence(operation.error)
        else:
            self.call(call, self._known)

    def _known(self, reply: Ok | None = None) -> None:
        self._undefined.pop(0)
        self.script()


class SimulatedWorker(ScriptedClient):
    """Steps through its clocks: pushes, ticks and pulls in changing company.

    A later incarnation goes on at the clock that its rank has reached, and repeats the step that
    not all shards have. Before its first step, what it reads may have one clock more: that was
    being decided without its rank, which had ended for good.
    """

    def __init__(self, cluster: SimulatedCluster, writer: int, rank: int) -> None:
        super().__init__(cluster, writer, rank)
        self._in_step = False

    def state(self) -> int | None:
        known = self.cluster.collects and (self.incarnation == 1 or self._in_step)
        return self.clock if known else None

    def next(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        self._step_of(self.cluster.random.random())
        return True

    def _step_of(self, kind: float) -> None:
        every, collects = self.every, self.cluster.collects
        self._in_step = self._in_step or not 0.78 <= kind < 0.88
        after = self.clock + 1 if collects else None
        if kind < 0.68:
            self.step(every, every, tick=True, state=after, then=self.answered)
        elif kind < 0.78:
            self.step(every, tick=True, then=self.answered)
        elif kind < 0.88:
            self.step(pull=every, state=self.state(), then=self.answered)
        elif kind < 0.92:
            self.step(pull=every, tick=True, state=after, then=self.answered)
        elif kind < 0.96:
            self.step(every, every, tick=True, skip=True, state=after, then=self.answered)
        elif collects:
            self.step(every, every, tick=True, spoiled=True, then=self.answered)
        else:
            self.step(every[1:], every[:1], then=self.answered)


class SimulatedReader(ScriptedClient):
    """A client without a rank: it reads, and under Async pushes single blocks without a clock."""

    def next(self) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        draw = self.cluster.random.random
        chosen = [block for block in self.every if draw() < 0.5]
        kind = draw()
        if kind < 0.4 or not chosen:
            self.step(pull=self.every, then=self.answered)
        elif kind < 0.7:
            self.step(chosen, then=self.answered)
        else:
            self.step(chosen, self.every, then=self.answered)
        return True
