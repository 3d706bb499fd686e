"""Blocks and tables: who defines one, who waits for it, and which ones this client knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client import timeouts
from paramserve.client.connection import Connection
from paramserve.client.labels import are_labels, check_not_labels
from paramserve.client.names import Names, Tensor, as_tensors, check_ruled
from paramserve.client.step_parts import kept_offset
from paramserve.client.steps import Steps
from paramserve.codecs.base import Codec
from paramserve.codecs.registry import as_codec, own_classes
from paramserve.codecs.registry import spec as codec_spec
from paramserve.compiling import load_codecs, load_kernels
from paramserve.config import CodecSpec, ConsistencySpec, RuleSpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import check_table_policy
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core.directory import DIM_MAX
from paramserve.core.partition import Block
from paramserve.core.table.options import TableOptions
from paramserve.errors import (
    ClientClosed,
    DefineTimeout,
    NonFinite,
    ParamServeError,
    ServerGone,
    Timeout,
    UnknownName,
    warn_user,
)
from paramserve.logs import write_line
from paramserve.messages import (
    BlockSpec,
    Define,
    Defined,
    Found,
    Link,
    Lookup,
    Ok,
    Piece,
    PlaceBlock,
    Placed,
    TableSpec,
    Undefine,
)
from paramserve.rules.base import Rule
from paramserve.rules.layout import WIDE, words_of
from paramserve.rules.registry import as_rule, described_by
from paramserve.rules.rows import row_layout

SHOWN_MAX = 20
"""Tables in an error."""


class Directory:
    """What is defined on the servers, as this client knows it.

    Attributes:
        names: of tensors, with the blocks that hold them.
    """

    def __init__(self, connection: Connection, steps: Steps) -> None:
        self.names = Names()
        self._connection = connection
        self._steps = steps
        self._codecs: dict[str, type[Codec]] = {}
        """User's own codecs, by name, with which this client has defined something."""
        self._control = connection.control
        self._exchange = connection.exchange
        self._lock = connection.lock

    # --- blocks ----------------------------------------------------------------------------------

    def define(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None,
        *,
        rule: Rule | Callable[..., Any] | None,
        group: str,
        consistency: Policy | None,
        nth: int,
        aliases: Mapping[str, str] | None,
        links: Sequence[Link],
        dtypes: Mapping[str, str] | None,
        push: Codec | None,
        pull: Codec | None,
        dtype: str | None,
        timeout_s: float | None,
    ) -> Block:
        """See `Client.define`."""
        self._connection.check()
        codecs = self._codec_specs(push, pull)
        rule = None if rule is None else as_rule(rule)
        described = _spec(rule, group)
        policy = self.policy_spec(consistency)
        values = as_tensors(name, value, dtype)
        kept_dtype, half = values[0].array.dtype, values[0].half
        if rule is not None:
            check_ruled(kept_dtype)
            load_kernels(kept_dtype, rule, half)
            for tensor in values:
                if not np.isfinite(tensor.array).all():
                    raise NonFinite(
                        f"the first value of {tensor.name!r} holds NaN or Inf",
                        fix="look at how the model is initialised",
                    )
        pieces = tuple(Piece(tensor.name, tensor.array.shape) for tensor in values)
        limit = self._connection.limit(timeout_s)
        whole = _needs_whole(rule, push)
        call = PlaceBlock(
            0,
            group,
            kept_dtype.name,
            described,
            pieces,
            True,
            limit,
            whole,
            policy,
            nth=nth,
            aliases=dict(aliases or {}),
            push=codecs[0],
            pull=codecs[1],
            half=half,
            links=tuple(links),
            dtypes=dict(dtypes or {}),
        )
        block, attempt = self._place(call)
        if attempt:
            self._define(block, attempt, limit, values)
        return block

    def _place(self, call: PlaceBlock) -> tuple[Block, int]:
        """The block of a call, and the attempt with which this client must define it; 0: it is
        defined."""
        placed = self._control.call(call, Placed, timeout_s=call.wait_s)
        return self._know(self._block(placed.spec)), placed.attempt

    def _define(
        self,
        block: Block,
        attempt: int,
        limit: float,
        values: Sequence[Tensor] = (),
        fill: Callable[[Block], None] | None = None,
    ) -> None:
        """Define a block on the shards, with its values unless it is a table. Other clients find it
        when it is filled: the coordinator is told then."""
        try:
            with self._lock:
                if block.table is not None:
                    self._steps.ask_all("define", Define(0, block.spec, attempt, 0, 0), limit)
                else:
                    self._send_values(block, values, attempt, limit)
            if fill is not None:
                fill(block)
        except (ParamServeError, ValueError) as error:
            if not isinstance(error, Timeout | ServerGone | ClientClosed):
                self._give_up(block, attempt, limit)
            raise
        self._control.call(Defined(0, block.id, attempt), Ok, timeout_s=limit)

    def _give_up(self, block: Block, attempt: int, limit: float) -> None:
        """The shards refused a define: its names are free again, here and for all clients.

        The shards that took it forget it first: the next define may give its group another policy.
        """
        is_removed = False
        with self._lock:
            with contextlib.suppress(ParamServeError):  # the names stay taken
                self._steps.ask_all("define", Undefine(0, block.id, attempt), limit)
                is_removed = True
            self._exchange.blocks.pop(block.id, None)
            if block.table is None:
                self.names.remove(block)
            self._steps.undefined(block)
        if not is_removed:
            return
        # Where the coordinator is gone too, there is nothing left to free.
        with contextlib.suppress(ParamServeError):
            self._control.call(Defined(0, block.id, -attempt), Ok, timeout_s=limit)

    def _send_values(
        self, block: Block, values: Sequence[Tensor], attempt: int, limit: float
    ) -> None:
        """Send every shard its part of a block's first values, in a `Define`, and wait until all
        have them."""
        slot = self._exchange.take(block.kept_bytes)
        flat = slot.kept_values(block)
        for tensor, start in zip(values, block.starts, strict=False):
            flat[start : start + tensor.array.size] = tensor.array.reshape(-1)
        requests = [
            Define(0, block.spec, attempt, slot.arena, kept_offset(block, slot, shard))
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
        consistency: Policy | None = None,
        nth: int = -1,
        push: Codec | None = None,
        pull: Codec | None = None,
        half: str | None = None,
        timeout_s: float | None = None,
    ) -> Block:
        """Wait until another client has defined exactly these tensors.

        Args:
            dtype: in which the servers keep them.
            half: as `BlockSpec.half`.
            timeout_s: None: as long as for a step of rank 0 (`Deadlines.busy_s` while it lives).
        Raises:
            DefineTimeout: none did in that time.
            DefineMismatch: it has another shape, dtype or rule, the group has another policy, or
                its block `nth` was defined with other names.
        """
        self._connection.check()
        described = _spec(rule, group)
        policy = self.policy_spec(consistency)
        kind: np.dtype[Any] = np.dtype(dtype)
        if rule is not None:
            load_kernels(kind, rule, half)
        pieces = tuple(Piece(name, tuple(shape)) for name, shape in shapes.items())
        limit = self._connection.limit(timeout_s)
        whole = _needs_whole(rule, push)
        codecs = self._codec_specs(push, pull)
        call = PlaceBlock(
            0,
            group,
            kind.name,
            described,
            pieces,
            False,
            limit,
            whole,
            policy,
            nth=nth,
            push=codecs[0],
            pull=codecs[1],
            half=half,
        )
        if timeout_s is not None or self._connection.rank < 1:
            return self._place(call)[0]
        return self._await(call)

    def _await(self, call: PlaceBlock) -> Block:
        """Wait until rank 0 has defined a block: while it lives, as long as for its steps."""
        steps = self._steps
        began, limit_s, waited_s, warned = steps.now(), steps.waits.timeout_s, 0.0, False
        before = 0
        while True:
            wait_s = min(timeouts.SAY_S, max(limit_s - waited_s, 0.0))
            try:
                return self._place(structs.replace(call, wait_s=wait_s))[0]
            except DefineTimeout as error:
                waited_s = steps.now() - began
                busy = self._connection.all_live([0])
                limit_s = steps.waits.patience_s if busy else steps.waits.timeout_s
                knob = timeouts.knob_of(busy)
                if waited_s >= limit_s:
                    error.failed = error.failed.replace(f"{wait_s:.1f} s", f"{waited_s:.1f} s")
                    error.fix = f"look at rank 0, which defines it, or raise {knob}"
                    raise
                collective = steps.waits.open_collective([0])
                if collective is not None and collective.number == before:
                    rank = self._connection.rank
                    raise timeouts.cannot_end(rank, "define", collective, waited_s) from None
                before = collective.number if collective is not None else 0
            if not warned and waited_s >= timeouts.SAY_S:
                warned = True
                warn_user(
                    f"rank {self._connection.rank} has waited {waited_s:.0f} s for rank 0 to "
                    f"define group {call.group!r}; it {timeouts.up_to(limit_s, knob)}"
                )

    def _block(self, spec: BlockSpec) -> Block:
        return Block(spec, self._codecs)

    def _codec_specs(
        self, push: Codec | None, pull: Codec | None
    ) -> tuple[CodecSpec | None, CodecSpec | None]:
        """Codecs as they travel; classes of the user's own are known here from now on.

        Raises:
            TypeError: one is none, or cannot travel.
        """
        specs = []
        for what, argument in (("push", push), ("pull", pull)):
            codec = None if argument is None else as_codec(argument, what)
            specs.append(None if codec is None else codec_spec(codec))
            if codec is not None:
                self._codecs |= own_classes(codec, f"{what}=")
        return specs[0], specs[1]

    def _know(self, block: Block) -> Block:
        """Make a block known to this client, with the codecs and kernels that it needs, and give
        the one that is known."""
        load_codecs(block.spec)
        if block.spec.half is not None:
            load_kernels(block.kept, half=block.spec.half)
        with self._lock:
            self._exchange.check_whole()
            self._exchange.interrupted_in = "a define"
            existing = self._exchange.blocks.setdefault(block.id, block)
            if existing.table is None:
                self.names.add(existing)
            self._steps.defined(existing)
            self._exchange.interrupted_in = ""
        return existing

    def policy_spec(self, consistency: Policy | None) -> ConsistencySpec | None:
        """A group's policy as it travels, if one is given.

        Raises:
            TypeError: it is no policy.
            ValueError: it cannot work with this many workers.
        """
        if consistency is None:
            return None
        described = policy_spec(consistency)
        if workers := self._connection.workers:
            consistency.check(workers)
        return described

    def find(self, names: Sequence[str] | None) -> list[Block]:
        """Blocks that hold these names, all blocks of tensors for None. The coordinator is asked
        about unknown names; the caller holds the lock."""
        self._exchange.check_whole()
        if names is not None:
            missing = [name for name in names if name not in self.names]
            if not missing:
                return self.names.blocks(names)
            for name in missing:
                if not isinstance(name, str):
                    raise TypeError(f"a name is a str, got {name!r}")
            names = list(names)
        specs = self._look_up(None if names is None else tuple(missing))
        candidates = [self._know(self._block(spec)) for spec in specs]
        for block in candidates:
            if block.table is not None and names is not None:
                raise UnknownName(
                    f"{block.group_name!r} is a table, and no parameter",
                    fix="use client.table(name)",
                )
        blocks = [block for block in candidates if block.table is None]
        return blocks if names is None else self.names.blocks(names)

    def any_in(self, group: str) -> Block | None:
        """Any block of a group; None if nothing is defined in it."""
        for _ in range(2):
            for block in self._exchange.blocks.values():
                if block.group_name == group:
                    return block
            self.find(None)
        return None

    def defined_in(self, group: str) -> Block:
        """Any block of a group.

        Raises:
            UnknownName: nothing is defined in it.
        """
        block = self.any_in(group)
        if block is None:
            names = sorted({each.group_name for each in self._exchange.blocks.values()})
            listed = ", ".join(map(repr, names)) if names else "none"
            raise UnknownName(
                f"group {group!r} is not defined; there are: {listed}",
                fix="name one of these, or define parameters in it",
            )
        return block

    # --- tables ----------------------------------------------------------------------------------

    def define_table(
        self,
        name: str,
        dim: int,
        *,
        rule: Rule | Callable[..., Any] | None,
        dtype: str,
        options: TableOptions,
        seed: int,
        consistency: Policy | None,
        timeout_s: float | None,
        labels: int = 0,
        push: Codec | None = None,
        pull: Codec | None = None,
        fill: Callable[[Block], None] | None = None,
    ) -> Block:
        """See `Client.table`: the block of a table that is on all servers.

        Args:
            labels: strings of its keys that are kept at most; 0: none.
            fill: puts the first rows, before another client finds the table; one that waits for it
                does so for `Deadlines.busy_s`.
        """
        codecs = self._codec_specs(push, pull)
        rule = None if rule is None else as_rule(rule)
        described = _described(name, rule, dim, dtype, options)
        spec = TableSpec(dim * words_of(dtype), dtype, _seed(seed), options.to_spec(), labels)
        if dtype in WIDE and codecs != (None, None):
            raise ValueError(
                f"a codec encodes float32, and table {name!r} counts in {dtype}: leave push and "
                "pull out"
            )
        if dtype == "int64":
            _check_counting(name, consistency)
        policy = self.policy_spec(consistency)
        if consistency is not None:
            check_table_policy(name, consistency, True)
        limit = wait_s = self._connection.limit(timeout_s)
        if fill is not None:
            wait_s = max(limit, self._connection.deadlines.busy_s)
        pieces = (Piece(name, (spec.dim,)),)
        call = PlaceBlock(
            0,
            name,
            "float32",
            described,
            pieces,
            True,
            wait_s,
            False,
            policy,
            table=spec,
            push=codecs[0],
            pull=codecs[1],
        )
        block, attempt = self._place(call)
        if attempt:
            self._define(block, attempt, limit, fill=fill)
            if policy is None and block.spec.consistency is not None:
                which = " of int64" if dtype == "int64" else ""
                write_line(
                    f"table {name!r} steps under ps.Async(): the run's policy is not "
                    f"for tables{which}. To choose another: client.table(..., consistency=)"
                )
        return block

    def find_table(self, name: str) -> Block:
        """The block of a table that was defined, by any client.

        Raises:
            UnknownName: there is none.
        """
        with contextlib.suppress(UnknownName):
            for spec in self._look_up((name,)):
                if spec.table is not None and spec.group_name == name:
                    return self._know(self._block(spec))
        tables = [block.group_name for block in self.tables()]
        quoted = [repr(each) for each in tables if not are_labels(each)]
        more = f" and {len(quoted) - SHOWN_MAX} more" if quoted[SHOWN_MAX:] else ""
        listed = f"{', '.join(quoted[:SHOWN_MAX])}{more}" if quoted else "none"
        raise UnknownName(
            f"there is no table {name!r}; the tables: {listed}",
            fix="give one of these, or define it first: client.table(name, dim=..., rule=...)",
        )

    def tables(self) -> list[Block]:
        """All tables of the cluster, in the order in which they were defined."""
        specs = self._look_up(None)
        return [self._know(self._block(spec)) for spec in specs if spec.table is not None]

    def _look_up(self, names: tuple[str, ...] | None) -> Sequence[BlockSpec]:
        """Blocks with these names (None: all), as the coordinator knows them."""
        timeout_s = self._connection.timeout_s
        return self._control.call(Lookup(0, names, 0.0), Found, timeout_s=timeout_s).blocks


def _needs_whole(rule: Rule | None, push: Codec | None) -> bool:
    """Whether no tensor may be cut over two servers."""
    by_codec = push is not None and push.whole_tensors
    return by_codec or bool(getattr(rule, "whole_tensors", False))


def _spec(rule: Rule | None, group: str) -> RuleSpec | None:
    """A rule as it travels, after a look at what a define was given.

    Raises:
        TypeError: no rule, or no name of a group.
        ValueError: its hyper-parameters, or the name is one that labels of a table could have.
    """
    if not isinstance(group, str) or not group:
        raise TypeError(f"a group's name is a str that is not empty, got {group!r}")
    check_not_labels(group)
    return None if rule is None else described_by(rule)


def _described(
    name: str, rule: Rule | None, dim: int, dtype: str, options: TableOptions
) -> RuleSpec:
    """A table's rule for the servers, and that it and the options go with the table's rows."""
    if rule is None:
        raise ValueError(f"table {name!r} needs a rule, as in rule=ps.Adagrad(lr=0.05)")
    most = DIM_MAX // words_of(dtype)
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= most:
        raise ValueError(f"dim of table {name!r} has to be an int from 1 to {most}, not {dim!r}")
    described = described_by(rule, rows=True)
    row_layout(rule, dim * words_of(dtype), dtype)
    options.check_dtype(dtype)
    return described


def _check_counting(name: str, policy: Policy | None) -> None:
    """Refuse the mean of the workers' counts as the policy of a table of int64.

    Raises:
        ValueError: it would take one. Nothing was applied.
    """
    if getattr(policy, "reduce", "sum") == "mean":
        raise ValueError(
            f"table {name!r} counts in int64, and {policy!r} applies the mean of what the workers "
            'push, which is no whole number: give the table ps.Sync(reduce="sum"), ps.Async() or '
            'dtype="float64"'
        )


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed has to be an int from 0 to 2**63 - 1, not {seed!r}")
    return seed
