"""Tables and Arrow data for the suites of export and import."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from tests.contract.role_cluster import RoleCluster
from tests.needs import needs

import paramserve as ps
from paramserve.client import Table

pa = needs("pyarrow")

DIM = 5
KEYS = np.array([0, -7, 2**63 - 1, -(2**63), 12, 13, 14, 15, 16, 17, 18], np.int64)


def table_of(cluster: RoleCluster, **options: Any) -> Table:
    chosen = {"dim": DIM, "rule": ps.Adam(lr=0.1), "init": ps.Normal(std=1.0), **options}
    return cluster.client().table("users", **chosen)


def train(table: Table, keys: npt.ArrayLike = KEYS, steps: int = 3, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = random.choice(np.asarray(keys), 2 * np.size(keys))
        table.push(chosen, random.normal(size=(chosen.size, DIM)).astype(np.float32)).result()


def rows_of(table: Table) -> dict[int, tuple[bytes, bytes, int]]:
    """Every row with its state and count, by key."""
    return {
        int(key): (values.tobytes(), state.tobytes(), int(count))
        for each in table.scan(state=True)
        for key, values, state, count in zip(*each[:4], strict=True)
    }


def frame(keys: Any = (1, 2), values: Any = None, **columns: Any) -> Any:
    """A pyarrow.Table of keys and values."""
    keys = keys if isinstance(keys, pa.Array) else pa.array(list(keys), pa.int64())
    if values is None:
        values = lists(np.ones((len(keys), DIM), np.float32))
    return pa.table({"key": keys, "value": values, **columns})


def lists(rows: npt.NDArray[Any]) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def nan_at(row: int) -> Any:
    """Two rows, one with a NaN."""
    rows = np.ones((2, DIM), np.float32)
    rows[row, 2] = np.nan
    return lists(rows)
