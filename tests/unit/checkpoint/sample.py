"""A small run's checkpoints: what is in the n-th, written by two servers and read by any number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import (
    CLUSTER_PATH,
    Cut,
    Manifest,
    Written,
    shard_path,
    state_path,
    values_path,
)
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.rows import ADMISSION, REMOVED, ROWS, USED, Column, Section, in_order
from paramserve.checkpoint.storage import Storage
from paramserve.checkpoint.writer import Writer
from paramserve.config import RuleSpec
from paramserve.core.partition import size_of
from paramserve.core.table.hashing import shard_of
from paramserve.messages import BlockSpec, Piece, TableSpec

SERVERS = 2
DIM = 4
COLUMNS = {
    "value": Column("float32", (DIM,)),
    "state": Column("float32", (1,)),
    "count": Column("uint32"),
    "seen": Column("int64"),
}
SAVED = {"epoch": 3, "order": np.arange(7), "random": (3, (1 << 80, 2), None)}
"""What rank 0 saves."""


def blocks(shards: int) -> tuple[BlockSpec, ...]:
    """A model of two dtypes and a table, cut for so many shards."""
    made = []
    for number, (dtype, pieces) in enumerate(
        {
            "float64": (Piece("scale", (3,)),),
            "float32": (Piece("layer.weight", (30, 20)), Piece("layer.bias", (20,))),
        }.items()
    ):
        size = size_of(pieces)
        cuts = tuple(size * shard // shards for shard in range(shards + 1))
        made.append(BlockSpec(number, 0, "model", dtype, RuleSpec("sgd"), pieces, cuts))
    table = TableSpec(DIM, "float32", 7, RuleSpec("options"))
    users = (Piece("users", (DIM,)),)
    spec = BlockSpec(2, 1, "users", "float32", RuleSpec("adagrad"), users, (), table=table)
    return (*made, spec)


def dense(number: int) -> dict[int, np.ndarray]:
    """The values of each block in the n-th checkpoint."""
    chosen = np.random.default_rng(number)
    return {
        block.block: chosen.normal(size=size_of(block.pieces)).astype(block.dtype)
        for block in blocks(1)
        if block.table is None
    }


class Users:
    """The table as it is told to be: rows by key."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Any, ...]] = {}
        self.changed, self.removed, self.used = set[int](), set[int](), set[int]()
        self.waiting: dict[int, int] = {}

    def go_on(self, number: int) -> None:
        """To the n-th checkpoint: rows come, change, go, come again, and are read."""
        chosen = np.random.default_rng([number, 1])
        self.changed, self.removed, self.used = set(), set(), set()
        there = sorted(self.rows)
        for key in there[number::5]:
            del self.rows[key]
            self.removed.add(key)
        for key in [*there[number::10], *chosen.integers(-(1 << 62), 1 << 62, 12).tolist()]:
            value = tuple(chosen.normal(size=DIM + 1).astype(np.float32).tolist())
            self.rows[key] = (value[:DIM], value[DIM:], number, 10 * number)
            self.changed.add(key)
            self.removed.discard(key)
        for key in set(there[number + 1 :: 3]) & self.rows.keys() - self.changed:
            self.rows[key] = (*self.rows[key][:3], 10 * number + 1)
            self.used.add(key)
        self.waiting = {int(key): number for key in chosen.integers(0, 1 << 40, 3)}


@cache
def users(number: int) -> Users:
    """The table at the n-th checkpoint."""
    made = Users()
    for each in range(number + 1):
        made.go_on(each)
    return made


def write_server(
    storage: Storage, name: str, number: int, shard: int, full: bool
) -> tuple[Written, ...]:
    """One server's part of the n-th checkpoint."""
    given, specs = dense(number), blocks(SERVERS)[:2]
    with Writer(storage, name) as writer:
        for path in (values_path("model"), state_path("momentum", "model")):
            file = writer.dense(path, specs, shard)
            for spec in specs:
                mine = given[spec.block][spec.cuts[shard] : spec.cuts[shard + 1]]
                for part in np.array_split(mine, 2):
                    file.write(spec.block, part)
        made = sections(users(number), shard, full)
        told = {name: Section(len(keys), columns) for name, (keys, columns, _) in made.items()}
        rows = writer.rows("users", shard, told, full=full)
        for section, (keys, columns, values) in made.items():
            for batch in batches(keys, columns, values):
                rows.write(section, batch)
        writer.write_message(shard_path(shard), b"shard %d of %d" % (shard, number))
        return writer.finish()


Rows = tuple[np.ndarray, Mapping[str, Column], Mapping[int, tuple[Any, ...]]]
"""Keys, columns, and the columns' values by key."""


def sections(table: Users, shard: int, full: bool) -> dict[str, Rows]:
    rows = table.rows.keys() if full else table.changed
    used = Column("int64")
    made = {
        ROWS: section(table.rows, rows, shard, COLUMNS),
        ADMISSION: section(
            {k: (n,) for k, n in table.waiting.items()}, table.waiting, shard, {"count": used}
        ),
    }
    if not full:
        made[REMOVED] = section({}, table.removed, shard, {})
        made[USED] = section(
            {k: row[3:] for k, row in table.rows.items()}, table.used, shard, {"seen": used}
        )
    return made


def section(
    rows: Mapping[int, tuple[Any, ...]], keys: Any, shard: int, columns: Mapping[str, Column]
) -> Rows:
    """Rows of a shard."""
    chosen = np.array(sorted(keys), np.int64)
    chosen = chosen[shard_of(chosen, SERVERS) == shard]
    return chosen[in_order(chosen)], columns, rows


def batches(
    keys: np.ndarray, columns: Mapping[str, Column], rows: Mapping[int, tuple[Any, ...]]
) -> Iterator[dict[str, np.ndarray]]:
    """Rows, five at a time."""
    for start in range(0, keys.size, 5):
        part = keys[start : start + 5]
        yield {"key": part} | {
            name: np.array([rows[int(key)][i] for key in part], column.dtype)
            for i, (name, column) in enumerate(columns.items())
        }


def write_cluster(storage: Storage, name: str, number: int) -> tuple[Written, ...]:
    """The coordinator's part."""
    with Writer(storage, name) as writer:
        writer.write_message(CLUSTER_PATH, b"cluster %d" % number)
        writer.write_saved(0, SAVED | {"number": number})
        return writer.finish()


def save(folder: Folder, number: int, before: Manifest | None = None) -> Manifest:
    """Write the n-th checkpoint, with what changed in the table since the one before."""
    name = folder.begin(number)
    reports = [
        *(write_server(folder.storage, name, number, k, before is None) for k in range(SERVERS)),
        write_cluster(folder.storage, name, number),
    ]
    cut = Cut(step=number, shards=SERVERS, blocks=blocks(SERVERS), clocks={"model": number})
    return folder.commit(name, reports, cut, before=before)


Contents = dict[str, Any]


@cache
def contents(number: int) -> Contents:
    """All that the n-th checkpoint has, in a form that compares."""
    table = users(number)
    values = {block: each.tobytes() for block, each in dense(number).items()}
    return {
        "values": values,
        "state": values,
        "rows": table.rows,
        "admission": table.waiting,
        "shards": [b"shard %d of %d" % (shard, number) for shard in range(SERVERS)],
        "cluster": b"cluster %d" % number,
        "saved": repr(SAVED | {"number": number}),
    }


def load_server(saved: Checkpoint, shard: int, shards: int) -> Contents:
    """What one of so many servers reads."""
    found: Contents = {"values": {}, "state": {}, "rows": {}, "admission": {}}
    for spec in blocks(shards)[:2]:
        for what, path in (
            ("values", values_path("model")),
            ("state", state_path("momentum", "model")),
        ):
            into = np.empty(spec.cuts[shard + 1] - spec.cuts[shard], spec.dtype)
            saved.dense(path, spec, shard, into)
            found[what][spec.block] = into.tobytes()
    for rows in saved.rows("users", shard, shards):
        for key, *columns in zip(*(rows[name].tolist() for name in ("key", *COLUMNS)), strict=True):
            assert key not in found["rows"]
            found["rows"][key] = (tuple(columns[0]), tuple(columns[1]), *columns[2:])
    waiting = saved.admission("users", shard, shards)
    found["admission"] = dict(zip(waiting["key"].tolist(), waiting["count"].tolist(), strict=True))
    return found


def joined(parts: list[Contents]) -> Contents:
    """What several servers have read."""
    found = parts[0]
    for each in parts[1:]:
        for what in "values", "state":
            for block in found[what]:
                found[what][block] += each[what][block]
        for what in "rows", "admission":
            assert not found[what].keys() & each[what].keys()
            found[what] |= each[what]
    return found


def load(saved: Checkpoint, shards: int = 3) -> Contents:
    """Read all of a checkpoint on so many servers."""
    return joined([load_server(saved, shard, shards) for shard in range(shards)]) | {
        "shards": [saved.message(shard_path(k)) for k in range(saved.manifest.cut.shards)],
        "cluster": saved.message(CLUSTER_PATH),
        "saved": repr(saved.saved(0)),
    }
