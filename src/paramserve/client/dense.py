"""A client's dense parameters, by name and by block: one message to each shard for a group's step.

It checks everything before it sends anything, and decides nothing about consistency: it knows the
terms of each group's policy, and goes by them. Under a policy that collects (Sync), pushes by name
are put together here until `tick` ends the step, because a clock's gradients travel in one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.connection import Connection
from paramserve.client.directory import Directory
from paramserve.client.exchange import answers_by_shard
from paramserve.client.gradients import Gradients, Pushes, clip
from paramserve.client.keyed import Keyed, joined
from paramserve.client.names import Selection, as_pairs
from paramserve.client.rows import CheckedRows, TablePush
from paramserve.client.staging import NOTHING_STAGED, Staged, fail_staged
from paramserve.client.step_parts import (
    BlockPush,
    StepOptions,
    StepParts,
    check_weight,
    kept_offset,
)
from paramserve.client.steps import Steps
from paramserve.client.ticket import Ticket, finish
from paramserve.compiling import load_kernels
from paramserve.core.partition import Block
from paramserve.errors import DtypeMismatch, ParamServeError, ShapeMismatch
from paramserve.messages import Assign, DropCut, Fetch, TakeCut

Array = npt.NDArray[Any]

_block_of: Callable[[BlockPush], Block] = attrgetter("block")


class Dense:
    """What a client pushes to blocks of tensors, and reads and overwrites of them.

    Attributes:
        gradients: on their way into shared memory.
    """

    def __init__(
        self, connection: Connection, steps: Steps, directory: Directory, keyed: Keyed
    ) -> None:
        self.gradients = Gradients(connection.exchange, steps.refuses, connection.rank)
        self._connection = connection
        self._steps = steps
        self._directory = directory
        self._keyed = keyed
        self._exchange = connection.exchange
        self._names = directory.names
        self._lock = connection.lock

    # --- by block --------------------------------------------------------------------------------

    def gradient_slot(self, block: Block) -> Array:
        """[block.size] of the block's dtype in shared memory, contents undefined, 64-byte aligned.
        Of a 16-bit block it holds the bits: bfloat16 as uint16, float16 as int16.

        It is the caller's until it goes into a `step`; until then this gives the same one again.
        """
        if self._connection.checks:
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
        numbered: Callable[[Ticket], object] | None = None,
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
            numbered: as of `StepParts`: gets the ticket, whose slots are the owner's of it from
                then on.
        Raises:
            NonFinite: with rank and tensor.
            ValueError: blocks of another group, a gradient that is not from `gradient_slot`, or a
                number out of its range. In all cases nothing was applied. What `tables` had kept
                for this tick goes with a gradient that is refused: its tickets say so.
        """
        if self._connection.checks:
            self._connection.check()
        if not 0.0 < weight < math.inf or not 0.0 <= clip_norm < math.inf:
            raise ValueError(f"weight must be > 0, clip_norm >= 0, not {weight} and {clip_norm}")
        blocks = [*map(_block_of, push), *pull]
        for block in blocks:
            if block.group_name != group:
                theirs = block.group_name
                raise ValueError(f"block {block.id} is in group {theirs!r}, not in {group!r}")
            if block.table is not None:
                _check_tensors(block)
        with self._lock:
            first = blocks[0] if blocks else self._directory.defined_in(group)
            before: list[StepParts] = []
            if not tables:
                self._steps.begin()
            else:
                self._steps.begin(requests=len(tables) + 1)
                rows = self._keyed.checked(tables)
                before = self._keyed.parts(rows, tick=tick, weight=weight, skip=skip)
            pushes: Pushes = []
            caller_slots = self.gradients.caller_slots
            largest = -1.0
            try:
                if skip:
                    self.gradients.drop(push)
                else:
                    pushes, largest = self.gradients.take(push)
                    skip = largest == math.inf
            except BaseException as error:
                self._keyed.unsent(before, error)
                raise
            if clip_norm and not skip and not self._steps.traits_of(first).collects:
                clip(pushes, clip_norm)
                clip_norm = 0.0
            options = StepOptions(tick, weight, skip, clip_norm, note, largest)

            def reclaim(ticket: Ticket) -> None:
                for each, _ in pushes:
                    del caller_slots[each.block.id]
                if numbered is not None:
                    numbered(ticket)

            parts = StepParts("step", first, pushes, pull, options, lent=True, numbered=reclaim)
            tickets = self._steps.send([*before, parts])
            return joined(tickets) if before else tickets[0]

    def notes(self, group: str, *, timeout_s: float | None = None) -> dict[int, dict[int, bytes]]:
        """The last notes that ranks have sent with steps of a group, by rank and clock."""
        self._connection.check()
        notes: dict[int, dict[int, bytes]] = {}
        for beat in self._exchange.reports(self._connection.limit(timeout_s), notes=True):
            for report in beat.groups:
                if report.name == group:
                    for rank, clock, note in report.notes:
                        notes.setdefault(rank, {})[clock] = note
        return notes

    def fetch(
        self, block: Block, field: int, *, cut: int = 0, timeout_s: float | None = None
    ) -> tuple[Array, tuple[int, ...]]:
        """Read a block's values (field 0) or rule state (1, 2, ...), [block.size], and the update
        counts of its pieces; with `cut`, its values of that cut."""
        self._connection.check()
        _check_tensors(block)
        with self._lock:
            slot = self._exchange.take(block.kept_bytes)
            requests = [
                Fetch(0, block.id, field, slot.arena, kept_offset(block, slot, shard), cut)
                for shard in range(len(self._exchange.shards))
            ]
            operation = self._steps.finish("fetch", requests, timeout_s, [slot])
            return slot.kept_values(block).copy(), answers_by_shard(operation)[0].counts

    @contextmanager
    def cut(self, blocks: Iterable[Block] = (), *, timeout_s: float | None = None) -> Iterator[int]:
        """Take a cut of the groups of some blocks, all if none are given; its number, for `fetch`.

        Every shard has of each client's pushes exactly the same ones in it. It is released at the
        end. Nothing waits for its reader.

        Raises:
            Overloaded: none could be taken in time.
        """
        self._connection.check()
        groups = tuple({block.group: None for block in blocks})
        with self._lock:
            number = self._steps.ask_all("cut", TakeCut(0, groups), timeout_s)[0].cut
        yield number
        with self._lock:  # after an error the shards release it by themselves
            self._steps.ask_all("cut", DropCut(0, number), timeout_s)

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
        if not np.can_cast(array.dtype, block.kept, "same_kind"):
            raise DtypeMismatch(
                f"block {block.id} is {block.kept}, got {array.dtype}",
                fix=f"convert it with .astype({block.kept.name!r})",
            )
        with self._lock:
            slot = self._exchange.take(block.kept_bytes)
            np.copyto(slot.kept_values(block), array)
            requests = []
            for shard in range(len(self._exchange.shards)):
                offset = kept_offset(block, slot, shard)
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
            selection, arrays = self._to_push(name, gradient)
            block = selection.blocks[0]
            if self._steps.collects(block):
                self._steps.raise_unread()
                return self._stage(selection, arrays, weight)
            self._steps.begin()
            pushes, largest = self.gradients.capture(selection, arrays)
            step_weight = 1.0 if weight is None else weight
            options = StepOptions(False, step_weight, largest == math.inf, largest=largest)
            return self._steps.send([StepParts("push", block, pushes, (), options)])[0]

    def _stage(
        self,
        selection: Selection,
        arrays: Sequence[Array],
        weight: float | None,
        at_once: bool = False,
    ) -> Ticket:
        """Keep gradients until their group's tick.

        Args:
            at_once: the same call ticks.
        """
        block = selection.blocks[0]
        group = block.group_name
        self._steps.staged.check_same_weight(group, weight)
        staged = self._steps.staged.get(group)
        if staged is None:
            staged = Staged()
        self.gradients.stage(selection, arrays, staged.gradients, at_once)
        return self._steps.stage(block, staged, weight)

    def push_pull(
        self,
        gradients: Mapping[str, npt.ArrayLike],
        tick: bool,
        weight: float | None,
        copy: bool,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        """See `Client.push_pull`."""
        if self._connection.checks:
            self._connection.check()
        if weight is not None:
            check_weight(weight)
        steps = self._steps
        with self._lock:
            selection, arrays = self._to_push(gradients, None)
            blocks = selection.blocks
            steps.begin(timeout_s)
            collects = steps.collects(blocks[0])
            if collects:
                self._stage(selection, arrays, weight, tick)
            if collects and not tick:
                tickets = self._send_pulls(selection, timeout_s)
            elif collects:
                tickets = [self._end_step("push", blocks[0], blocks)]
            else:
                pushes, largest = self.gradients.capture(selection, arrays)
                step_weight = 1.0 if weight is None else weight
                options = StepOptions(tick, step_weight, largest == math.inf, largest=largest)
                parts = StepParts("push", blocks[0], pushes, blocks, options, by_name=True)
                tickets = steps.send([parts])
        return self._read(tickets, selection, None, copy, timeout_s)

    def pull(
        self, names: str | Sequence[str] | None, out: Any, copy: bool, timeout_s: float | None
    ) -> Any:
        """See `Client.pull`."""
        self._connection.check()
        alone = names if isinstance(names, str) else None
        with self._lock:
            selection = self._select(names)
            targets: Any = out if alone is None or out is None else {alone: out}
            if targets is not None:
                self._check_targets(targets, selection.names)
            tickets = self._send_pulls(selection, timeout_s)
        values = self._read(tickets, selection, targets, copy, timeout_s)
        return values if alone is None else values[alone]

    def _select(self, names: str | Sequence[str] | None) -> Selection:
        """Resolve names, all of them for None; the coordinator is asked about unknown ones."""
        requested: Sequence[str] | None = [names] if isinstance(names, str) else names
        if requested is None:
            requested = [
                piece.name for block in self._directory.find(None) for piece in block.pieces
            ]
        else:
            requested = tuple(requested)
            selection = self._names.selections.get(requested)
            if selection is not None:
                return selection
            self._directory.find(requested)
        return self._names.select(requested)

    def _send_pulls(self, selection: Selection, timeout_s: float | None) -> list[Ticket]:
        """One pull for each group; the caller holds the lock."""
        tickets: list[Ticket] = []
        try:
            for blocks in selection.groups:
                self._steps.begin(timeout_s, "pull", reads=True)
                parts = StepParts("pull", blocks[0], (), blocks, by_name=True)
                tickets += self._steps.ask([parts])
        except ParamServeError:
            self._forget(tickets)
            raise
        return tickets

    def _forget(self, tickets: Sequence[Ticket]) -> None:
        with self._lock:
            for ticket in tickets:
                self._steps.forget(ticket)

    def _read(
        self,
        tickets: Sequence[Ticket],
        selection: Selection,
        targets: Mapping[str, Array] | None,
        copy: bool,
        timeout_s: float | None,
    ) -> dict[str, Array]:
        """Wait for reads, and hand their values over."""
        tensors: dict[int, list[Array]] = {}
        values: dict[str, Array] = {}
        outputs = targets if targets is not None else {}
        viewed = False
        try:
            for ticket in tickets:
                finish(ticket, timeout_s)
                for block, slot in ticket.places:
                    tensors[block.id] = slot.tensors(block)
            for name, number, index in selection.places:
                value = tensors[number][index]
                if name in outputs:
                    values[name] = outputs[name]
                    np.copyto(outputs[name], value)
                elif copy:
                    values[name] = value.copy()
                else:
                    values[name] = view = value[...]
                    view.flags.writeable = False
                    viewed = True
            if viewed:
                with self._lock:
                    for ticket in tickets:
                        self._steps.values.view(ticket)
        except BaseException:
            self._forget(tickets)
            raise
        if not viewed:
            for ticket in tickets:
                ticket.release()
        return values

    def _check_targets(self, targets: object, names: Sequence[str]) -> None:
        if not isinstance(targets, Mapping):
            raise TypeError(f"out for several names is a mapping by name, not {targets!r}")
        for name, target in targets.items():
            if name not in names:
                raise ValueError(f"out names {name!r}, which is not pulled")
            self._names.piece(name).check_target(target)

    def gradient(self, name: str) -> Array:
        """See `Client.gradient`."""
        self._connection.check()
        with self._lock:
            if name not in self._names:
                self._directory.find([name])
            return self.gradients.lend(*self._names.only(name))

    def assign(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None,
        timeout_s: float | None,
    ) -> None:
        """See `Client.assign`."""
        self._connection.check()
        with self._lock:
            pairs = as_pairs(name, value)
            selection = self._one_group(pairs)
            arrays = [
                piece.checked_to_keep(value)
                for piece, value in zip(selection.pieces, pairs.values(), strict=True)
            ]
            for part in selection.parts:
                flat = np.empty(part.block.size, part.block.kept)
                for piece, array in zip(part.pieces, part.pick(arrays), strict=True):
                    piece.view(flat)[...] = array
                self.store(part.block, 0, flat, active=part.indices, timeout_s=timeout_s)

    def tick(self, group: str, weight: float | None) -> Ticket:
        """See `Client.tick`."""
        self._connection.check()
        check_weight(weight)
        with self._lock:
            block = self._directory.defined_in(group)
            self._steps.staged.check_same_weight(group, weight)
            self._steps.begin()
            if block.table is not None:
                return self._keyed.push_rows([CheckedRows.none_of(block)], tick=True, weight=weight)
            return self._end_step("tick", block, (), weight)

    def _end_step(
        self, what: str, block: Block, pull: Sequence[Block], weight: float | None = None
    ) -> Ticket:
        """Send what was staged for a block's group, with a tick.

        Args:
            weight: what was said of the step with it, if anything.
        """
        staged = self._steps.staged.pop(block.group_name, NOTHING_STAGED)
        step_weight = staged.weight if weight is None else weight
        try:
            pushes, largest = self.gradients.staged(staged.gradients)
            step_weight = 1.0 if step_weight is None else step_weight
            options = StepOptions(True, step_weight, largest == math.inf, largest=largest)
            parts = StepParts(
                what, block, pushes, pull, options, staged=staged.tickets, by_name=True
            )
            return self._steps.send([parts])[0]
        except BaseException as error:
            fail_staged(block.group_name, staged.tickets, error)
            raise

    def _to_push(
        self, name: str | Mapping[str, npt.ArrayLike], value: npt.ArrayLike | None
    ) -> tuple[Selection, list[Array]]:
        """What is named, and the checked gradients in the order of the names."""
        pairs = name if type(name) is dict and value is None else as_pairs(name, value)
        selection = self._names.selections.get(tuple(pairs))
        if selection is None or not selection.pushable:
            selection = self._one_group(as_pairs(pairs, None))
            for block in selection.blocks:  # a client that only reads does without
                load_kernels(block.kept, half=block.spec.half)
            selection.pushable = True
        return selection, selection.checked_gradients(pairs)

    def _one_group(self, pairs: Mapping[str, npt.ArrayLike]) -> Selection:
        """What is named in a call that goes to one group."""
        selection = self._select(tuple(pairs))
        if len(selection.groups) > 1:
            groups = sorted({block.group_name for block in selection.blocks})
            raise ValueError(f"one call goes to one group; these names are in {groups}")
        return selection


def _check_tensors(block: Block) -> None:
    if block.table is not None:
        raise ValueError(f"{block.group_name!r} is a table: use its own methods, or tables=")
