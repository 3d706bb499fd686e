"""Whole runs whose processes somebody else has started equal those of `Local`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.agents import WithAgents
from tests.contract.authorities import Authority
from tests.learning import numpy_training

import paramserve as ps

MODULE = "tests.learning.numpy_training"
SECURED = [False, True]


@pytest.fixture(params=SECURED, ids=["plain", "tls"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> WithAgents:
    tls = Authority(tmp_path).issue("127.0.0.1") if request.param else None
    rules = (f"{MODULE}:Halved",)
    return WithAgents(train=f"{MODULE}:train", rules=rules, tls=tls).within(tmp_path)


def test_external_run_equals_local_bit_by_bit(engine: WithAgents) -> None:
    settings: dict[str, Any] = {"workers": 2, "consistency": ps.Sync(reduce="mean"), "seed": 5}
    there = ps.run(numpy_training.train, engine=engine, **settings)
    here = ps.run(numpy_training.train, **settings)
    assert there.values["default"]["w"].tobytes() == here.values["default"]["w"].tobytes()
    assert there.returns == here.returns
    assert set(there.returns) == {0, 1}
    assert there.returns[0][-1] < there.returns[0][0] / 4
    [fleet] = engine.fleets
    assert len(fleet.started) == 4


def test_external_run_with_rules_that_agents_import(tmp_path: Path) -> None:
    engine = WithAgents(train=f"{MODULE}:train_by_rule", rules=(f"{MODULE}:Halved",))
    result = ps.run(
        numpy_training.train_by_rule,
        workers=2,
        servers=2,
        rules=[numpy_training.Halved],
        engine=engine.within(tmp_path),
    )
    np.testing.assert_array_equal(result.values["default"]["w"], np.full(4, -1.5))
    assert result.returns == {0: 0, 1: 1}


def test_external_function_that_cannot_be_named_is_refused(engine: WithAgents) -> None:
    with pytest.raises(ps.ParamServeError, match="--train module:function"):
        ps.run(lambda worker: None, engine=engine)
    with pytest.raises(ps.ParamServeError, match="args="):
        ps.run(numpy_training.train, args=(1,), engine=engine)


def test_external_agents_with_another_function_fail_the_run(tmp_path: Path) -> None:
    engine = WithAgents(train=f"{MODULE}:train_by_rule", wait_s=4.0).within(tmp_path)
    with pytest.raises(ps.ParamServeError, match=f"{MODULE}:train.*train_by_rule"):
        ps.run(numpy_training.train, engine=engine)
