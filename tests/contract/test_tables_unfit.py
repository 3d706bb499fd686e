"""Numbers that rows cannot hold, over all transports: what is put is refused, and an update that
goes too far ends at the largest."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from tests.contract.role_cluster import WAIT_S, RoleCluster
from tests.contract.test_tables import DIM, MakeCluster, ones, users
from tests.contract.test_tables_refusals import refused, unchanged

from paramserve.core.table.options import Zeros
from paramserve.core.table.parts import Records
from paramserve.errors import NonFinite
from paramserve.rules import SGD, Adagrad

pytestmark = pytest.mark.usefixtures("tables_ready")


@pytest.fixture
def two(make_cluster: MakeCluster) -> RoleCluster:
    """Two shards, for what the client refuses."""
    return make_cluster("unix", servers=2)


@pytest.mark.parametrize(
    ("dtype", "value", "limit"),
    [
        ("float16", 1e6, "65520"),
        ("float16", -65520.0, "65520"),
        ("bfloat16", 3.4e38, "3.39618e+38"),
    ],
)
def test_values_beyond_16_bits_are_not_put_and_the_key_is_named(
    two: RoleCluster, dtype: str, value: float, limit: str
) -> None:
    table = users(two.client(), dtype=dtype)
    table.pull([1])
    values = ones(40)
    values[17, 1] = value
    told = (
        f"key 117 of table 'users' hold {np.float32(value)}",
        f"{dtype} has no NaN, Inf or {limit}",
    )
    refused(lambda: table.put(np.arange(100, 140), values), NonFinite, *told)
    assert unchanged(table)
    values[17, 1] = 0.99 * float(limit)
    table.put(np.arange(100, 140), values)
    assert np.isfinite(table.pull(np.arange(100, 140))).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_state_that_is_not_finite_is_not_put_and_the_key_is_named(
    two: RoleCluster, bad: float
) -> None:
    table = users(two.client(), rule=Adagrad(lr=0.5))
    table.pull([1])
    state = ones(3)
    state[1, DIM - 1] = bad
    told = ("the state for key -6 of table 'users' holds", str(bad))
    refused(lambda: table.put([5, -6, 7], ones(3), state, [1, 1, 1]), NonFinite, *told)
    assert unchanged(table)


def test_servers_refuse_what_a_client_has_not_looked_at_before_they_write(
    make_cluster: MakeCluster, kind: str
) -> None:
    """As Arrow's rows, which are put part by part."""
    table = users(make_cluster(kind, servers=1).client(), dtype="float16", rule=Adagrad(lr=0.5))
    for value, held in ((1e6, 1.0), (1.0, np.nan)):
        records = Records(
            np.array([5, -6]),
            ones(2) * np.array([[1.0], [value]], np.float32),
            ones(2) * np.array([[1.0], [held]], np.float32),
            np.ones(2, np.uint32),
        )
        put = partial(table._keyed.put, table.block, records, WAIT_S)
        refused(put, NonFinite, "for key -6 of table 'users'")
    assert len(table) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_update_of_16_bits_that_goes_too_far_ends_at_the_largest(
    cluster: RoleCluster, dtype: str
) -> None:
    table = users(cluster.client(), dtype=dtype, rule=SGD(1.0), init=Zeros())
    largest = 65504.0 if dtype == "float16" else np.float32(2.0**128 - 2.0**120)
    for sign in (1.0, -1.0):
        table.put([1], np.zeros((1, DIM), np.float32))
        table.push([1], np.full((1, DIM), -sign * 3.4e38)).result()
        assert table.pull([1]).tolist() == [[sign * largest] * DIM]
        table.push([1], np.full((1, DIM), sign * largest)).result()
        assert table.pull([1]).tolist() == [[0.0] * DIM]
