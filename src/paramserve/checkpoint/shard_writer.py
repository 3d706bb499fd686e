"""A server's part of a checkpoint, written from its part of a cut.

Writing takes turns with the server's loop, which goes on serving: a turn copies some MiB out of the
cut and gives what is to be done with them in another thread. So a cut is read between two events of
its shard, and memory is one piece besides what the cut itself has copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.checkpoint.manifest import (
    Written,
    shard_path,
    state_path,
    sums_path,
    values_path,
)
from paramserve.checkpoint.rows import ADMISSION, KEY, REMOVED, ROWS, USED, Column, Section
from paramserve.checkpoint.rows import in_order as in_place_order
from paramserve.checkpoint.shard_records import (
    COUNT,
    LAST_USE,
    OLD,
    STATE,
    USE_ORDER,
    USES,
    VALUE,
    WAITING,
    BlockRecord,
    ShardRecord,
    SumRecord,
    TableRecord,
)
from paramserve.checkpoint.tensors import in_order
from paramserve.checkpoint.writer import TableFile, Writer
from paramserve.core.cut_parts import BlockCopy, ShardCut, TableCopy
from paramserve.core.sums import RowSum
from paramserve.core.table.admission import Waiting
from paramserve.core.table.cut import CutRows
from paramserve.core.table.hashing import Keys
from paramserve.core.table.store import clocks_of
from paramserve.rules.layout import RowLayout

Array = npt.NDArray[Any]
Job = Callable[[], Any]
"""What is done in another thread; its result goes back to the generator that gave it."""
Turns = Generator[Job, Any, None]

PIECE_BYTES = 8 << 20
"""Copied out of a cut between two events, at most: some 2 ms."""
KEYS_AT_ONCE = 1 << 17
"""Numbers, one behind the other, copied out of a cut between two events, at most."""
ROWS_AT_ONCE = 1 << 15
"""Rows, which lie apart, copied out of a cut between two events, at most."""


def write_shard(
    part: ShardCut,
    shards: int,
    blocks: Collection[int],
    writer: Writer,
) -> Generator[Job, Any, tuple[Written, ...]]:
    """Write a shard's part of a checkpoint, in turns.

    Every turn is taken between two events of the shard. The job that it gives has to be over, and
    its result sent back, before the next one.

    Args:
        part: of a whole cut.
        shards: how many there are.
        blocks: numbers of those that are written; all shards have them.
    Returns:
        What `Writer.finish` gave.
    Raises:
        ParamServeError: the cut is lost, or was released.
    """
    dense = [each for number, each in sorted(part.blocks.items()) if number in blocks]
    tables = [each for number, each in sorted(part.tables.items()) if number in blocks]
    record = _record(part, shards, dense, tables)
    yield partial(_write_record, writer, record)
    yield partial(_write_sums, writer, part, record)
    buffer = np.empty(PIECE_BYTES, np.uint8)
    by_group = dict[str, list[BlockCopy]]()
    for each in dense:
        by_group.setdefault(each.spec.group_name, []).append(each)
    for group, copies in by_group.items():
        values = [(copy, 0) for copy in copies]
        yield from _write_dense(writer, part.shard, values_path(group), values, buffer)
        for state in dict.fromkeys(name for copy in copies for name in copy.states):
            having = [(c, 1 + c.states.index(state)) for c in copies if state in c.states]
            path = state_path(state, group)
            yield from _write_dense(writer, part.shard, path, having, buffer)
    for table in tables:
        yield from _write_table(writer, part, table, buffer)
    written: tuple[Written, ...] = yield writer.finish
    return written


def _record(
    part: ShardCut, shards: int, dense: Sequence[BlockCopy], tables: Sequence[TableCopy]
) -> ShardRecord:
    specs = [*(each.spec for each in dense), *(each.spec for each in tables)]
    groups, numbers = {spec.group for spec in specs}, {spec.block for spec in specs}
    sums = [
        SumRecord(group, block, each.pieces(), each.hyper, each.count)
        for group, by_block in part.sums.items()
        for block, each in by_block.items()
        if block in numbers
    ]
    return ShardRecord(
        part.shard,
        shards,
        part.number,
        tuple(each for each in part.groups if each.id in groups),
        part.sessions,
        tuple(BlockRecord(c.spec, c.attempt, c.states, tuple(c.counts)) for c in dense),
        tuple(
            TableRecord(
                each.spec,
                each.attempt,
                each.states,
                each.used_at,
                each.unadmitted,
                each.clock,
                each.created,
                each.evicted,
                each.admits,
                each.deleted,
            )
            for each in tables
        ),
        tuple(sums),
    )


def _write_record(writer: Writer, record: ShardRecord) -> None:
    writer.write_message(shard_path(record.shard), msgspec.msgpack.encode(record))


def _write_sums(writer: Writer, part: ShardCut, record: ShardRecord) -> None:
    """Write what buffers have; a cut's sums stay as they are."""
    names = {group.id: group.name for group in record.groups}
    by_group = dict[int, dict[str, tuple[str, Array]]]()
    for each in record.sums:
        own, arrays = part.sums[each.group][each.block], by_group.setdefault(each.group, {})
        if isinstance(own, RowSum):
            keys, values = own.array
            arrays[f"{each.block}.{KEY}"] = keys.dtype.name, keys
            arrays[f"{each.block}.{VALUE}"] = values.dtype.name, values
        else:
            arrays[str(each.block)] = own.array.dtype.name, own.array
    for group, arrays in by_group.items():
        writer.write_tensors(sums_path(names[group], part.shard), arrays)


def _write_dense(
    writer: Writer, shard: int, path: str, fields: Sequence[tuple[BlockCopy, int]], buffer: Array
) -> Turns:
    """Write a field of each of some blocks of a group to one file, by way of `buffer`."""
    if shard and not any(copy.size for copy, _ in fields):
        return
    specs = [copy.spec for copy, _ in fields]
    file = yield partial(writer.dense, path, specs, shard)
    for spec in in_order(specs):
        copy, number = next(each for each in fields if each[0].spec is spec)
        into, start = buffer.view(spec.dtype), 0
        while start < copy.size:
            piece = copy.piece(number, start, into)
            yield partial(file.write, spec.block, piece)
            start += piece.size


class _Rows:
    """The rows of a table in the order in which they are written, worked out in a thread.

    Attributes:
        rows: those whose values are written.
        used: those of which only the last use is.
    """

    def __init__(self, copy: TableCopy, rows: Keys, keys: Keys, waiting: Waiting | None) -> None:
        order = in_place_order(keys)
        rows, keys = rows[order], keys[order]
        changed = np.ones(rows.size, np.bool_)
        removed = keys[:0]
        if copy.changed is not None:
            changed = copy.changed.rows[rows]
            removed = copy.changed.removed()
        self.rows = rows[changed]
        self.used, self._used_keys = rows[~changed], keys[~changed]
        self._removed = removed[in_place_order(removed)]
        self._waiting = _waiting(waiting)
        self.sections = self._sections(copy)

    def _sections(self, copy: TableCopy) -> dict[str, Section]:
        layout, uses = copy.layout, USES if copy.orders_use else {}
        columns = {VALUE: Column(layout.dtype, (layout.numbers,))}
        if layout.state_words:
            columns[STATE] = Column("float32", (layout.state_words,))
        if layout.counted:
            columns[COUNT] = Column("uint32")
        sections = {ROWS: Section(self.rows.size, {**columns, **uses})}
        if self._removed.size:
            sections[REMOVED] = Section(self._removed.size, {})
        if self.used.size:
            sections[USED] = Section(self.used.size, uses)
        if self._waiting is not None:
            sections[ADMISSION] = Section(self._waiting[KEY].size, WAITING)
        return sections

    def write_used(self, file: TableFile, part: slice, uses: Keys) -> None:
        """Write the last use of some rows of which only that is written."""
        file.write(USED, {KEY: self._used_keys[part], **_uses(uses)})

    def write_removed(self, file: TableFile) -> None:
        """Write which keys have no row any more."""
        if self._removed.size:
            file.write(REMOVED, {KEY: self._removed})

    def write_waiting(self, file: TableFile) -> None:
        """Write the keys that wait for admission."""
        if self._waiting is not None:
            file.write(ADMISSION, self._waiting)


def _uses(uses: Keys) -> dict[str, Array]:
    """The columns that say when rows were used."""
    return {LAST_USE: clocks_of(uses), USE_ORDER: uses}


def _waiting(candidates: Waiting | None) -> dict[str, Array] | None:
    """Keys that wait for admission, by place."""
    if candidates is None:
        return None
    (young, counts), (old, old_counts) = candidates
    keys = np.concatenate((young, old))
    order = in_place_order(keys)
    of_old = np.arange(keys.size) >= young.size
    both = np.concatenate((counts, old_counts))
    return {KEY: keys[order], COUNT: both[order], OLD: of_old[order].astype(np.uint8)}


def _write_table(writer: Writer, part: ShardCut, copy: TableCopy, buffer: Array) -> Turns:
    """Write the rows of a table that a checkpoint is to have, by way of `buffer`."""
    while copy.find_free(KEYS_AT_ONCE) or copy.find_waiting(KEYS_AT_ONCE):
        yield _nothing
    rows_to_write = yield copy.rows_to_copy
    keys = np.empty(rows_to_write.size, np.int64)
    for at in range(0, rows_to_write.size, KEYS_AT_ONCE):
        some = slice(at, at + KEYS_AT_ONCE)
        keys[some] = copy.keys_of(rows_to_write[some])
        yield _nothing
    rows = yield partial(_Rows, copy, rows_to_write, keys, copy.candidates)
    name, full = copy.spec.group_name, copy.changed is None
    file = yield partial(writer.rows, name, part.shard, rows.sections, full=full)
    at_once = max(1, PIECE_BYTES // (4 * copy.layout.words))
    for at in range(0, rows.rows.size, at_once):
        batch, uses = yield from _copied(copy, rows.rows[at : at + at_once], buffer)
        yield partial(_write_rows, file, copy.layout, batch, uses)
    yield partial(rows.write_removed, file)
    for at in range(0, rows.used.size, ROWS_AT_ONCE):
        some = slice(at, at + ROWS_AT_ONCE)
        yield partial(rows.write_used, file, some, copy.uses_of(rows.used[some]))
    yield partial(rows.write_waiting, file)


def _copied(
    copy: TableCopy, rows: Keys, buffer: Array
) -> Generator[Job, Any, tuple[CutRows, Keys | None]]:
    """Copy rows to `buffer`, with their last uses where the table keeps them, in turns."""
    raw = buffer.view(np.float32)[: rows.size * copy.layout.words].reshape(rows.size, -1)
    keys = np.empty(rows.size, np.int64)
    uses = np.empty(rows.size, np.int64) if copy.orders_use else None
    for at in range(0, rows.size, ROWS_AT_ONCE):
        if at:
            yield _nothing
        part = slice(at, at + ROWS_AT_ONCE)
        keys[part] = copy.of(rows[part], raw[part]).keys
        if uses is not None:
            uses[part] = copy.uses_of(rows[part])
        copy.written(rows[part])
    return CutRows(keys, raw), uses


def _write_rows(file: TableFile, layout: RowLayout, batch: CutRows, uses: Keys | None) -> None:
    columns = {KEY: batch.keys, **layout.parts(batch.raw)}
    file.write(ROWS, columns if uses is None else {**columns, **_uses(uses)})


def _nothing() -> None:
    """Let requests be served in between."""
