"""A client's dense parameters, by name and by block: one message to each shard for a group's step.

It checks everything before it sends anything, and decides nothing about consistency: it knows the
terms of each group's policy, and goes by them. Under a policy that collects (Sync), pushes by name
are put together here until `tick` ends the step, because a clock's gradients travel in one message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.connection import Connection
from paramserve.client.directory import Directory
from paramserve.client.exchange import done
from paramserve.client.gradients import Gradients, Pushes, clip
from paramserve.client.keyed import Keyed, joined
from paramserve.client.names import as_pairs
from paramserve.client.step_parts import (
    NOTHING_STAGED,
    BlockPush,
    Staged,
    StepOptions,
    StepParts,
    check_weight,
)
from paramserve.client.steps import Steps, fail_staged, offset_of
from paramserve.client.table import TablePush
from paramserve.client.ticket import Ticket
from paramserve.compiling import load_kernels
from paramserve.core.partition import Block
from paramserve.errors import DtypeMismatch, ParamServeError, ShapeMismatch
from paramserve.messages import Assign, Fetch

Array = npt.NDArray[Any]


class Dense:
    """What a client pushes to blocks of tensors, and reads and overwrites of them.

    Attributes:
        gradients: on their way into shared memory.
    """

    def __init__(
        self, connection: Connection, steps: Steps, directory: Directory, keyed: Keyed
    ) -> None:
        self.gradients = Gradients(
            connection.exchange, directory.names, steps.refuses, connection.rank
        )
        self._connection = connection
        self._steps = steps
        self._directory = directory
        self._keyed = keyed
        self._exchange = connection.exchange
        self._names = directory.names
        self._lock = connection.lock
        self._viewed: dict[int, Ticket] = {}
        """By block: the ticket whose values a pull with copy=False left in their slot."""

    # --- by block --------------------------------------------------------------------------------

    def gradient_slot(self, block: Block) -> Array:
        """[block.size] of the block's dtype in shared memory, contents undefined, 64-byte aligned.

        It is the caller's until it goes into a `step`; until then this gives the same one again.
        """
        self._connection.check()
        with self._lock:
            return self.gradients.slot(block)

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
        self._connection.check()
        if not 0.0 < weight < math.inf or not 0.0 <= clip_norm < math.inf:
            raise ValueError(f"weight must be > 0, clip_norm >= 0, not {weight} and {clip_norm}")
        blocks = [*[each.block for each in push], *pull]
        for block in blocks:
            if block.group_name != group:
                theirs = block.group_name
                raise ValueError(f"block {block.id} is in group {theirs!r}, not in {group!r}")
            _check_tensors(block)
        with self._lock:
            first = blocks[0] if blocks else self._directory.defined_in(group)
            self._steps.begin(requests=len(tables) + 1)
            before: list[StepParts] = []
            if tables:
                before = self._keyed.parts(tables, tick=tick, weight=weight, skip=skip)
            pushes: Pushes = []
            try:
                if skip:
                    self.gradients.drop(push)
                else:
                    pushes, finite = self.gradients.take(push)
                    skip = not finite
            except BaseException as error:
                self._keyed.unsent(before, error)
                raise
            if clip_norm and not skip and not self._steps.traits_of(first).collects:
                clip(pushes, clip_norm)
                clip_norm = 0.0
            options = StepOptions(tick, weight, skip, clip_norm, note)
            parts = StepParts("step", first, pushes, pull, options)
            tickets = self._steps.send([*before, parts])
            return joined(tickets) if before else tickets[0]

    def notes(self, group: str, *, timeout_s: float | None = None) -> dict[int, dict[int, bytes]]:
        """The last notes that ranks have sent with steps of a group, by rank and clock."""
        self._connection.check()
        found: dict[int, dict[int, bytes]] = {}
        for beat in self._exchange.reports(self._connection.limit(timeout_s), notes=True):
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
        self._connection.check()
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
        self._connection.check()
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

    # --- by name ---------------------------------------------------------------------------------

    def push(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        gradient: npt.ArrayLike | None,
        weight: float | None,
    ) -> Ticket:
        """See `Client.push`."""
        self._connection.check()
        check_weight(weight)
        with self._lock:
            blocks, arrays = self._resolve(name, gradient)
            if self._steps.collects(blocks[0]):
                self._steps.raise_unread()
                return self._stage(blocks, arrays, weight)
            self._steps.begin()
            pushes, finite = self.gradients.capture(blocks, arrays)
            options = StepOptions(weight=1.0 if weight is None else weight, skip=not finite)
            return self._steps.send([StepParts("push", blocks[0], pushes, (), options)])[0]

    def _stage(
        self, blocks: Sequence[Block], arrays: Mapping[str, Array], weight: float | None
    ) -> Ticket:
        """Keep gradients until their group's tick."""
        group = blocks[0].group_name
        self._steps.check_same_weight(group, weight)
        staged = self._steps.staged.get(group)
        if staged is None:
            staged = Staged()
        self.gradients.stage(blocks, arrays, staged.gradients)
        return self._steps.stage(blocks[0], staged, weight)

    def push_pull(
        self,
        gradients: Mapping[str, npt.ArrayLike],
        tick: bool,
        weight: float | None,
        copy: bool,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        """See `Client.push_pull`."""
        self._connection.check()
        check_weight(weight)
        with self._lock:
            blocks, arrays = self._resolve(gradients, None)
            self._steps.begin(timeout_s)
            collects = self._steps.collects(blocks[0])
            if collects:
                self._stage(blocks, arrays, weight)
            if collects and not tick:
                tickets = self._send_pulls(blocks, timeout_s)
            elif collects:
                self._drop_views(blocks)
                tickets = [(self._end_step("push", blocks[0], blocks), blocks)]
            else:
                pushes, finite = self.gradients.capture(blocks, arrays)
                self._drop_views(blocks)
                options = StepOptions(tick, 1.0 if weight is None else weight, not finite)
                parts = StepParts("push", blocks[0], pushes, blocks, options)
                tickets = [(self._steps.send([parts])[0], blocks)]
        return self._read_pulls(tickets, list(gradients), None, copy, timeout_s)

    def pull(
        self, names: str | Sequence[str] | None, out: Any, copy: bool, timeout_s: float | None
    ) -> Any:
        """See `Client.pull`."""
        self._connection.check()
        wanted = [names] if isinstance(names, str) else names
        with self._lock:
            blocks = self._directory.find(wanted)
            if wanted is None:
                wanted = [piece.name for block in blocks for piece in block.pieces]
                self._names.blocks(wanted)
            targets = {names: out} if isinstance(names, str) and out is not None else out
            if targets is not None:
                self._check_targets(targets, wanted)
            tickets = self._send_pulls(blocks, timeout_s)
        found = self._read_pulls(tickets, wanted, targets, copy, timeout_s)
        return found[names] if isinstance(names, str) else found

    def _send_pulls(
        self, blocks: Sequence[Block], timeout_s: float | None
    ) -> list[tuple[Ticket, list[Block]]]:
        """One pull for each group; the caller holds the lock."""
        self._drop_views(blocks)
        groups: dict[int, list[Block]] = {}
        for block in blocks:
            groups.setdefault(block.group, []).append(block)
        tickets: list[tuple[Ticket, list[Block]]] = []
        try:
            for each in groups.values():
                self._steps.begin(timeout_s, "pull")
                parts = StepParts("pull", each[0], (), each)
                tickets.append((self._steps.send([parts])[0], each))
        except ParamServeError:
            self._forget(tickets)
            raise
        return tickets

    def _forget(self, tickets: Sequence[tuple[Ticket, list[Block]]]) -> None:
        with self._lock:
            for ticket, _ in tickets:
                self._steps.forget(ticket)

    def _read_pulls(
        self,
        tickets: Sequence[tuple[Ticket, list[Block]]],
        names: Sequence[str],
        targets: Mapping[str, Array] | None,
        copy: bool,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        found: dict[str, Array] = {}
        wanted = frozenset(names)
        for index, (ticket, blocks) in enumerate(tickets):
            try:
                found |= self._values(ticket, blocks, wanted, targets, copy, timeout_s)
            except BaseException:
                self._forget(tickets[index:])
                raise
        return {name: found[name] for name in names}

    def _check_targets(self, targets: object, wanted: Sequence[str]) -> None:
        if not isinstance(targets, Mapping):
            raise TypeError(f"out for several names is a mapping by name, not {targets!r}")
        for name, target in targets.items():
            if name not in wanted:
                raise ValueError(f"out names {name!r}, which is not pulled")
            self._names.piece(name).check_target(target)

    def gradient(self, name: str) -> Array:
        """See `Client.gradient`."""
        self._connection.check()
        with self._lock:
            block = self._directory.find([name])[0]
            return self.gradients.lend(block, self._names.piece(name))

    def assign(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None,
        timeout_s: float | None,
    ) -> None:
        """See `Client.assign`."""
        self._connection.check()
        with self._lock:
            blocks, arrays = self._resolve(name, value)
            for block in blocks:
                flat = np.empty(block.size, block.dtype)
                active = []
                for piece in self._names.pieces(block):
                    if piece.name in arrays:
                        piece.view(flat)[...] = arrays[piece.name]
                        active.append(piece.index)
                self.store(block, 0, flat, active=tuple(active), timeout_s=timeout_s)

    def tick(self, group: str, weight: float | None) -> Ticket:
        """See `Client.tick`."""
        self._connection.check()
        check_weight(weight)
        with self._lock:
            block = self._directory.defined_in(group)
            self._steps.check_same_weight(group, weight)
            self._steps.begin()
            if block.table is not None:
                return self._keyed.push([TablePush(self._keyed.table(block))], weight=weight)
            return self._end_step("tick", block, (), weight)

    def _end_step(
        self, what: str, block: Block, pull: Sequence[Block], weight: float | None = None
    ) -> Ticket:
        """Send what was staged for a block's group, with a tick.

        Args:
            weight: what was said of the step with it, if anything.
        """
        staged = self._steps.staged.pop(block.group_name, NOTHING_STAGED)
        said = staged.weight if weight is None else weight
        try:
            pushes, finite = self.gradients.staged(staged.gradients)
            options = StepOptions(True, 1.0 if said is None else said, not finite)
            parts = StepParts(what, block, pushes, pull, options, staged=staged.tickets)
            return self._steps.send([parts])[0]
        except BaseException as error:
            fail_staged(block.group_name, staged.tickets, error)
            raise

    def _resolve(
        self, name: str | Mapping[str, npt.ArrayLike], value: npt.ArrayLike | None
    ) -> tuple[list[Block], dict[str, Array]]:
        """Blocks and checked arrays for a push or an assign."""
        pairs = name if type(name) is dict and value is None else as_pairs(name, value)
        blocks = self._names.known(tuple(pairs))
        if blocks is None:
            blocks = self._directory.find(list(as_pairs(pairs, None)))
            if len({block.group for block in blocks}) > 1:
                groups = sorted({block.group_name for block in blocks})
                raise ValueError(f"one call goes to one group; these names are in {groups}")
            for block in blocks:  # a client that only reads does without
                load_kernels(block.dtype)
            self._names.remember(tuple(pairs), blocks)
        return blocks, {each: self._names.checked(each, pairs[each]) for each in pairs}

    def _values(
        self,
        ticket: Ticket,
        blocks: Sequence[Block],
        names: frozenset[str],
        targets: Mapping[str, Array] | None,
        copy: bool,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        """Wait for a pull and hand its values over."""
        outcome = ticket.result(timeout_s)
        found: dict[str, Array] = {}
        viewed = False
        for block in blocks:
            flat = outcome.values[block.id]
            for piece in self._names.pieces(block):
                if piece.name in names:
                    target = None if targets is None else targets.get(piece.name)
                    found[piece.name] = piece.read(flat, target, copy)
                    viewed = viewed or (target is None and not copy)
        if viewed:
            with self._lock:
                self._viewed.update((block.id, ticket) for block in blocks)
        else:
            ticket.release()
        return found

    def _drop_views(self, blocks: Sequence[Block]) -> None:
        if self._viewed:
            for block in blocks:
                ticket = self._viewed.pop(block.id, None)
                if ticket is not None and ticket not in self._viewed.values():
                    ticket.release()


def _check_tensors(block: Block) -> None:
    if block.table is not None:
        raise ValueError(f"{block.group_name!r} is a table: use its own methods, or tables=")
