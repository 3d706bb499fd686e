"""Finite gradients leave finite values, also where the sum of the workers' gradients overflows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster, in_threads
from tests.contract.test_tables import users
from tests.suites import each_case

from paramserve.client import BlockPush, Client, Outcome
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Buffered, Sync
from paramserve.core.table.options import Constant
from paramserve.errors import NonFinite, ParamServeError
from paramserve.rules import SGD

pytestmark = pytest.mark.usefixtures("tables_ready")

LARGE = 2e38
"""The sum of two of them is no float32."""
RATE = 2.0**-126
KEYS = np.arange(100)


class Tensor:
    """A float32 tensor of zeros, cut over all servers."""

    def __init__(self, client: Client, policy: Policy) -> None:
        self.client = client
        client.define("w", np.zeros(40_000, np.float32), rule=SGD(RATE))

    def step(self, gradient: float, weight: float = 1.0, clip_norm: float = 0.0) -> Outcome:
        block = self.client.blocks()[0]
        slot = self.client.dense.gradient_slot(block)
        slot[:] = 1.0
        slot[-1] = gradient
        push = [BlockPush(block, slot)]
        return self.client.dense.step("default", push, weight=weight, clip_norm=clip_norm).result(
            WAIT_S
        )

    def value(self) -> float:
        values = self.client.pull("w")
        assert np.isfinite(values).all()
        return float(values[-1])


class Rows:
    """Rows of a table, zeros, on all servers."""

    def __init__(self, client: Client, policy: Policy) -> None:
        self.client = client
        self.table = users(client, rule=SGD(RATE), init=Constant(0.0), consistency=policy)

    def step(self, gradient: float, weight: float = 1.0) -> Outcome:
        gradients = np.ones((KEYS.size, 4), np.float32)
        gradients[-1] = gradient
        ticket = self.table.push(KEYS, gradients, weight=weight)
        self.client.tick("users", weight=weight).result(WAIT_S)
        return ticket.result(WAIT_S)

    def value(self) -> float:
        values = self.table.pull(KEYS)
        assert np.isfinite(values).all()
        return float(values[-1, 0])


Kind = type[Tensor] | type[Rows]
both = each_case("kind", [Tensor, Rows])


def team(make_cluster: MakeCluster, kind: Kind, policy: Policy, workers: int = 2) -> list[Any]:
    cluster: RoleCluster = make_cluster("unix", servers=2, workers=workers, policy=policy)
    return [kind(cluster.client(rank), policy) for rank in range(workers)]


def clock(ranks: list[Any], gradients: list[float], **options: float) -> list[Any]:
    """What each rank is told of a step that all make."""
    told: list[Any] = [None] * len(ranks)

    def step(rank: int) -> None:
        try:
            told[rank] = ranks[rank].step(gradients[rank], **options)
        except ParamServeError as error:
            told[rank] = error

    in_threads(*(lambda rank=rank: step(rank) for rank in range(len(ranks))))
    return told


@both
@each_case("weight", [1.0, 128.0, 1e-42, 1e60])
def test_mean_of_finite_gradients_is_applied_though_their_sum_overflows(
    make_cluster: MakeCluster, kind: Kind, weight: float
) -> None:
    ranks = team(make_cluster, kind, Sync())
    assert [each.version for each in clock(ranks, [LARGE, LARGE], weight=weight)] == [1, 1]
    assert ranks[0].value() == pytest.approx(-RATE * LARGE)
    clock(ranks, [LARGE, 0.0], weight=weight)  # the same without an overflow
    assert ranks[0].value() == pytest.approx(-1.5 * RATE * LARGE)


@both
def test_mean_of_the_largest_numbers_is_applied(make_cluster: MakeCluster, kind: Kind) -> None:
    ranks = team(make_cluster, kind, Sync())
    largest = float(np.finfo(np.float32).max)
    assert [each.version for each in clock(ranks, [largest, largest])] == [1, 1]
    assert ranks[0].value() == pytest.approx(-RATE * largest)


@both
@each_case("on_nonfinite", ["refuse", "skip"])
def test_sum_that_overflows_ends_its_clock_without_an_update(
    make_cluster: MakeCluster, kind: Kind, on_nonfinite: Any
) -> None:
    ranks = team(make_cluster, kind, Sync(reduce="sum", on_nonfinite=on_nonfinite))
    told = clock(ranks, [LARGE, LARGE])
    if on_nonfinite == "refuse":
        for error in told:
            assert isinstance(error, NonFinite)
            assert "the sum of the gradients of ranks [0, 1]" in str(error)
            assert "is not finite" in str(error)
            assert "Applied: no" in str(error)
    else:
        assert [each.skipped for each in told] == [True, True]
    assert ranks[0].value() == 0.0
    clock(ranks, [LARGE, -LARGE / 2])
    assert ranks[0].value() == pytest.approx(-0.5 * RATE * LARGE)


def test_clipping_takes_the_norm_of_the_mean_though_the_sum_overflows(
    make_cluster: MakeCluster,
) -> None:
    ranks = team(make_cluster, Tensor, Sync())
    assert [each.version for each in clock(ranks, [LARGE, LARGE], clip_norm=1e38)] == [1, 1]
    assert ranks[0].value() == pytest.approx(-RATE * 1e38)


@both
@each_case("on_nonfinite", ["refuse", "skip"])
def test_gradient_that_makes_a_buffer_overflow_is_left_out(
    make_cluster: MakeCluster, kind: Kind, on_nonfinite: Any
) -> None:
    policy = Buffered(2, damping=None, on_nonfinite=on_nonfinite)
    (one,) = team(make_cluster, kind, policy, workers=1)
    one.step(LARGE)
    if on_nonfinite == "refuse":
        with pytest.raises(NonFinite, match="the sum of the gradients in the buffer"):
            one.step(LARGE)
    else:
        assert one.step(LARGE).skipped
    assert one.value() == 0.0
    one.step(-LARGE)
    assert one.value() == 0.0
    one.step(LARGE)
    one.step(1.0)
    assert one.value() == pytest.approx(-0.5 * RATE * LARGE)
