"""What `ps.run` is told about its workers reaches the shards."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks

import paramserve as ps


def adds_one(worker: ps.Worker) -> None:
    worker.client.define("w", np.zeros(3), rule=ps.Add())
    worker.client.push("w", np.ones(3))
    worker.client.tick()


def test_worker_weight_multiplies_the_gradients_of_each_rank() -> None:
    result = ps.run(adds_one, workers=2, consistency=ps.Async(), worker_weight=[0.5, 3.0])
    assert result.state_dict("default")["w"].tolist() == [3.5] * 3


def test_worker_weight_weighs_the_mean_of_a_synchronous_clock() -> None:
    result = ps.run(adds_one, workers=2, consistency=ps.Sync(), worker_weight=[1.0, 3.0])
    assert result.state_dict("default")["w"].tolist() == [1.0] * 3


# --- what would train nothing -----------------------------------------------------------------


def test_run_of_which_the_servers_hear_nothing_warns() -> None:
    def trains_a_copy(worker: ps.Worker) -> int:
        model = torch.nn.Linear(2, 1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return worker.rank

    with pytest.warns(UserWarning, match="trained nothing on the servers.*worker.optimizer"):
        assert ps.run(trains_a_copy, workers=1).returns == {0: 0}


def test_run_that_only_reduces_gives_its_result_where_warnings_are_errors() -> None:
    def reduces(worker: ps.Worker) -> float:
        return float(worker.all_reduce(2.0))

    with warnings.catch_warnings(action="error"):
        assert ps.run(reduces, workers=1).returns == {0: 2.0}


def test_warning_of_a_run_that_trains_nothing_leaves_it_its_result(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings(action="error"):
        assert ps.run(lambda worker: worker.rank, workers=1).returns == {0: 0}
    assert "paramserve: the run trained nothing on the servers" in capfd.readouterr().err


def test_pushes_that_wait_for_a_tick_at_the_end_warn_with_their_names(
    make_cluster: MakeCluster,
) -> None:
    def forgets(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        worker.client.push("w", np.ones(3))
        worker.client.tick()
        for _ in range(2):
            worker.client.push("w", np.ones(3))

    cluster = make_cluster(workers=1, policy=ps.Sync())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Ranks(cluster, forgets).start(0).end()
    (told,) = [str(each.message) for each in caught if "wait for a tick" in str(each.message)]
    assert "rank 0 ends with pushes that wait for a tick: 2 to group 'default' ('w')" in told
    assert cluster.client().pull("w").tolist() == [1.0] * 3
