"""Rows of tables in a checkpoint: their order, sections and columns, and how increments are merged.

The place of a key is the part of its hash that tells its shard (`hashing.shard_of`), so the rows of
any shard of any number of shards lie together in a file that is sorted by place. A file has up to
four sections:

    rows        rows that there are, or that have changed; each tensor is named as its column
    removed     keys whose rows are gone
    used        keys of rows that were only read, with the columns that this changed
    admission   keys without a row that are counted; those of the last file alone hold

Each section has a column `key`; its tensors are named "<section>.<column>", except those of `rows`.
What else is in a row is the caller's choice, the same in all files of a table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.table.hashing import Keys, hashes

Array = npt.NDArray[Any]
Columns = dict[str, Array]

ROWS, REMOVED, USED, ADMISSION = SECTIONS = ("rows", "removed", "used", "admission")
KEY = "key"
BITS = 32
"""Bits of the hash by which keys are placed on shards."""


class Column(NamedTuple):
    """What a column holds for each key."""

    dtype: str
    """A key of `tensors.KINDS`; bfloat16 as uint16."""
    shape: tuple[int, ...] = ()


KEYS = Column("int64")


class Section(NamedTuple):
    """Rows that are to be written."""

    rows: int
    """How many."""
    columns: Mapping[str, Column]
    """Columns without the key."""


def places(keys: Keys) -> npt.NDArray[np.uint32]:
    """Places of keys in the order of a file; keys of one place may come in any order."""
    return (hashes(keys) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def in_order(keys: Keys) -> npt.NDArray[np.int64]:
    """The order that rows are written in, as indices into `keys`."""
    return np.argsort(places(keys))


def bounds(shard: int, shards: int) -> tuple[int, int]:
    """The places [low, high) of a shard's keys."""
    return -(-(shard << BITS) // shards), -(-((shard + 1) << BITS) // shards)


def tensor_name(section: str, column: str) -> str:
    return column if section == ROWS else f"{section}.{column}"


def empty(columns: Mapping[str, Column]) -> Columns:
    """No rows."""
    return {
        name: np.empty(
            (0, *column.shape), np.uint16 if column.dtype == "bfloat16" else column.dtype
        )
        for name, column in {KEY: KEYS, **columns}.items()
    }


def merged(layers: Sequence[Mapping[str, Columns]]) -> Columns:
    """The rows that there are after a checkpoint and its increments, each key once, by place.

    Args:
        layers: the first with all rows, then each increment; of each, the sections.
    """
    keys, layer, row = _last_changes(layers)
    order = in_order(keys)
    if len(layers) == 1 and (order == np.arange(order.size)).all():
        return dict(layers[0][ROWS])
    keys, layer, row = keys[order], layer[order], row[order]
    parts = [np.flatnonzero(layer == each) for each in range(len(layers))]
    rows = Columns()
    for name, first in layers[0][ROWS].items():
        rows[name] = np.empty((keys.size, *first.shape[1:]), first.dtype)
        for part, each in zip(parts, layers, strict=True):
            rows[name][part] = each[ROWS][name][row[part]]
    for number, each in enumerate(layers[1:], 1):
        if each[USED][KEY].size and keys.size:
            _update(rows, each[USED], layer <= number)
    return rows


def _last_changes(layers: Sequence[Mapping[str, Columns]]) -> tuple[Keys, Keys, Keys]:
    """The keys that there are at the end, and for each the layer and the row of its last change."""
    keys = layers[0][ROWS][KEY]
    layer, row = np.zeros(keys.size, np.int64), np.arange(keys.size)
    for number, each in enumerate(layers[1:], 1):
        changed = each[ROWS][KEY]
        unchanged = ~np.isin(keys, np.concatenate((changed, each[REMOVED][KEY])))
        keys = np.concatenate((keys[unchanged], changed))
        layer = np.concatenate((layer[unchanged], np.full(changed.size, number)))
        row = np.concatenate((row[unchanged], np.arange(changed.size)))
    return keys, layer, row


def _update(rows: Columns, used: Columns, older: npt.NDArray[np.bool_]) -> None:
    """Overwrite some columns of rows by those of `used`, where the rows are older."""
    order = np.argsort(rows[KEY])
    at = np.searchsorted(rows[KEY], used[KEY], sorter=order)
    index = order[np.minimum(at, order.size - 1)]
    there = (rows[KEY][index] == used[KEY]) & older[index]
    for name, values in used.items():
        if name != KEY:
            rows[name][index[there]] = values[there]
