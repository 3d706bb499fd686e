"""The client by block: one step of a group in one message, and a block's values and state.

`client.Client` adds the key-value API. A client checks everything before it sends anything, and
decides nothing about consistency: it knows the terms of each group's policy, and goes by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import done
from paramserve.client.gradients import Pushes, clip
from paramserve.client.keyed import joined
from paramserve.client.steps import BlockPush, StepOptions, StepParts, offset_of
from paramserve.client.table import TablePush
from paramserve.client.tables import TablesClient
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.errors import DtypeMismatch, ShapeMismatch
from paramserve.messages import Assign, Fetch

Array = npt.NDArray[Any]


class BlockClient(TablesClient):
    """A connection to all servers; its arguments and attributes are those of `ClientLife`.

    Usable from any thread. Not across a fork: a child makes its own. A pickled client becomes a new
    one, with a new id, where it is unpickled.
    """

    def gradient_slot(self, block: Block) -> Array:
        """[block.size] of the block's dtype in shared memory, contents undefined, 64-byte aligned.

        It is the caller's until it goes into a `step`; until then this gives the same one again.
        """
        self._check()
        with self._lock:
            return self._gradients.slot(block)

    def step(
        self,
        group: str,
        push: Sequence[BlockPush],
        *,
        pull: Sequence[Block] = (),
        tick: bool = True,
        weight: float = 1.0,
        skip: bool = False,
        clip_norm: float = 0.0,
        tables: Sequence[TablePush] = (),
        note: bytes = b"",
    ) -> Ticket:
        """Push, tick and pull blocks of one group in one message to each shard.

        Args:
            push: with gradients from `gradient_slot`; their slots go back when all have answered.
            pull: blocks whose values the ticket's outcome will have.
            weight: number of samples behind the gradients (> 0).
            skip: there is no usable gradient in this step; under Sync the whole clock is skipped.
            clip_norm: clip by global norm, of the reduced gradient under Sync, else of this one's;
                0: no clipping.
            tables: gradients of tables that step together with the group; they go before it in the
                same messages, each by its own table's policy, and are not clipped.
            note: what `notes` gives of this rank from now on; empty: what it gave before.
        Raises:
            NonFinite: with rank and tensor.
            ValueError: blocks of another group, a gradient that is not from `gradient_slot`, or a
                number out of its range. In all cases nothing was applied. What `tables` had kept
                for this tick goes with a gradient that is refused: its tickets say so.
        """
        self._check()
        if not 0.0 < weight < math.inf or not 0.0 <= clip_norm < math.inf:
            raise ValueError(f"weight must be > 0, clip_norm >= 0, not {weight} and {clip_norm}")
        for block in [*[each.block for each in push], *pull]:
            if block.group_name != group:
                theirs = block.group_name
                raise ValueError(f"block {block.id} is in group {theirs!r}, not in {group!r}")
            _check_tensors(block)
        with self._lock:
            first = push[0].block if push else pull[0] if pull else self._defined_in(group)
            self._steps.begin(requests=len(tables) + 1)
            before = self.table_parts(tables, tick=tick, weight=weight, skip=skip)
            pushes: Pushes = []
            try:
                if skip:
                    self._gradients.drop(push)
                else:
                    pushes, finite = self._gradients.take(push)
                    skip = not finite
            except BaseException as error:
                self._unsent(before, [each.table.name for each in tables] if tick else (), error)
                raise
            if clip_norm and not skip and not self._steps.traits_of(first).collects:
                clip(pushes, clip_norm)
                clip_norm = 0.0
            options = StepOptions(tick, weight, skip, clip_norm, note)
            if not before:
                return self._steps.send("step", first, pushes, pull, options)
            parts = StepParts("step", first, pushes, pull, options)
            return joined(self._steps.send_together([*before, parts]))

    def notes(self, group: str, *, timeout_s: float | None = None) -> dict[int, dict[int, bytes]]:
        """The last notes that ranks have sent with steps of a group, by rank and clock."""
        self._check()
        found: dict[int, dict[int, bytes]] = {}
        for beat in self._exchange.reports(self._limit(timeout_s), notes=True):
            for report in beat.groups:
                if report.name == group:
                    for rank, clock, note in report.notes:
                        found.setdefault(rank, {})[clock] = note
        return found

    def fetch(
        self, block: Block, field: int, *, timeout_s: float | None = None
    ) -> tuple[Array, tuple[int, ...]]:
        """Read a block's values (field 0) or rule state (1, 2, ...), [block.size], and the update
        counts of its pieces."""
        self._check()
        _check_tensors(block)
        with self._lock:
            slot = self._exchange.take(block.nbytes)
            requests = [
                Fetch(0, block.id, field, slot.arena, offset_of(block, slot, shard))
                for shard in range(len(self._exchange.shards))
            ]
            operation = self._steps.finish("fetch", requests, timeout_s, [slot])
            return slot.array(block).copy(), done(operation)[0].counts

    def store(
        self,
        block: Block,
        field: int,
        array: Array,
        *,
        active: tuple[int, ...] | None = None,
        counts: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Overwrite a block's values or rule state from [block.size], and the update counts."""
        self._check()
        _check_tensors(block)
        if array.shape != (block.size,):
            raise ShapeMismatch(
                f"store takes [{block.size}], got {list(array.shape)}", fix="flatten the block"
            )
        if not np.can_cast(array.dtype, block.dtype, "same_kind"):
            raise DtypeMismatch(
                f"block {block.id} is {block.dtype}, got {array.dtype}",
                fix=f"convert it with .astype({block.dtype.name!r})",
            )
        with self._lock:
            slot = self._exchange.take(block.nbytes)
            np.copyto(slot.array(block), array)
            requests = []
            for shard in range(len(self._exchange.shards)):
                offset = offset_of(block, slot, shard)
                requests.append(Assign(0, block.id, field, slot.arena, offset, active, counts))
            self._steps.finish("assign", requests, timeout_s, [slot])


def _check_tensors(block: Block) -> None:
    if block.table is not None:
        raise ValueError(f"{block.group_name!r} is a table: use its own methods, or tables=")
