"""The client by block: joining a cluster, defining blocks, one step of a group in one message.

`client.Client` adds the key-value face. A client checks everything before it sends anything, and
decides nothing about consistency.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import Connect, Exchange, again, done
from paramserve.client.gradients import Gradients, Pushes, clip
from paramserve.client.heartbeat import Heartbeat
from paramserve.client.names import Names, Tensor, as_tensors
from paramserve.client.steps import BlockPush, StepOptions, Steps, offset_of
from paramserve.client.ticket import Ticket
from paramserve.config import NO_CREDENTIALS, Credentials, Deadlines, Limits, PolicySpec
from paramserve.control import ControlLink
from paramserve.core.consistency import Decision
from paramserve.core.consistency import build as build_policy
from paramserve.core.group import resume
from paramserve.core.partition import Block
from paramserve.errors import (
    ClientClosed,
    DtypeMismatch,
    NonFinite,
    ParamServeError,
    ServerGone,
    ShapeMismatch,
    Timeout,
    UnknownName,
)
from paramserve.ids import NO_RANK
from paramserve.loading import load_kernels
from paramserve.messages import (
    Assign,
    Define,
    Defined,
    Fetch,
    Found,
    Hello,
    Join,
    Joined,
    Leave,
    Lookup,
    Ok,
    Piece,
    PlaceBlock,
    Placed,
    ServerBeat,
)
from paramserve.rules.base import Rule
from paramserve.rules.registry import described_by
from paramserve.transport.link import Link

Array = npt.NDArray[Any]


CLOSE_S = 1.0
"""How long `close` waits for what was sent, and for the coordinator's goodbye."""


class BlockClient:
    """A connection to all servers.

    Usable from any thread. Not across a fork: a child makes its own. A pickled client becomes a new
    one, with a new id, where it is unpickled.

    Attributes:
        id: given out by the coordinator.
        rank: of the worker; -1 for a client that holds up nobody.
        incarnation: counts the restarts of this rank, from 1; 0 without a rank.
        workers: how many workers the cluster expects.
        repeated: Async: how many steps of an older incarnation some shard has had that this one
            takes again, since another had not.
    """

    def __init__(
        self,
        control: ControlLink,
        joined: Joined,
        *,
        rank: int,
        credentials: Credentials,
        limits: Limits,
        deadlines: Deadlines,
        connect: Connect = Link.connect,
    ) -> None:
        self.id = joined.client
        self.rank = rank
        self.incarnation = joined.incarnation
        self.workers = joined.workers
        self._policy = build_policy(joined.consistency)
        self._collects = self._policy.on_push(0) is Decision.COLLECT
        self._control = control
        self._credentials = credentials
        self._pid = os.getpid()
        self._closed = False
        self._reason: ParamServeError | None = None
        """Why it was closed, if not because somebody wanted it."""
        self._lock = threading.RLock()
        self.repeated = 0
        # Before all that may take long: the coordinator counts from the join on.
        self._heartbeat = Heartbeat(control, rank, deadlines.heartbeat_s, limits.log_records_max)
        try:
            self._exchange = Exchange(joined, rank, credentials, limits, deadlines, connect)
            self._names = Names()
            self._steps = Steps(self._exchange, rank, deadlines.request_s)
            self._gradients = Gradients(self._exchange, self._names, self._policy, rank)
            if joined.incarnation > 1:
                self._resume(deadlines.start_s)
        except BaseException:
            self._heartbeat.stop()
            raise

    def _resume(self, limit_s: float) -> None:
        """Take over the clocks of this rank from its older incarnations.

        Raises:
            ServerGone, Timeout: the shards did not say how far it was. The links are closed.
        """
        try:
            told = self._exchange.reports(limit_s)
            if len(told) < len(self._exchange.shards):
                raise Timeout(
                    f"rank {self.rank} (incarnation {self.incarnation}) asked where to go on: "
                    f"{len(told)} of {len(self._exchange.shards)} shards answered in {limit_s:.1f}"
                    " s",
                    fix="look at the servers; a new worker of this rank may join",
                )
        except BaseException:
            self._exchange.close()
            raise
        reports = [beat.groups for beat in told]
        for name, found in resume(reports, self.rank, collects=self._collects).items():
            self._steps.clocks[name] = found.clock
            self.repeated = max(self.repeated, found.repeated)

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        credentials: Credentials = NO_CREDENTIALS,
        *,
        rank: int = NO_RANK,
        workers: int = 0,
        timeout_s: float | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
    ) -> Self:
        """Join a cluster.

        Args:
            addresses: the coordinator's, `unix:<path>` or `tcp:<host>:<port>`.
            credentials: the cluster's; needed for TCP only.
            rank: of a worker; -1 for a client that holds up nobody.
            workers: how many a worker takes there to be; checked by the cluster. 0: not checked.
            timeout_s: until the coordinator answers and all servers are up.
        Raises:
            ConnectTimeout: nobody answered in time.
            ParamServeError: the rank is taken, the cluster has another number of workers, or is
                not complete in time. The rank stays as it was.
        """
        limits = limits if limits is not None else Limits()
        deadlines = deadlines if deadlines is not None else Deadlines()
        limit = timeout_s if timeout_s is not None else deadlines.start_s
        if isinstance(addresses, str):
            addresses = (addresses,)
        control = ControlLink.connect(
            addresses,
            Hello("join"),
            credentials=credentials,
            limits=limits,
            timeout_s=limit,
            lost_s=deadlines.lost_s,
        )
        try:
            join = Join(0, rank, os.getpid(), workers)
            joined = control.call(join, Joined, timeout_s=limit)
            return cls(
                control,
                joined,
                rank=rank,
                credentials=credentials,
                limits=limits,
                deadlines=deadlines,
                connect=partial(Link.connect, lost_s=deadlines.lost_s),
            )
        except BaseException:
            control.close()
            raise

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).connect, (self._control.addresses, self._credentials)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(id={self.id}, rank={self.rank}, at={self._control.address!r})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def timeout_s(self) -> float:
        """Deadline of every call that names none, in seconds; may be changed."""
        return self._steps.timeout_s

    @timeout_s.setter
    def timeout_s(self, value: float) -> None:
        if not value > 0:
            raise ValueError(f"timeout_s must be > 0, got {value}")
        self._steps.timeout_s = self._exchange.io_timeout_s = value

    def clock(self, group: str = "default") -> int:
        """Steps that this client has ended on a group, with those of older incarnations of its
        rank."""
        return self._steps.clocks.get(group, 0)

    # --- define ------------------------------------------------------------------------------

    def define(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None = None,
        *,
        rule: Rule | None = None,
        group: str = "default",
        timeout_s: float | None = None,
    ) -> Block:
        """Create parameters on the servers. Of several who define the same, the first one's values
        stand; the others are checked and write nothing.

        Args:
            name: of one tensor, or a mapping from names to values that are kept together.
            value: of one tensor; float32 or float64, without a rule int64 as well.
            rule: how a gradient changes the values; None: they can only be assigned.
            group: what it steps together with.
        Returns:
            The block that holds the tensors.
        Raises:
            DefineMismatch: defined in this group before with another shape, dtype or rule. In
                another group the same name is another parameter.
            UnknownRule: the servers were not started with the rule. The name stays free.
            NonFinite, ValueError, TypeError: the values. In all cases nothing was applied.
        """
        self._check()
        described = _spec(rule, group)
        values = as_tensors(name, value)
        dtype = values[0].array.dtype
        if rule is not None:
            load_kernels(dtype, rule)
            for tensor in values:
                if not np.isfinite(tensor.array).all():
                    raise NonFinite(
                        f"the first value of {tensor.name!r} holds NaN or Inf",
                        fix="look at how the model is initialised",
                    )
        pieces = tuple(Piece(tensor.name, tensor.array.shape) for tensor in values)
        limit = self._limit(timeout_s)
        whole = bool(getattr(rule, "whole_tensors", False))
        call = PlaceBlock(0, group, dtype.name, described, pieces, True, limit, whole)
        placed = self._control.call(call, Placed, timeout_s=limit)
        block = self._know(Block(placed.spec))
        if placed.attempt:
            try:
                with self._lock:
                    self._send_values(block, values, placed.attempt, limit)
            except ParamServeError as error:
                if not isinstance(error, Timeout | ServerGone | ClientClosed):
                    self._give_up(block, placed.attempt, limit)
                raise
            self._control.call(Defined(0, block.id, placed.attempt), Ok, timeout_s=limit)
        return block

    def _give_up(self, block: Block, attempt: int, limit: float) -> None:
        """The shards refused a define: its names are free again, here and for everybody."""
        with self._lock:
            self._exchange.blocks.pop(block.id, None)
            self._names.remove(block)
        # Where the coordinator is gone too, there is nothing left to free.
        with contextlib.suppress(ParamServeError):
            self._control.call(Defined(0, block.id, -attempt), Ok, timeout_s=limit)

    def _send_values(
        self, block: Block, values: Sequence[Tensor], attempt: int, limit: float
    ) -> None:
        slot = self._exchange.take(block.nbytes)
        flat = slot.array(block)
        for tensor, start in zip(values, block.starts, strict=False):
            flat[start : start + tensor.array.size] = tensor.array.reshape(-1)
        requests = [
            Define(0, block.spec, attempt, slot.arena, offset_of(block, slot, shard))
            for shard in range(len(self._exchange.shards))
        ]
        self._steps.finish("define", requests, limit, [slot])

    def await_block(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: npt.DTypeLike,
        rule: Rule | None,
        group: str = "default",
        timeout_s: float | None = None,
    ) -> Block:
        """Wait until somebody else has defined exactly these tensors.

        Raises:
            DefineTimeout: nobody did in `timeout_s`.
            DefineMismatch: it has another shape, dtype or rule.
        """
        self._check()
        described = _spec(rule, group)
        kind: np.dtype[Any] = np.dtype(dtype)
        if rule is not None:
            load_kernels(kind, rule)
        pieces = tuple(Piece(name, tuple(shape)) for name, shape in shapes.items())
        limit = self._limit(timeout_s)
        whole = bool(getattr(rule, "whole_tensors", False))
        call = PlaceBlock(0, group, kind.name, described, pieces, False, limit, whole)
        placed = self._control.call(call, Placed, timeout_s=limit)
        return self._know(Block(placed.spec))

    def _know(self, block: Block) -> Block:
        with self._lock:
            known = self._exchange.blocks.setdefault(block.id, block)
            self._names.add(known)
            self._steps.versions.setdefault(known.group, [0] * len(self._exchange.shards))
            return known

    def blocks(self) -> list[Block]:
        """Every block that is defined now, of all groups."""
        self._check()
        with self._lock:
            return self._find(None)

    def _find(self, names: Sequence[str] | None) -> list[Block]:
        """Blocks that hold these names; the coordinator is asked about unknown ones."""
        if names is not None:
            missing = [name for name in names if name not in self._names]
            if not missing:
                return self._names.blocks(names)
            for name in missing:
                if not isinstance(name, str):
                    raise TypeError(f"a name is a str, got {name!r}")
            names = list(names)
        call = Lookup(0, None if names is None else tuple(missing), 0.0)
        found = self._control.call(call, Found, timeout_s=self.timeout_s)
        blocks = [self._know(Block(spec)) for spec in found.blocks]
        return blocks if names is None else self._names.blocks(names)

    # --- by block ----------------------------------------------------------------------------

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
    ) -> Ticket:
        """Push, tick and pull blocks of one group in one message to each shard.

        Args:
            push: with gradients from `gradient_slot`; their slots go back when all have answered.
            pull: blocks whose values the ticket's outcome will have.
            weight: number of samples behind the gradients (> 0).
            skip: there is no usable gradient in this step; under Sync the whole clock is skipped.
            clip_norm: clip by global norm, of the reduced gradient under Sync, else of this one's;
                0: no clipping.
        Raises:
            NonFinite: with rank and tensor.
            ValueError: blocks of another group, a gradient that is not from `gradient_slot`, or a
                number out of its range. In all cases nothing was applied.
        """
        self._check()
        if not 0.0 < weight < math.inf or not 0.0 <= clip_norm < math.inf:
            raise ValueError(f"weight must be > 0, clip_norm >= 0, not {weight} and {clip_norm}")
        for block in [*[each.block for each in push], *pull]:
            if block.group_name != group:
                theirs = block.group_name
                raise ValueError(f"block {block.id} is in group {theirs!r}, not in {group!r}")
        with self._lock:
            first = push[0].block if push else pull[0] if pull else self._group_block(group)
            if first is None:
                raise UnknownName(f"group {group!r} is not defined", fix="define parameters in it")
            self._steps.begin()
            if skip:
                self._gradients.drop(push)
                pushes: Pushes = []
            else:
                pushes, finite = self._gradients.take(push)
                skip = not finite
            if clip_norm and not self._collects and not skip:
                clip(pushes, clip_norm)
                clip_norm = 0.0
            options = StepOptions(tick, weight, skip, clip_norm)
            return self._steps.send("step", first, pushes, pull, options)

    def fetch(
        self, block: Block, field: int, *, timeout_s: float | None = None
    ) -> tuple[Array, tuple[int, ...]]:
        """Read a block's values (field 0) or rule state (1, 2, ...), [block.size], and the update
        counts of its pieces."""
        self._check()
        with self._lock:
            slot = self._exchange.take(block.nbytes)
            requests = [
                Fetch(0, block.id, field, slot.arena, offset_of(block, slot, shard))
                for shard in range(len(self._exchange.shards))
            ]
            operation = self._steps.finish("fetch", requests, self._limit(timeout_s), [slot])
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
            self._steps.finish("assign", requests, self._limit(timeout_s), [slot])

    def reports(self) -> list[ServerBeat]:
        """What each shard has done so far, in shard order: versions, clocks, staleness."""
        self._check()
        with self._lock:
            return self._exchange.reports(self.timeout_s)

    def log(self, values: dict[str, float]) -> None:
        """Record numbers; they reach the driver with the next heartbeat."""
        self._check()
        values = {name: float(value) for name, value in values.items()}
        clock = max(self._steps.clocks.values(), default=0)
        self._heartbeat.log(clock, values)

    def _group_block(self, group: str) -> Block | None:
        """Any block of a group; None if nothing is defined in it."""
        for _ in range(2):
            for block in self._exchange.blocks.values():
                if block.group_name == group:
                    return block
            self._find(None)
        return None

    # --- life --------------------------------------------------------------------------------

    def _limit(self, timeout_s: float | None) -> float:
        return timeout_s if timeout_s is not None else self.timeout_s

    def _check(self) -> None:
        self._check_fork()
        if self._closed:
            if self._reason is not None:
                raise again(self._reason)
            raise ClientClosed(
                f"client {self.id} was closed", fix="make a new one with cluster.client()"
            )

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ClientClosed(
                f"client {self.id} was made in process {self._pid}, before a fork",
                fix="connect anew in the child process",
            )

    def drain(self, timeout_s: float | None = None) -> None:
        """Wait until everything sent has been answered, and raise what was refused unread.

        Raises:
            PushTimeout: something is unanswered after `timeout_s`.
        """
        self._check()
        limit = self._limit(timeout_s)
        if not self._lock.acquire(timeout=limit):  # Another thread's call is under way.
            raise self._steps.late("drain", None, limit)
        try:
            if not self._exchange.settle(limit):
                raise self._steps.late("drain", None, limit)
            self._steps.raise_unread()
        finally:
            self._lock.release()

    def close(self, reason: ParamServeError | None = None, *, leave: bool = True) -> None:
        """Leave the cluster: what was sent is answered first (for up to a second). Idempotent.

        In a forked child this only marks the child's copy.

        Args:
            reason: why the cluster is lost: nothing is answered any more, and calls under way and
                later ones raise this. None: they raise `ClientClosed`.
            leave: False: end without a word, as a process that dies; a worker counts as dead.
        """
        if self._closed:
            return
        if os.getpid() != self._pid:
            self._closed = True
            return
        if reason is None and leave:
            # An error here was raised before, or is lost with the run that this client belongs to.
            with contextlib.suppress(ParamServeError, ConnectionError):
                self.drain(timeout_s=CLOSE_S)
        self._reason = reason
        self._closed = True
        self._exchange.close(reason, bye=leave)
        self._heartbeat.stop()
        if leave:
            # Where the coordinator is gone, there is nothing to leave.
            with contextlib.suppress(ParamServeError):
                self._control.call(Leave(0), Ok, timeout_s=CLOSE_S, slack_s=0.0)
        self._control.close()


def _spec(rule: Rule | None, group: str) -> PolicySpec | None:
    """A rule as it travels, after a look at what a define was given.

    Raises:
        TypeError: no rule, or no name of a group.
        ValueError: its hyper-parameters.
    """
    if not isinstance(group, str) or not group:
        raise TypeError(f"a group's name is a str that is not empty, got {group!r}")
    return None if rule is None else described_by(rule)
