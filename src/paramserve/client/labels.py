"""The strings behind a table's keys, so that keys can be turned into names again.

They are rows of a second table, `<name> (labels)`, of the same keys: three bytes of UTF-8 in each
float32, which holds them exactly. So they lie on the shards, beside the rows that they name, and
limits, several clients, and what is asked again after a lost connection are those of every table.
Whether a table has labels is in its definition (`TableSpec.labels`); names of that form are theirs.
A client sends the string of a key when it first hashes it, and again only where labels come and go:
after as many new ones as a quarter of those that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.string_keys import strings_at
from paramserve.config import LABELS, check_count
from paramserve.core.table.options import LRU, TableOptions, Zeros
from paramserve.messages import TableSpec

Array = npt.NDArray[Any]

BYTES_MAX = 96
"""Most bytes of a string; a longer one is cut between two characters."""
DIM = BYTES_MAX // 3
ROW_BYTES = 192
"""Bytes that a label and its index take on a shard. Measured: 187 to 193, from 500 labels on."""
PUT_ROWS = 16_384
"""Strings in one message."""
LABELS_MAX = 10_000_000
"""Most labels, on all servers together, of a table with `labels=True` and no `LRU(rows=...)`: keys
that no row is made for, such as those that `MinCount` keeps out, have strings as well."""
LOOK_KEYS = 1 << 16
"""Strings that a client gives before it looks whether labels were deleted, at most."""
SENT_MAX = 1 << 20
"""Keys that a client remembers to have sent; past it, it forgets them and sends them again."""


def labels_at_most(argument: bool | int, options: TableOptions) -> int:
    """How many labels a table keeps; 0: none.

    Args:
        argument: as `Client.table` has it.
        options: of the table whose keys they name.
    Raises:
        TypeError, ValueError: `argument` is neither a bool nor an int of at least 1.
    """
    if argument is False:
        return 0
    if argument is not True:
        check_count("labels", argument)
        return argument
    rows = options.lru.rows if options.lru is not None else None
    return rows if rows is not None else LABELS_MAX


def labels_options(table: TableSpec) -> TableOptions:
    """How the labels of a table are kept."""
    max_bytes = TableOptions.from_spec(table.options).max_bytes
    return TableOptions(Zeros(), evict=LRU(table.labels), max_bytes=max_bytes)


def labels_kept(table: TableSpec, shards: int) -> int:
    """How many labels of a table its shards have room for."""
    max_bytes = TableOptions.from_spec(table.options).max_bytes
    return min(table.labels, shards * max_bytes // ROW_BYTES) if max_bytes else table.labels


def are_labels(name: str) -> bool:
    """Whether a table of this name has the labels of another one."""
    return name.endswith(LABELS)


def check_not_labels(name: str) -> None:
    """Refuse a name that labels could have.

    Raises:
        ValueError: nothing was defined.
    """
    if are_labels(name):
        raise ValueError(
            f"the name {name!r} ends with {LABELS!r}, which is kept for the labels of tables. "
            "Applied: no. To fix: choose another name"
        )


class Labels:
    """What one client sends of the strings of a table's keys, and reads.

    Args:
        table: of the labels.
        most: labels that it keeps on all servers.
        workers: that send labels as well.
    """

    def __init__(self, table: Any, most: int, workers: int) -> None:
        self._table = table
        self._most = most
        self._sent_strings: dict[int, str] = {}
        """Strings by key, of those that the shards have from here; at most `SENT_MAX`."""
        self._keys_since_look = 0
        """Keys since the last look at what was created."""
        self._look = min(most // (4 * max(workers, 1)), LOOK_KEYS)
        self._created = self._deleted = 0
        """Labels, by all clients, when this one last forgot what it had sent."""

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
        self._keys_since_look += distinct.size
        if self._keys_since_look > self._look:
            self._forget()
        new = [i for i, key in enumerate(distinct.tolist()) if key not in self._sent_strings]
        if new:
            self.put(distinct[new], strings_at(strings, first[new]))

    def _forget(self) -> None:
        """Forget what was sent if some client has deleted labels, or the shards may soon evict
        some: a label in use is sent again then. Those are evicted that were sent longest ago."""
        self._keys_since_look = 0
        reports = self._table.reports()
        created = sum(report.created for report in reports)
        deleted = sum(report.deleted for report in reports)
        if created - self._created > self._most // 4 or deleted != self._deleted:
            self._sent_strings.clear()
            self._created, self._deleted = created, deleted

    def delete(self, keys: Array, timeout_s: float | None) -> None:
        """Delete the strings of keys, int64 [n]."""
        self._table.delete(keys, timeout_s=timeout_s)
        for key in keys.tolist():
            self._sent_strings.pop(key, None)

    def put(self, keys: Array, strings: Sequence[str]) -> None:
        """Send the strings of keys, int64 [n]."""
        for start in range(0, keys.size, PUT_ROWS):
            part = slice(start, start + PUT_ROWS)
            self._table.put(keys[part], encoded(strings[part]))
        if len(self._sent_strings) + keys.size > SENT_MAX:
            self._sent_strings.clear()
        if keys.size <= min(SENT_MAX, self._most):
            self._sent_strings.update(zip(keys.tolist(), strings, strict=True))

    def sent_string(self, key: int) -> str:
        """The string of a key that this client has sent; empty: it does not know it."""
        return self._sent_strings.get(key, "")

    def of(self, keys: Array) -> list[str]:
        """The strings of keys, int64 [n]; empty where none is known."""
        return decoded(self._table.pull(keys))


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
