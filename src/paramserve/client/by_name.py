"""The client that users hold: pushes and pulls by name, for numpy, notebooks and tests.

Under a policy that collects (Sync), pushes are put together here until `tick()` ends the step,
because a clock's gradients travel in one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.keyed import check_weight
from paramserve.client.names import as_pairs
from paramserve.client.steps import StepOptions
from paramserve.client.table import TablePush
from paramserve.client.ticket import Ticket
from paramserve.client.watching import WatchingClient
from paramserve.compiling import load_kernels
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError, UnknownName

Array = npt.NDArray[Any]


class Client(WatchingClient):
    """A connection to all servers; make one with `Cluster.client()` or get `worker.client`.

    Usable from any thread. Not across a fork: a child makes its own. A pickled client becomes a new
    one, with a new id, where it is unpickled.

    A call that is interrupted (Ctrl-C, a signal handler that raises) was sent whole or not at all.
    The client stays usable, or closes itself where the interrupt came while it changed what it
    knows of its session: then the next call raises `ClientClosed`, which says so.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._viewed: dict[int, Ticket] = {}
        """By block: the ticket whose values a pull with copy=False left in their slot."""

    def push(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        gradient: npt.ArrayLike | None = None,
        *,
        weight: float | None = None,
    ) -> Ticket:
        """Send gradients; the servers apply the rule. Returns when their bytes are captured.

        Under a policy that collects (Sync) they are put together until `tick()`; two pushes to one
        name add up there.

        Args:
            name: of one parameter, or a mapping from names to gradients of one group.
            gradient: shape [*value shape], floating point.
            weight: number of samples behind it, above 0; 1 if None. Under a policy that collects
                it is that of the whole step.
        Returns:
            Ticket of the outcome.
        Raises:
            UnknownName, ShapeMismatch, DtypeMismatch, NonFinite: nothing was applied.
            ValueError: the weight, or another one was given in this step. Nothing was applied.
        """
        self._check()
        check_weight(weight)
        with self._lock:
            blocks, arrays = self._resolve(name, gradient)
            if self._collects(blocks[0]):
                self._steps.raise_unread()
                return self._stage(blocks, arrays, weight)
            self._steps.begin()
            pushes, finite = self._gradients.capture(blocks, arrays)
            options = StepOptions(weight=1.0 if weight is None else weight, skip=not finite)
            return self._steps.send("push", blocks[0], pushes, (), options)

    def _collects(self, block: Block) -> bool:
        """Whether pushes to a block's group are put together until its tick; also the rest of a
        step that was begun so, before its policy changed."""
        return self._steps.traits_of(block).collects or self._gradients.has_staged(block.group_name)

    def _stage(
        self, blocks: Sequence[Block], arrays: Mapping[str, Array], weight: float | None
    ) -> Ticket:
        """Keep gradients until their group's tick."""
        group = blocks[0].group_name
        self._check_said(group, weight)
        self._gradients.stage(blocks, arrays)
        if weight is not None:
            self._weights[group] = weight
        return self._steps.stage(blocks[0])

    def push_pull(
        self,
        gradients: Mapping[str, npt.ArrayLike],
        *,
        tick: bool = False,
        weight: float | None = None,
        copy: bool = True,
        timeout_s: float | None = None,
    ) -> dict[str, Array]:
        """Push, and read the same names' values after it, in one message.

        Args:
            tick: end the step as well. Under Sync, a push without it is not yet in the values.
            weight: as for `push`.
            copy: as for `pull`.
        Returns:
            By name, the values.
        Raises:
            As `push` and `pull`.
        """
        self._check()
        check_weight(weight)
        with self._lock:
            blocks, arrays = self._resolve(gradients, None)
            self._steps.begin(timeout_s)
            collects = self._collects(blocks[0])
            if collects:
                self._stage(blocks, arrays, weight)
            if collects and not tick:
                tickets = self._send_pulls(blocks, timeout_s)
            elif collects:
                self._drop_views(blocks)
                tickets = [(self._end_step("push", blocks[0], blocks), blocks)]
            else:
                pushes, finite = self._gradients.capture(blocks, arrays)
                self._drop_views(blocks)
                options = StepOptions(tick, 1.0 if weight is None else weight, not finite)
                ticket = self._steps.send("push", blocks[0], pushes, blocks, options)
                tickets = [(ticket, blocks)]
        return self._read_pulls(tickets, list(gradients), None, copy, timeout_s)

    def pull(
        self,
        names: str | Sequence[str] | None = None,
        *,
        out: Any = None,
        copy: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Read values.

        Args:
            names: one name, several, or None for all.
            out: an array (or a mapping by name) of the right shape and dtype to read into.
            copy: False gives read-only views that are valid until the next pull of these names.
        Returns:
            An array for one name, else a dict by name; yours to keep.
        Raises:
            UnknownName, ShapeMismatch: nothing was read.
            PullTimeout: not there in `timeout_s`; the text says who is missing.
        """
        self._check()
        wanted = [names] if isinstance(names, str) else names
        with self._lock:
            blocks = self._find(wanted)
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
                ticket = self._steps.send("pull", each[0], (), each, StepOptions())
                tickets.append((ticket, each))
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
        """An array in shared memory for the gradient of `name`: fill it, push it, no copy.

        Shape and dtype are the parameter's; what it holds at first is undefined. It is yours until
        it is pushed.
        """
        self._check()
        with self._lock:
            block = self._find([name])[0]
            return self._gradients.lend(block, self._names.piece(name))

    def assign(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Overwrite values; returns when they are in place on all shards.

        Raises:
            UnknownName, ShapeMismatch, DtypeMismatch: nothing was applied.
        """
        self._check()
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

    def tick(self, group: str = "default", *, weight: float | None = None) -> Ticket:
        """End this client's step on a group: its clock grows by one.

        Under Sync, what was pushed since the last tick is this worker's part of the clock; the
        ticket's outcome is there when all live workers have ended it.

        Args:
            weight: under Sync, number of samples behind the step, above 0; what its pushes said,
                or 1, if None.
        Raises:
            UnknownName, NonFinite: nothing was applied.
            ValueError: the weight, or a push of this step had another one. Nothing was applied.
        """
        self._check()
        check_weight(weight)
        with self._lock:
            block = self._group_block(group)
            if block is None:
                raise UnknownName(f"group {group!r} is not defined", fix="define parameters in it")
            self._check_said(group, weight)
            self._steps.begin()
            if weight is not None:
                self._weights[group] = weight
            return self._end_step("tick", block, ())

    def _end_step(self, what: str, block: Block, pull: Sequence[Block]) -> Ticket:
        """Send what was staged for a block's group, with a tick."""
        if block.table is not None:
            return self.push_tables([TablePush(self.table(block.group_name))])
        try:
            weight = self._weights.pop(block.group_name, 1.0)
            pushes, finite = self._gradients.staged(block.group_name)
            options = StepOptions(True, weight, not finite)
            return self._steps.send(what, block, pushes, pull, options)
        except BaseException as error:
            self._gradients.unstage(block.group_name)
            self._steps.fail_staged(block.group_name, error)
            raise

    def _resolve(
        self, name: str | Mapping[str, npt.ArrayLike], value: npt.ArrayLike | None
    ) -> tuple[list[Block], dict[str, Array]]:
        """Blocks and checked arrays for a push or an assign."""
        pairs = name if type(name) is dict and value is None else as_pairs(name, value)
        blocks = self._names.known(tuple(pairs))
        if blocks is None:
            blocks = self._find(list(as_pairs(pairs, None)))
            if len({block.group for block in blocks}) > 1:
                groups = sorted({block.group_name for block in blocks})
                raise ValueError(f"one call goes to one group; these names are in {groups}")
            for block in blocks:  # whoever only reads does without
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
