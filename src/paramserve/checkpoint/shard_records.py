"""A server's control state in a checkpoint: `shard-<k>.msgpack`; and the columns of its tables."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paramserve.checkpoint.manifest import shard_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.rows import Column
from paramserve.core.group_state import GroupRecord
from paramserve.core.shard_sessions import SessionsRecord
from paramserve.core.table.block import RowStates
from paramserve.errors import CheckpointDamaged
from paramserve.messages import BlockSpec

VALUE, STATE, COUNT = "value", "state", "count"
"""Columns of a table's rows, as `RowLayout.parts` names them."""
LAST_USE, USE_ORDER = "last_use", "use_order"
"""The clock of a row's last use, and numbers that rise in the order of use."""
OLD = "old"
"""Field: whether the old generation counts a key that waits for admission."""
USES = {LAST_USE: Column("int64"), USE_ORDER: Column("int64")}
WAITING = {COUNT: Column("uint32"), OLD: Column("uint8")}


class BlockRecord(Struct, frozen=True):
    """A dense block on a shard, without its arrays."""

    spec: BlockSpec
    attempt: int
    states: tuple[str, ...]
    counts: tuple[int, ...]


class TableRecord(Struct, frozen=True):
    """A table on a shard, without its rows; its fields are those of `core.table.cut`."""

    spec: BlockSpec
    attempt: int
    states: RowStates
    used_at: int
    unadmitted: int
    clock: int
    created: int
    evicted: int
    waits: bool
    """Whether keys wait for admission to it."""
    deleted: int = 0


class SumRecord(Struct, frozen=True):
    """Gradients of a block that wait in a buffer; `group` has them."""

    group: int
    block: int
    active: tuple[int, ...] | None
    hyper: tuple[float, ...] | None
    count: int


class ShardRecord(Struct, frozen=True):
    """A shard's part of a checkpoint without its arrays: `shard-<k>.msgpack`."""

    shard: int
    shards: int
    cut: int
    groups: tuple[GroupRecord, ...]
    sessions: SessionsRecord
    blocks: tuple[BlockRecord, ...]
    tables: tuple[TableRecord, ...]
    sums: tuple[SumRecord, ...]

    def specs(self) -> list[BlockSpec]:
        """Specs of all blocks and tables, as they were cut."""
        return [*(each.spec for each in self.blocks), *(each.spec for each in self.tables)]


def shard_records(saved: Checkpoint) -> tuple[ShardRecord, ...]:
    """Records of all servers that wrote a checkpoint.

    Raises:
        CheckpointDamaged: one cannot be read.
    """
    records = []
    for shard in range(saved.manifest.cut.shards):
        path = shard_path(shard)
        try:
            records.append(msgspec.msgpack.decode(saved.message(path), type=ShardRecord))
        except msgspec.MsgspecError as error:
            raise CheckpointDamaged(
                f"checkpoint {saved.manifest.name} is damaged: {path} is no record of a shard: "
                f"{error}",
                fix="use the checkpoint before",
            ) from None
    return tuple(records)
