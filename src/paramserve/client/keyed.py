"""A client's tables: pushes of rows, those of several tables in one message to each shard.

Whole tables are read and written here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client.connection import Connection
from paramserve.client.exchange import answers_by_shard
from paramserve.client.labels import DIM, Labels, labels_kept, labels_options
from paramserve.client.names import as_keys, as_rows
from paramserve.client.row_encoding import RowEncoder
from paramserve.client.row_reads import RowRead, RowReads, TableRead
from paramserve.client.row_slots import RowPush, class_bytes, lay_named, lay_push
from paramserve.client.rows import CheckedRows, KeyedTable, TablePush
from paramserve.client.staging import NOTHING_STAGED, Staged, fail_staged
from paramserve.client.step_parts import (
    StepOptions,
    StepParts,
    check_row_hyper,
    check_weight,
)
from paramserve.client.steps import Steps
from paramserve.client.ticket import Ticket
from paramserve.config import LABELS
from paramserve.consistency.built_in import Async
from paramserve.core.partition import Block
from paramserve.core.table import routing, wide
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.parts import Records, records_at, records_bytes
from paramserve.errors import NonFinite, Overloaded, ParamServeError
from paramserve.messages import (
    Contains,
    Delete,
    Done,
    Put,
    Scan,
    ShardRequest,
    TableReport,
)
from paramserve.rules.add import Add
from paramserve.rules.base import Hyper

Array = npt.NDArray[Any]

SCAN_ROWS_MIN = 1024
"""A scan looks at this many rows at a time at least, if it may: some can be free."""
NAMED_KEYS = 1 << 18
"""Keys in one message, of those that are looked for or deleted: 2 MiB."""
STAGED_ROWS_MAX = 1 << 24
"""Rows of one table that may wait for its tick, under a policy that collects."""


class Keyed:
    """What a client pushes to tables, and whole tables.

    Attributes:
        reads: of rows.
        encoder: of gradients, where a table has codecs.

    Args:
        client: that the tables are got from, for their users.
    """

    def __init__(self, connection: Connection, steps: Steps, client: Any) -> None:
        self.reads = RowReads(connection, steps)
        self.encoder = RowEncoder(connection.rank, connection.exchange)
        self._connection = connection
        self._steps = steps
        self._exchange = connection.exchange
        self._lock = connection.lock
        self._client = client
        self._labels: dict[int, Labels] = {}
        """Labels by table's block."""
        self._good_hyper: dict[int, Hyper] = {}
        """Hyper-parameters found good last, by table's block."""

    def labels_of(self, block: Block) -> Labels | None:
        """The strings of a table's keys; None: it was defined without."""
        assert block.table is not None
        if not block.table.labels:
            return None
        limit = labels_kept(block.table, len(self._exchange.shards))
        labels = self._client.table(block.group_name + LABELS)
        return self._labels.setdefault(block.id, Labels(labels, limit, self._connection.workers))

    def define_labels(self, block: Block) -> None:
        """Define the table of a table's labels."""
        assert block.table is not None
        self._client.directory.define_table(
            block.group_name + LABELS,
            DIM,
            rule=Add(),
            dtype="float32",
            options=labels_options(block.table),
            seed=0,
            consistency=Async(),  # strings are there before the step that uses them has ended
            timeout_s=None,
        )

    def prefetch(self, reads: Iterable[TableRead | tuple[Any, ...]]) -> list[RowRead]:
        """See `Client.prefetch_tables`."""
        requests: list[tuple[Block, Array]] = []
        for table, keys in (TableRead(*each) for each in reads):
            self._check_own(table)
            requests.append((table.block, as_keys(keys, table.name)[0]))
        return self.reads.prefetch(requests)

    # --- pushes ----------------------------------------------------------------------------------

    def push(
        self,
        pushes: Sequence[TablePush],
        *,
        tick: bool = True,
        weight: float | None = None,
        skip: bool = False,
        leased: bool = False,
        numbered: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """See `Client.push_tables`."""
        self._connection.check()
        if not pushes:
            raise ValueError("a step of tables names at least one")
        with self._lock:
            rows = self.checked(pushes)
            return self.push_rows(
                rows, tick=tick, weight=weight, skip=skip, leased=leased, numbered=numbered
            )

    def checked(self, pushes: Sequence[TablePush]) -> list[CheckedRows]:
        """What a step of several tables pushes; raises as `Table.push`."""
        for push in pushes:
            self._check_own(push.table)
        names = [push.table.name for push in pushes]
        if len(set(names)) != len(names):
            raise ValueError(f"a step names the tables {names}: name each of them once")
        most = self._exchange.requests - 1
        if len(names) > most:
            raise ValueError(
                f"a step names {len(names)} tables, at most {most} go in one: put fields with rows "
                "of one width into one table, with keys of ps.keys_of(column, field=its name)"
            )
        return [_checked_push(push) for push in pushes]

    def push_rows(
        self,
        pushes: Sequence[CheckedRows],
        *,
        tick: bool = False,
        weight: float | None = None,
        skip: bool = False,
        leased: bool = False,
        numbered: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """Push rows that have been checked, each of another table of this client; see `push`."""
        if self._connection.checks:
            self._connection.check()
        with self._lock:
            collects: list[bool] = []
            if not tick:
                for push in pushes:
                    collects += [self._steps.collects(push.block)]
            if True not in collects:
                parts = self.parts(pushes, tick=tick, weight=weight, skip=skip)
                if leased or numbered is not None:
                    parts[-1] = structs.replace(parts[-1], leased=leased, numbered=numbered)
                tickets = self._steps.send(parts)
                return joined(tickets) if tickets[1:] else tickets[0]
            self._steps.raise_unread()
            deferred = [self._to_keep(push, weight) for push in compress(pushes, collects)]
            others = [push for push, keep in zip(pushes, collects, strict=True) if not keep]
            tickets = []
            if others:
                parts = self.parts(others, tick=False, weight=weight, skip=skip)
                tickets = self._steps.send(parts)
            tickets += [self._keep_rows(push, weight, skip) for push in deferred]
            return joined(tickets)

    def _staged(self, table: str) -> Sequence[CheckedRows]:
        """What waits for a table's tick."""
        return self._steps.staged[table].rows if table in self._steps.staged else ()

    def _to_keep(self, push: CheckedRows, weight: float | None) -> CheckedRows:
        """Copies of gradients that wait for their table's tick; raises as `Table.push`."""
        block, name = push.block, push.block.group_name
        check_weight(weight)
        self._steps.staged.check_same_weight(name, weight)
        keys, values, staged = push.keys, push.values, self._staged(name)
        self._check_hyper(block, self._one_hyper(name, [*staged, push]))
        bad = wide.first_bad(values if push.wide is None else values.view(push.wide))
        if bad >= 0 and self._steps.refuses(block):
            raise self._bad_row(block, int(keys[bad]))
        waiting = sum(each.keys.size for each in staged)
        if waiting + len(keys) > STAGED_ROWS_MAX:
            raise Overloaded(
                f"{waiting} rows of table {name!r} wait for its tick, and {len(keys)} "
                f"more came; at most {STAGED_ROWS_MAX} may",
                fix="end the step with client.tick(table.name), or give the table ps.Async()",
            )
        return CheckedRows(push.block, keys.copy(), values.copy(), push.hyper)

    def _keep_rows(self, push: CheckedRows, weight: float | None, skip: bool) -> Ticket:
        """Keep gradients until their table's tick."""
        staged = self._steps.staged.get(push.block.group_name)
        if staged is None:
            staged = Staged()
        if not skip:
            staged.rows.append(push)
        return self._steps.stage(push.block, staged, weight)

    def _check_own(self, table: KeyedTable) -> None:
        if table.client is not self._client:
            raise ValueError(f"table {table.name!r} was got from another client")

    def _check_hyper(self, block: Block, hyper: Hyper | None) -> None:
        """Check hyper-parameters of rows; most steps have those of the one before."""
        if hyper is not None and self._good_hyper.get(block.id) != hyper:
            check_row_hyper(block, hyper)
            self._good_hyper[block.id] = hyper

    def _one_hyper(self, table: str, pushes: Sequence[CheckedRows]) -> Hyper | None:
        """The hyper-parameters of a step's pushes to one table; those without keys say nothing."""
        hypers = {push.hyper for push in pushes if push.keys.size or push.hyper is not None}
        if len(hypers) > 1:
            raise ValueError(
                f"the step of table {table!r} under way has pushes with the hyper-parameters "
                f"{', '.join(map(str, hypers))}: a step has the same ones throughout"
            )
        return next(iter(hypers), None)

    def parts(
        self, pushes: Sequence[CheckedRows], *, tick: bool, weight: float | None, skip: bool
    ) -> list[StepParts]:
        """Capture a step's gradients of tables; the caller holds the lock, and sends them.

        Raises:
            As `Table.push`: nothing is captured.
        """
        # Loops and `+=`, as in `Steps`: a comprehension or an `append` is one call more.
        if weight is not None:
            check_weight(weight)
            for push in pushes:
                self._steps.staged.check_same_weight(push.block.group_name, weight)
        hypers: list[Hyper | None] = []
        for push in pushes:
            hyper, waiting = push.hyper, self._staged(push.block.group_name) if tick else ()
            if waiting:
                hyper = self._one_hyper(push.block.group_name, [*waiting, push])
            if hyper is not None:
                self._check_hyper(push.block, hyper)
            hypers += [hyper]
        self._steps.begin(requests=len(pushes) + 1)
        parts: list[StepParts] = []
        group, staged = "", NOTHING_STAGED
        if tick and pushes:
            self._exchange.interrupted_in = "a step"
        try:
            for push, hyper in zip(pushes, hypers, strict=True):
                block, keys, values = push.block, push.keys, push.values
                group = block.group_name
                if tick:
                    staged = self._steps.staged.pop(group, NOTHING_STAGED)
                if staged.rows:
                    keys = np.concatenate([*(each.keys for each in staged.rows), keys])
                    values = np.concatenate([*(each.values for each in staged.rows), values])
                row_pushes: tuple[RowPush, ...] = ()
                if keys.size and not skip:
                    row_pushes = (self._captured(block, keys, values, hyper),)
                    self.reads.wrote(block, keys)
                self.reads.base_of_push(block)
                bad = bool(row_pushes) and row_pushes[0].bad >= 0
                step_weight = staged.weight if weight is None else weight
                options = StepOptions(
                    tick, 1.0 if step_weight is None else step_weight, skip or bad
                )
                what = "step" if tick else "push"
                parts += [
                    StepParts(what, block, (), (), options, row_pushes, (), False, staged.tickets)
                ]
        except BaseException as error:
            fail_staged(group, staged.tickets, error)
            self.unsent(parts, error)
            raise
        return parts

    def unsent(self, parts: Sequence[StepParts], why: BaseException) -> None:
        """Captured parts are not sent, nor what waited for their tick."""
        self._exchange.give_back([slot for each in parts for slot in each.slots])
        for each in parts:
            fail_staged(each.block.group_name, each.staged, why)
        self._exchange.interrupted_in = ""

    def _captured(self, block: Block, keys: Array, values: Array, hyper: Hyper | None) -> RowPush:
        """Lay rows' gradients into a slot, encoded where the table has a codec of pushes. Raises
        `NonFinite`: one holds NaN or Inf, and the policy refuses that; the slot is free again."""
        push = lay_push(self._exchange, block, keys, values, hyper)
        if push.bad >= 0 and self._steps.refuses(block):
            self._exchange.give_back([push.slot])
            raise self._bad_row(block, int(keys[push.bad]))
        codecs = block.row_codecs
        if codecs is None or push.bad >= 0:
            return push
        if self._exchange.shared and not codecs.push_even_local:
            return push
        return self.encoder.encoded(push)

    def _bad_row(self, block: Block, key: int) -> NonFinite:
        rank = self._connection.rank
        who = f"rank {rank}" if rank >= 0 else "a client without a rank"
        labels = self._labels.get(block.id)
        label = labels.sent_string(key) if labels is not None else ""
        which = f"{key} ({label!r})" if label else str(key)
        return NonFinite(
            f"the gradient of key {which} of table {block.group_name!r} on {who} holds NaN or Inf, "
            "or its sum with others of that key does",
            fix="lower the learning rate, clip, or use on_nonfinite='skip' in the table's policy",
        )

    # --- whole tables ----------------------------------------------------------------------------

    def reports(self, block: Block) -> list[TableReport]:
        """What each shard has of a table, in shard order."""
        by_shard = {
            beat.shard: report.table
            for beat in self._connection.reports()
            for report in beat.groups
            if report.name == block.group_name and report.table is not None
        }
        missing = [s.number for s in self._exchange.shards if s.number not in by_shard]
        if missing:
            raise ParamServeError(
                f"shards {missing} said nothing of table {block.group_name!r}",
                fix="look at these servers",
            )
        return [by_shard[shard.number] for shard in self._exchange.shards]

    def scan(
        self, block: Block, rows: int, width: int, idle: bool, timeout_s: float | None
    ) -> Iterator[Records]:
        """Whole rows, shard by shard; see `Table.scan`."""
        # Memory is taken for a whole part: not for more rows than there are.
        most = max(report.rows for report in self.reports(block))
        rows = min(rows, max(most, SCAN_ROWS_MIN))
        for shard in range(len(self._exchange.shards)):
            cursor = 0
            while cursor >= 0:
                request = Scan(0, block.id, cursor, rows, width, 0, 0, idle)
                records, cursor = self._scan_part(block, shard, request, timeout_s)
                if records.keys.size:
                    yield records

    def _scan_part(
        self, block: Block, shard: int, request: Scan, timeout_s: float | None
    ) -> tuple[Records, int]:
        """Read some rows of one shard from a cursor on; also where the next ones begin. The other
        shards get a request without rows, so that all have the same numbers."""
        self._connection.check()
        assert block.table is not None
        shape = (request.rows, block.table.dim, request.width if request.width >= 0 else None)
        with self._lock:
            slot = self._exchange.take(class_bytes(records_bytes(*shape, request.idle)))
            request = structs.replace(request, arena=slot.arena, offset=slot.offset)
            others = structs.replace(request, rows=0)
            requests: list[ShardRequest] = [
                request if each == shard else others for each in range(len(self._exchange.shards))
            ]
            operation = self._steps.finish("fetch", requests, timeout_s, [slot])
            count, after = answers_by_shard(operation)[shard].counts
            # The slot may be given out again when the lock is released.
            return records_at(slot.bytes, 0, *shape, request.idle).first(count), after

    def put(self, block: Block, records: Records, timeout_s: float | None) -> None:
        """Overwrite or create whole rows; see `Table.put`."""
        self._connection.check()
        assert block.table is not None
        dim = block.table.dim
        width = -1 if records.state is None else records.state.shape[1]
        state_width, idle = (width if width >= 0 else None), records.idle is not None
        shards = len(self._exchange.shards)
        owner = shard_of(records.keys, shards)
        with self._lock:
            counts = [int((owner == shard).sum()) for shard in range(shards)]
            sizes = [records_bytes(count, dim, state_width, idle) for count in counts]
            slot = self._exchange.take(class_bytes(sum(sizes)))
            self.reads.wrote(block, records.keys)
            requests: list[ShardRequest] = []
            offset = 0
            for shard, count in enumerate(counts):
                into = records_at(slot.bytes, offset, count, dim, state_width, idle)
                indices = np.flatnonzero(owner == shard)
                for target, source in zip(into, records, strict=True):
                    if target is not None and source is not None:
                        target[...] = source[indices]
                at = slot.offset + offset
                requests.append(Put(0, block.id, count, width, slot.arena, at, idle))
                offset += sizes[shard]
            self._steps.finish("assign", requests, timeout_s, [slot])

    # --- keys ------------------------------------------------------------------------------------

    def delete(self, block: Block, keys: Array, timeout_s: float | None) -> int:
        """Remove rows; see `Table.delete`."""
        self._connection.check()
        distinct, removed = routing.distinct(keys)[0], 0
        for start in range(0, distinct.size, NAMED_KEYS):
            part = distinct[start : start + NAMED_KEYS]
            with self._lock:
                self.reads.deleted(block, part)
                answers, _ = self._name(Delete, block, part, timeout_s)
                removed += sum(each.counts[0] for each in answers)
        return removed

    def contains(self, block: Block, keys: Array, timeout_s: float | None) -> Array:
        """Which keys have a row, bool [n]; see `Table.contains`."""
        self._connection.check()
        there = np.empty(keys.size, np.bool_)
        for start in range(0, keys.size, NAMED_KEYS):
            part = slice(start, start + NAMED_KEYS)
            with self._lock:
                there[part] = self._name(Contains, block, keys[part], timeout_s)[1]
        return there

    def _name(
        self,
        kind: type[Delete] | type[Contains],
        block: Block,
        keys: Array,
        timeout_s: float | None,
    ) -> tuple[list[Done], Array]:
        """Send each shard those of some keys, int64 [n], that it holds, in a request of this kind.
        The caller holds the lock.

        Returns:
            The answers, and what they leave behind each key, uint8 [n].
        """
        named = lay_named(self._exchange, kind, block, keys)
        what = "assign" if kind is Delete else "fetch"
        answers = answers_by_shard(
            self._steps.finish(what, named.requests, timeout_s, [named.slot])
        )
        answered = np.empty(keys.size, np.uint8)
        for own, each in named.answers:
            answered[own] = each
        return answers, answered


def _checked_push(push: TablePush) -> CheckedRows:
    """What a step of several tables pushes to one of them; raises as `Table.push`."""
    table, keys, gradients, hyper = push
    if keys is None and gradients is None:
        return CheckedRows.none_of(table.block, hyper)
    if keys is None or gradients is None:
        raise ValueError(f"keys and gradients of table {table.name!r} come together")
    rows = as_rows(keys, gradients, table.dim, table.name, table.keys_of, table.wide)
    return CheckedRows(table.block, *rows, hyper)


def joined(tickets: Sequence[Ticket]) -> Ticket:
    """The last ticket, which waits for the others as well, and raises what they raise."""
    *others, last = tickets
    last.others = tuple(others)
    return last
