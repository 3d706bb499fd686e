"""Models and tables on their way into a run and out of it, with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paramserve as ps
from paramserve.errors import WorkerFailed


def tied_model() -> nn.Module:
    """Two tied layers, and buffers."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def distance(state: dict[str, Any]) -> float:
    """How far the model's answer to ones is from ones."""
    model = tied_model().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return float((model(torch.ones(2, 4)) - 1.0).square().mean())


def train(worker: ps.Worker, steps: int) -> list[float]:
    """What the first layer's bias begins with; then steps towards ones."""
    torch.manual_seed(worker.rank)
    model = tied_model()
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    began: list[float] = model[0].bias.tolist()
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 4)) - 1.0).square().mean().backward()
        optimizer.step()
    return began


def freezes(worker: ps.Worker) -> list[float]:
    """What a frozen layer has that each rank has built in its own way."""
    torch.manual_seed(worker.rank)
    model = tied_model()
    model[0].bias.requires_grad_(False)
    worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05))
    kept: list[float] = model[0].bias.tolist()
    return kept


@pytest.mark.slow
def test_every_rank_loads_frozen_parameters() -> None:
    state = tied_model().state_dict()
    result = ps.run(freezes, workers=2, checkpoint=ps.Checkpoint(load_state=state), timeout_s=60)
    assert result.returns == dict.fromkeys(range(2), state["0.bias"].tolist())


@pytest.mark.slow
def test_best_snapshot_is_kept_and_a_second_run_starts_from_it(tmp_path: Path) -> None:
    with ps.start(train, args=(60,), workers=2, seed=0, timeout_s=60) as job:
        best = min(job.snapshots(every=20, keep=4), key=lambda found: distance(found.state))
        result = job.wait()
    assert best.version in (20, 40, 60)
    assert distance(result.state_dict()) < distance(tied_model().state_dict())

    torch.save(best.state, tmp_path / "best.pt")
    again = ps.run(
        train,
        args=(0,),
        workers=2,
        checkpoint=ps.Checkpoint(load_state=tmp_path / "best.pt"),
        timeout_s=60,
    )
    assert again.returns == dict.fromkeys(range(2), best.state["0.bias"].tolist())
    loaded = again.state_dict()
    assert loaded.keys() == tied_model().state_dict().keys()
    assert all(torch.equal(loaded[name], best.state[name]) for name in loaded)

    with pytest.raises(WorkerFailed) as caught:
        ps.run(
            train,
            args=(0,),
            checkpoint=ps.Checkpoint(load_state=nn.Linear(4, 4).state_dict()),
            timeout_s=60,
        )
    told = str(caught.value)
    for part in ("Missing key(s)", '"0.weight"', 'Unexpected key(s) in state_dict: "weight"'):
        assert part in told
    assert "load_state does not fit the model of optimizer 'model'" in told
