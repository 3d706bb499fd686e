"""Tables by name: who defines one, and which ones this client knows."""

from __future__ import annotations

from typing import Any

from paramserve.client.keyed import KeyedClient
from paramserve.client.table import Table
from paramserve.client.table import TablePush as TablePush
from paramserve.compiling import load_routing
from paramserve.config import ConsistencySpec, RuleSpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core.partition import Block
from paramserve.core.table.options import LRU, TTL, Evict, Init, MinCount, Normal, TableOptions
from paramserve.errors import ParamServeError, ServerGone, Timeout, UnknownName
from paramserve.messages import (
    Define,
    Defined,
    Found,
    Lookup,
    Ok,
    Piece,
    PlaceBlock,
    Placed,
    TableSpec,
)
from paramserve.rules.base import Rule
from paramserve.rules.registry import described_by
from paramserve.rules.rows import row_layout


class TablesClient(KeyedClient):
    """The part of a client that defines and finds tables; see `client.Client`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tables: dict[str, Table] = {}

    def table(
        self,
        name: str,
        dim: int | None = None,
        *,
        rule: Rule | None = None,
        init: Init | None = None,
        dtype: str = "float32",
        admit: MinCount | None = None,
        evict: TTL | LRU | Evict | None = None,
        max_bytes: int = 0,
        seed: int = 0,
        consistency: Policy | None = None,
        timeout_s: float | None = None,
    ) -> Table:
        """A keyed table: made by the first who asks for it with a `dim` and a rule, found by all
        others. Of several who define the same one, all get the same one.

        Args:
            name: of the table, and of the group that steps with it.
            dim: values of a row, 1 to 65536. Without it the table has to be there.
            rule: how a gradient changes a row.
            init: what rows begin with, drawn from (seed, name, key) only: `ps.Uniform`,
                `ps.Normal` (the default, std 0.01), `ps.Constant` or `ps.Zeros`.
            dtype: in which the servers keep values: float32, bfloat16 or float16, the last two
                rounded stochastically. Gradients, pulled rows and the rule's state are float32.
            admit: `ps.MinCount(n)`: a key gets a row at its n-th push; None: at its first use.
            evict: `ps.TTL(clocks=...)`, `ps.LRU(rows=...)` or both, joined by `|`; None: rows stay.
            max_bytes: of the table on one server; 0: what there is. Past it the least recently used
                row goes, if `evict` has an `LRU`; else a push of new keys is refused (`TableFull`).
            seed: of the initial values and of the rounding.
            consistency: the table's own policy; None: `ps.Async()`. Not `ps.DelayCompensated`,
                `ps.LocalSteps` or `ps.ElasticAverage`.
        Returns:
            The table; the same object for the same name.
        Raises:
            DefineMismatch: defined before with other options, or the name is a group of tensors'.
            UnknownName: there is no such table, and no `dim` was given.
            UnknownRule: the servers were not started with the rule or the policy.
            ValueError, TypeError: an option. In all cases nothing was applied.
        """
        self._check()
        if not isinstance(name, str) or not name:
            raise TypeError(f"a table's name is a str that is not empty, got {name!r}")
        known = self._tables.get(name)
        if dim is None:
            return known if known is not None else self._found_table(name)
        options = TableOptions(init if init is not None else Normal(), admit, evict, max_bytes)
        spec = TableSpec(dim, dtype, _seed(seed), options.to_spec())
        described = _described(name, rule, spec, options)
        policy = self._policy_spec(consistency)
        if consistency is not None:
            check_table_policy(name, consistency, True)
        return self._placed(name, described, spec, policy, self._limit(timeout_s))

    def _placed(
        self,
        name: str,
        described: RuleSpec,
        spec: TableSpec,
        policy: ConsistencySpec | None,
        limit: float,
    ) -> Table:
        """The table, on all servers; what can be checked here was checked."""
        load_routing()
        pieces = (Piece(name, (spec.dim,)),)
        call = PlaceBlock(
            0, name, "float32", described, pieces, True, limit, False, policy, table=spec
        )
        placed = self._control.call(call, Placed, timeout_s=limit)
        block = self._know(Block(placed.spec))
        if placed.attempt:
            self._define_table(block, placed.attempt, limit)
        return self._tables.setdefault(name, Table(self, block))

    def _define_table(self, block: Block, attempt: int, limit: float) -> None:
        requests = [Define(0, block.spec, attempt, 0, 0)] * len(self._exchange.shards)
        try:
            with self._lock:
                self._steps.finish("define", requests, limit, ())
        except ParamServeError as error:
            if not isinstance(error, Timeout | ServerGone):
                self._give_up(block, attempt, limit)
            raise
        self._control.call(Defined(0, block.id, attempt), Ok, timeout_s=limit)

    def _found_table(self, name: str) -> Table:
        unknown = UnknownName(
            f"there is no table {name!r}",
            fix="define it first: client.table(name, dim=..., rule=...)",
        )
        try:
            found = self._control.call(Lookup(0, (name,), 0.0), Found, timeout_s=self.timeout_s)
        except UnknownName:
            raise unknown from None
        for spec in found.blocks:
            if spec.table is not None and spec.group_name == name:
                load_routing()
                return self._tables.setdefault(name, Table(self, self._know(Block(spec))))
        raise unknown

    def tables(self) -> list[Table]:
        """All tables of the cluster, in the order in which they were defined."""
        self._check()
        call = Lookup(0, None, 0.0)
        found = self._control.call(call, Found, timeout_s=self.timeout_s)
        names = [spec.group_name for spec in found.blocks if spec.table is not None]
        return [self.table(name) for name in names]


def _described(name: str, rule: Rule | None, spec: TableSpec, options: TableOptions) -> RuleSpec:
    """A table's rule for the servers, and that it and the options go with the table's rows."""
    if rule is None:
        raise ValueError(f"table {name!r} needs a rule, as in rule=ps.Adagrad(lr=0.05)")
    if isinstance(spec.dim, bool) or not isinstance(spec.dim, int) or not 1 <= spec.dim <= 1 << 16:
        raise ValueError(
            f"dim of table {name!r} has to be an int from 1 to 65536, not {spec.dim!r}"
        )
    described = described_by(rule, rows=True)
    row_layout(rule, spec.dim, spec.dtype)
    options.check_dtype(spec.dtype)
    return described


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed has to be an int from 0 to 2**63 - 1, not {seed!r}")
    return seed
