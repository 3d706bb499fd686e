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

STEPS = 4
MATRICES = (("first.weight",), ("second.weight",))
"""All that Muon takes."""
REFUSED = {
    "LBFGS": r"torch\.optim\.LBFGS: it .*closure",
    "SparseAdam": r"torch\.optim\.SparseAdam: it takes sparse gradients",
}


@pytest.mark.slow
def test_options_of_torchs_tests(make_cluster: MakeCluster) -> None:
    needs("expecttest")
    # Here and in one test, because it takes 3 s, in each process that collects tests.
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        kind = info.optim_cls
        inputs: list[Any] = info.optim_inputs_func(device="cpu")
        assert inputs, kind
        pair = Pair(Harnesses(make_cluster), 1, Sync())
        for options in inputs:
            try:
                steps_as_torch(pair, kind, options.kwargs)
            except BaseException as error:
                error.add_note(f"{kind.__name__}: {options.kwargs}")
                raise
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
