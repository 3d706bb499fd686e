"""What modules keep beside parameters and buffers is part of the result."""

from __future__ import annotations

from typing import Any

import pytest

import paramserve as ps

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def build() -> Any:
    import torch

    class Scaled(torch.nn.Linear):
        history: dict[str, list[float]]

        def get_extra_state(self) -> Any:
            return self.history

        def set_extra_state(self, state: Any) -> None:
            self.history = state

    model = torch.nn.Sequential(Scaled(2, 3), torch.nn.Linear(3, 1))
    model[0].history = {"scale": [1.0]}
    return model


def trains(worker: ps.Worker) -> None:
    import torch

    model = build()
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model[0].history["scale"].append(2.0 + worker.rank)


def test_result_with_extra_state_loads_strictly() -> None:
    result = ps.run(trains, workers=2, timeout_s=60)
    model = build()
    model.load_state_dict(result.state_dict())
    assert model[0].history == {"scale": [1.0, 2.0]}, "rank 0's, of the end"
