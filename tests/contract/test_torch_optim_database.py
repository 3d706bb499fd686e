"""Every set of options that torch's own tests give its optimizers: the servers step as torch does,
or say which optimizers they cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.optimizer_pair import GROUPS, Harnesses, Pair
from tests.needs import needs

from paramserve.consistency.built_in import Sync

needs("expecttest")
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db  # noqa: E402

STEPS = 4
MATRICES = (("first.weight",), ("second.weight",))
"""All that Muon takes."""
REFUSED = {
    "LBFGS": r"torch\.optim\.LBFGS: it .*closure",
    "SparseAdam": r"torch\.optim\.SparseAdam: it takes sparse gradients",
}


@pytest.mark.parametrize("info", optim_db, ids=lambda info: str(info.optim_cls.__name__))
def test_options_of_torchs_tests(make_cluster: MakeCluster, info: OptimizerInfo) -> None:
    kind = info.optim_cls
    inputs: list[Any] = info.optim_inputs_func(device="cpu")
    assert inputs
    pair = Pair(Harnesses(make_cluster), 1, Sync())
    try:
        for given in inputs:
            steps_as_torch(pair, kind, given.kwargs)
    finally:
        pair.close()


def steps_as_torch(pair: Pair, kind: type[Any], options: dict[str, Any]) -> None:
    if refused := REFUSED.get(kind.__name__):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(TypeError, match=refused):
            pair.adopts(0, model, kind(model.parameters(), **options))
        return
    names = MATRICES if kind is torch.optim.Muon else GROUPS
    pair.start(lambda groups: kind(groups, **options), names)
    for seed in range(STEPS):
        pair.set_gradients(seed, set())
        pair.step(lambda side: side.optimizer.step())
    pair.compare_states()
