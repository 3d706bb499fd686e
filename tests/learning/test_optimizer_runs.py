"""`worker.optimizer` in whole runs: it learns, and what torch users do with it keeps working."""

from __future__ import annotations

import pytest
import torch
from tests.learning import training

import paramserve as ps


@pytest.mark.parametrize(
    "consistency",
    [pytest.param(ps.Sync(), marks=pytest.mark.slow), ps.Async()],
    ids=["sync", "async"],
)
def test_run_with_overlap_learns(consistency: object) -> None:
    result = ps.run(
        training.train_to_learn,
        workers=2,
        servers=2,
        consistency=consistency,
        seed=3,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    model = training.ConvNet(7)
    model.load_state_dict(result.state_dict())
    assert training.accuracy(model) > 0.9  # guessing gives 0.1
    assert len([record for record in result.metrics if "loss" in record.values]) == 300


def test_run_with_buffers_tied_and_added_parameters_and_scaler() -> None:
    result = ps.run(
        training.train_norm_net,
        workers=2,
        servers=2,
        consistency=ps.Sync(),
        seed=3,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    (first, steps), (second, other_steps) = result.returns[0], result.returns[1]
    # 24 steps, one of them skipped on both ranks for rank 1's Inf; the last group came 5 later.
    assert steps == other_steps == [23] * 5 + [18] * 2
    model = training.NormNet(9)
    model.load_state_dict(result.state_dict())
    for name, value in model.state_dict().items():
        assert torch.equal(value, torch.from_numpy(first[name])), name
        ours = name.startswith("norm.running")
        assert (first[name] != second[name]).any() == ours, name
    assert training.accuracy(model.eval()) > 0.5
