"""A worker joins a group while the refusal of an earlier push is unread: the client stays open."""

from __future__ import annotations

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.test_refused_steps import BAD, Rising
from tests.contract.test_tables import DIM, ones

from paramserve.client import BlockPush
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.table.options import Zeros
from paramserve.errors import ParamServeError
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")


def test_refusal_that_is_read_while_a_worker_joins_is_raised_and_the_client_goes_on(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=Async(), registers=[Rising])
    client = cluster.client(0)
    block = client.define("w", np.zeros(4), rule=Rising())
    users = client.table("users", DIM, rule=Add(), init=Zeros(), consistency=Sync(reduce="sum"))
    client.rest("users")
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    client.dense.step("default", [BlockPush(block, slot, None, BAD)])
    kept = users.push([1], ones(1))
    with pytest.raises(ParamServeError, match=r"rate is -1\.0, it must not be negative"):
        client.tick("users")
    with pytest.raises(ParamServeError, match=r"rate is -1\.0, it must not be negative"):
        kept.result()
    assert not client.closed
    users.push([2], ones(1))
    client.tick("users").result()
    assert users.pull([1, 2])[:, 0].tolist() == [0.0, 1.0]
