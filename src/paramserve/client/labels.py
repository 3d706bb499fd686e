"""The strings behind a table's keys, so that keys can be turned into names again.

They are rows of a second table, `<name> (labels)`, of the same keys: three bytes of UTF-8 in each
float32, which holds them exactly. So they lie on the shards, beside the rows that they name, and
limits, several clients, and what is asked again after a lost connection are those of every table.
Whether a table has labels is in its definition (`TableSpec.labels`); names of that form are theirs.
A client sends the string of a key once, when it first hashes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.string_keys import strings_at
from paramserve.config import check_count
from paramserve.core.table.options import LRU, TableOptions, Zeros
from paramserve.messages import TableSpec

Array = npt.NDArray[Any]

SUFFIX = " (labels)"
"""Behind the name of the table whose keys they name; users define no name that ends so."""
BYTES_MAX = 96
"""Of a string; what is longer is cut between two characters."""
DIM = BYTES_MAX // 3
PUT_ROWS = 16_384
"""Strings in one message."""
LABELS_MAX = 10_000_000
"""Of a table with `labels=True` and no `LRU(rows=...)`, on all servers together: keys that no row
is made for, such as those that `MinCount` keeps out, have strings as well."""
SENT_MAX = 1 << 20
"""Keys that a client remembers to have sent; past it, it forgets them and sends them again."""


def labels_at_most(given: bool | int, options: TableOptions) -> int:
    """How many labels a table keeps; 0: none.

    Args:
        given: as `Client.table` has it.
        options: of the table whose keys they name.
    Raises:
        TypeError, ValueError: `given` is neither a bool nor an int of at least 1.
    """
    if given is False:
        return 0
    if given is not True:
        check_count("labels", given)
        return given
    rows = options.lru.rows if options.lru is not None else None
    return rows if rows is not None else LABELS_MAX


def labels_options(table: TableSpec) -> TableOptions:
    """How the labels of a table are kept."""
    max_bytes = TableOptions.from_spec(table.options).max_bytes
    return TableOptions(Zeros(), evict=LRU(table.labels), max_bytes=max_bytes)


def are_labels(name: str) -> bool:
    """Whether a table of this name has the labels of another one."""
    return name.endswith(SUFFIX)


def check_not_labels(name: str) -> None:
    """Refuse a name that labels could have.

    Raises:
        ValueError: nothing was defined.
    """
    if are_labels(name):
        raise ValueError(
            f"the name {name!r} ends with {SUFFIX!r}, which is kept for the labels of tables. "
            "Applied: no. To fix: choose another name"
        )


class Labels:
    """What one client sends of the strings of a table's keys, and reads.

    Args:
        table: of the labels.
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self._sent: set[int] = set()

    def keep(self, strings: Any, keys: Array) -> None:
        """Send the strings of keys that this client has not sent; returns when the shards have
        them.

        Args:
            strings: as `keys_of` has hashed them.
            keys: int64, of the same shape.
        Raises:
            As `Table.put`.
        """
        distinct, first = np.unique(keys.reshape(-1), return_index=True)
        new = [i for i, key in enumerate(distinct.tolist()) if key not in self._sent]
        if new:
            self.put(distinct[new], strings_at(strings, first[new]))

    def put(self, keys: Array, strings: Sequence[str]) -> None:
        """Send the strings of keys, int64 [n]."""
        for start in range(0, keys.size, PUT_ROWS):
            part = slice(start, start + PUT_ROWS)
            self._table.put(keys[part], encoded(strings[part]))
        if len(self._sent) + keys.size > SENT_MAX:
            self._sent.clear()
        if keys.size <= SENT_MAX:
            self._sent.update(keys.tolist())

    def of(self, keys: Array) -> list[str]:
        """The strings of keys, int64 [n]; empty where none is known."""
        return decoded(self._table.pull(keys, create=False))


def encoded(strings: Sequence[str]) -> Array:
    """Strings as rows of floats, [n, DIM]."""
    packed = np.array([_cut(text.encode()) for text in strings], f"S{BYTES_MAX}")
    triples = packed.view(np.uint8).reshape(len(strings), DIM, 3).astype(np.float32)
    rows: Array = triples @ np.array([1.0, 256.0, 65536.0], np.float32)
    return rows


def decoded(rows: Array) -> list[str]:
    """The strings of rows, as `encoded` made them."""
    numbers = rows.astype(np.uint32)
    triples = np.stack([(numbers >> shift) & 0xFF for shift in (0, 8, 16)], axis=-1)
    packed = np.ascontiguousarray(triples, np.uint8).reshape(len(rows), BYTES_MAX)
    return [each.decode() for each in packed.view(f"S{BYTES_MAX}").reshape(-1).tolist()]


def _cut(text: bytes) -> bytes:
    return text[:BYTES_MAX].decode(errors="ignore").encode() if len(text) > BYTES_MAX else text
