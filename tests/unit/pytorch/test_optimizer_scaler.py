"""`GradScaler` after a step that raised."""

from __future__ import annotations

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model

import paramserve as ps
from paramserve.pytorch.optimizer import adopt

POLICIES = [ps.Sync(), ps.LocalSteps(every=1, outer=ps.SGD(lr=1.0))]


@pytest.mark.parametrize("unscales", [False, True], ids=["", "unscaled by hand"])
@pytest.mark.parametrize("policy", POLICIES, ids=["served", "local"])
def test_grad_scaler_scales_once_after_a_step_that_raised(policy, unscales) -> None:
    model, expected = small_model(), small_model()
    weights = [1.0, 1.0, 0.0, 1.0]

    def weight() -> float:
        return weights.pop()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adopt(FakeCluster(policy=policy).worker(), model, optimizer, weight=weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if step == 1:
            before = [param.clone() for param in model.parameters()]
            with pytest.raises(ValueError, match="weight must be"):
                scaler.step(optimizer)
            if isinstance(policy, ps.LocalSteps):  # made its own step before it asked
                torch._foreach_copy_([param.detach() for param in model.parameters()], before)
            optimizer.zero_grad()
            scaler.update()
            scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        plain.zero_grad()
        loss_of(expected, step).backward()
        plain.step()
    assert_same(model, expected)
