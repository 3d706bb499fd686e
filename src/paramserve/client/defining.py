"""Blocks: who defines one, who waits for it, and which ones this client knows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.life import ClientLife
from paramserve.client.names import Tensor, as_tensors
from paramserve.client.steps import offset_of
from paramserve.compiling import load_kernels
from paramserve.config import ConsistencySpec, RuleSpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core.partition import Block
from paramserve.errors import (
    ClientClosed,
    NonFinite,
    ParamServeError,
    ServerGone,
    Timeout,
    UnknownName,
)
from paramserve.messages import (
    Define,
    Defined,
    Found,
    Lookup,
    Ok,
    Piece,
    PlaceBlock,
    Placed,
    Undefine,
)
from paramserve.rules.base import Rule
from paramserve.rules.registry import described_by


class DefiningClient(ClientLife):
    """The part of a client that defines and finds blocks; see `client.Client`."""

    def define(
        self,
        name: str | Mapping[str, npt.ArrayLike],
        value: npt.ArrayLike | None = None,
        *,
        rule: Rule | None = None,
        group: str = "default",
        consistency: Policy | None = None,
        nth: int = -1,
        timeout_s: float | None = None,
    ) -> Block:
        """Create parameters on the servers. Of several who define the same, the first one's values
        stand; the others are checked and write nothing.

        Args:
            name: of one tensor, or a mapping from names to values that are kept together.
            value: of one tensor; float32 or float64, without a rule int64 as well.
            rule: how a gradient changes the values; None: they can only be assigned.
            group: what it steps together with.
            consistency: of the whole group, given with its first define; None: the group's, or the
                cluster's if it has none of its own.
            nth: which one it is of the blocks that all ranks define in this group, each by itself;
                -1: not said. Then ranks with other names for it do not wait for each other.
        Returns:
            The block that holds the tensors.
        Raises:
            DefineMismatch: defined in this group before with another shape, dtype or rule, or the
                group has another policy. In another group the same name is another parameter.
            UnknownRule: the servers were not started with the rule or the policy. The name stays
                free.
            NonFinite, ValueError, TypeError: the values. In all cases nothing was applied.
        """
        self._check()
        described = _spec(rule, group)
        policy = self._policy_spec(consistency)
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
        call = PlaceBlock(
            0, group, dtype.name, described, pieces, True, limit, whole, policy, nth=nth
        )
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
        """The shards refused a define: its names are free again, here and for everybody.

        The shards that took it forget it first: the next define may give its group another policy.
        """
        requests = [Undefine(0, block.id, attempt)] * len(self._exchange.shards)
        forgotten = False
        with self._lock:
            with contextlib.suppress(ParamServeError):  # the names stay taken
                self._steps.finish("define", requests, limit, ())
                forgotten = True
            self._exchange.blocks.pop(block.id, None)
            if block.table is None:
                self._names.remove(block)
            if all(each.group != block.group for each in self._exchange.blocks.values()):
                self._terms.undefined(block.group)
        if not forgotten:
            return
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
        consistency: Policy | None = None,
        nth: int = -1,
        timeout_s: float | None = None,
    ) -> Block:
        """Wait until somebody else has defined exactly these tensors.

        Raises:
            DefineTimeout: nobody did in `timeout_s`.
            DefineMismatch: it has another shape, dtype or rule, the group has another policy, or
                its block `nth` was defined with other names.
        """
        self._check()
        described = _spec(rule, group)
        policy = self._policy_spec(consistency)
        kind: np.dtype[Any] = np.dtype(dtype)
        if rule is not None:
            load_kernels(kind, rule)
        pieces = tuple(Piece(name, tuple(shape)) for name, shape in shapes.items())
        limit = self._limit(timeout_s)
        whole = bool(getattr(rule, "whole_tensors", False))
        call = PlaceBlock(
            0, group, kind.name, described, pieces, False, limit, whole, policy, nth=nth
        )
        placed = self._control.call(call, Placed, timeout_s=limit)
        return self._know(Block(placed.spec))

    def _know(self, block: Block) -> Block:
        with self._lock:
            self._exchange.check_whole()
            self._exchange.unfinished = "a define"
            known = self._exchange.blocks.setdefault(block.id, block)
            if known.table is None:
                self._names.add(known)
            self._terms.defined(known.group, known.spec.consistency)
            self._steps.versions.setdefault(known.group, [0] * len(self._exchange.shards))
            self._exchange.unfinished = ""
            return known

    def _policy_spec(self, consistency: Policy | None) -> ConsistencySpec | None:
        """A group's policy as it travels, if one is given.

        Raises:
            TypeError: it is no policy.
            ValueError: it cannot work with this many workers.
        """
        if consistency is None:
            return None
        described = policy_spec(consistency)
        if self.workers:
            consistency.check(self.workers)
        return described

    def blocks(self) -> list[Block]:
        """Every block of tensors that is defined now, of all groups."""
        self._check()
        with self._lock:
            return self._find(None)

    def _find(self, names: Sequence[str] | None) -> list[Block]:
        """Blocks that hold these names; the coordinator is asked about unknown ones."""
        self._exchange.check_whole()
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
        known = [self._know(Block(spec)) for spec in found.blocks]
        for block in known:
            if block.table is not None and names is not None:
                raise UnknownName(
                    f"{block.group_name!r} is a table, and no parameter",
                    fix="use client.table(name)",
                )
        blocks = [block for block in known if block.table is None]
        return blocks if names is None else self._names.blocks(names)

    def _group_block(self, group: str) -> Block | None:
        """Any block of a group; None if nothing is defined in it."""
        for _ in range(2):
            for block in self._exchange.blocks.values():
                if block.group_name == group:
                    return block
            self._find(None)
        return None

    def _defined_in(self, group: str) -> Block:
        """Any block of a group.

        Raises:
            UnknownName: nothing is defined in it.
        """
        block = self._group_block(group)
        if block is None:
            raise UnknownName(f"group {group!r} is not defined", fix="define parameters in it")
        return block


def _spec(rule: Rule | None, group: str) -> RuleSpec | None:
    """A rule as it travels, after a look at what a define was given.

    Raises:
        TypeError: no rule, or no name of a group.
        ValueError: its hyper-parameters.
    """
    if not isinstance(group, str) or not group:
        raise TypeError(f"a group's name is a str that is not empty, got {group!r}")
    return None if rule is None else described_by(rule)
