"""Rows of tables on their way to the servers, and what carries them knows of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.client.labels import Labels
from paramserve.core.partition import Block
from paramserve.messages import TableReport
from paramserve.rules.base import Hyper
from paramserve.rules.layout import WIDE

Array = npt.NDArray[Any]


class KeyedTable(Protocol):
    """A table; `paramserve.client.table.Table` is one, and says what these are."""

    client: Any
    block: Block
    name: str
    dim: int
    wide: np.dtype[Any] | None
    evicts: bool

    def keys_of(self, strings: Any) -> Array: ...
    def known_labels(self) -> Labels | None: ...
    def reports(self) -> Sequence[TableReport]: ...
    def scan(self, *args: Any, **options: Any) -> Any: ...
    def from_parquet(self, path: str, *, state: bool | None = None) -> int: ...


class TablePush(NamedTuple):
    """Gradients of one table's rows, as a step of several tables takes them."""

    table: KeyedTable
    keys: npt.ArrayLike | None = None
    """Integers [...]; None: none, so that only the clock goes on."""
    gradients: npt.ArrayLike | None = None
    """Floating point [..., dim]."""
    hyper: Hyper | None = None


class CheckedRows(Struct, frozen=True, eq=False):
    """Gradients of one table's rows that have been checked."""

    block: Block
    """The table's."""
    keys: Array
    """int64 [n]."""
    values: Array
    """float32 [n, dim]."""
    hyper: Hyper | None = None

    @staticmethod
    def none_of(block: Block, hyper: Hyper | None = None) -> CheckedRows:
        """Push of no row of a table, so that only its clock goes on."""
        assert block.table is not None
        none = np.empty((0, block.table.dim), np.float32)
        return CheckedRows(block, np.empty(0, np.int64), none, hyper)

    @property
    def wide(self) -> npt.DTypeLike | None:
        """The dtype of the table's values where they count in 64 bits; None: float32."""
        assert self.block.table is not None
        return WIDE.get(self.block.table.dtype)
