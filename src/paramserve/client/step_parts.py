"""One group's part of a call: what it pushes and pulls, and how the step is meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paramserve.client.links import Slot
from paramserve.client.pushes import BlockPush
from paramserve.client.rows import RowPull, RowPush
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.core.session import Operation
from paramserve.messages import Step

Captured = Sequence[tuple[BlockPush, Slot]]
"""Gradients with the slots that they lie in."""


class StepOptions(NamedTuple):
    """How a step is meant; see `messages.Step`."""

    tick: bool = False
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0
    note: bytes = b""


class StepParts(NamedTuple):
    """One group's part of a call.

    `pushes` and `row_pushes` are captured: their slots go back when all shards have answered.
    """

    what: str
    """"push", "pull", "tick" or "step", for messages."""
    block: Block
    """Any of the group."""
    pushes: Captured = ()
    pull: Sequence[Block] = ()
    options: StepOptions = StepOptions()
    row_pushes: Sequence[RowPush] = ()
    row_pulls: Sequence[RowPull] = ()
    leased: bool = False
    """Whether a table's step counts the samples of its call; where it has dense layers, they do."""

    def order(self) -> tuple[bool, int]:
        """In which all clients send the parts of a call: tables first, then by group. A shard runs
        a client's requests one after the other, so two workers whose steps come in different orders
        could wait for each other's second one, for ever."""
        return self.block.table is None, self.block.group

    @property
    def slots(self) -> list[Slot]:
        """Those of the gradients."""
        return [slot for _, slot in self.pushes] + [each.slot for each in self.row_pushes]

    @property
    def read_slots(self) -> list[Slot]:
        """Those of keys that are read, and of the rows."""
        return [slot for each in self.row_pulls for slot in (each.keys, each.values)]


class Prepared(NamedTuple):
    """A step that is about to be sent."""

    ticket: Ticket
    requests: list[Step]
    operation: Operation
    group: str
    clock: int
    """Of this client in that group before it."""
    tick: bool
