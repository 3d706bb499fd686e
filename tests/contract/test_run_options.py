"""What `ps.run` is told about its workers reaches the shards."""

from __future__ import annotations

import numpy as np

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
