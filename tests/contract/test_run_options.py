"""What `ps.run` is told about its workers reaches the shards.

Without torch here: workers import what the module of their function has.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from tests.suites import each_case

import paramserve as ps
from paramserve.consistency import Drop, GroupView, Push
from paramserve.errors import UnknownName
from paramserve.reporters import Report, Reporter


def adds_one(worker: ps.Worker, factors: Sequence[float] = (1.0, 1.0)) -> None:
    assert worker.factor == 1.0
    for wrong in (0.0, float("nan"), -1, "1"):
        with pytest.raises((TypeError, ValueError), match="factor must be"):
            worker.factor = wrong
    worker.factor = factors[worker.rank]
    worker.client.define("w", np.zeros(3), rule=ps.Add())
    worker.client.push("w", np.ones(3))
    worker.client.tick()


@each_case(
    ("factors", "policy", "value"),
    [([0.5, 3.0], ps.Async(), 3.5), ([1.0, 3.0], ps.Sync(), 1.0)],
)
def test_factor_multiplies_the_gradients_of_each_rank_and_weighs_their_mean(
    make_cluster: MakeCluster, factors: Sequence[float], policy: ps.Policy, value: float
) -> None:
    cluster = make_cluster(workers=2, policy=policy)
    Ranks(cluster, lambda worker: adds_one(worker, factors)).start(0, 1).end()
    assert cluster.client().pull("w").tolist() == [value] * 3


# --- what would train nothing -----------------------------------------------------------------


def test_run_of_which_the_servers_hear_nothing_warns() -> None:
    words = "trained nothing on the servers.*worker.optimizer"
    with pytest.warns(UserWarning, match=words) as warned:
        assert ps.run(lambda worker: worker.rank, workers=1).returns == {0: 0}
    assert [each.filename for each in warned] == [__file__]


def loops(worker: ps.Worker) -> float:
    import torch

    rows = torch.utils.data.TensorDataset(torch.ones(4, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (inputs,) in worker.loader(rows, batch_size=2):
        model(inputs).sum().backward()
        optimizer.step()
    return float(worker.all_reduce(1.0))


@pytest.mark.slow
def test_run_that_loops_and_reduces_without_an_optimizer_of_its_own_warns() -> None:
    with pytest.warns(
        UserWarning, match="the run trained nothing on the servers.*own, if any"
    ) as w:
        result = ps.run(loops, workers=1)
    assert len(w) == 1
    with pytest.raises(UnknownName, match=r"no other: no worker has called.*worker.optimizer\("):
        result.state_dict()


def test_rank_that_averages_gradients_by_itself_does_not_warn(make_cluster: MakeCluster) -> None:
    with (
        warnings.catch_warnings(action="error"),
        ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker,
    ):
        worker.loop_with_gradients()
        worker.all_reduce(np.ones(2))


@pytest.mark.slow
def test_run_that_evaluates_without_gradients_does_not_warn() -> None:
    def evaluates(worker: ps.Worker) -> float:
        import torch

        rows = torch.utils.data.TensorDataset(torch.ones(4, 2))
        with torch.no_grad():
            total = sum(float(each.sum()) for (each,) in worker.loader(rows, batch_size=2))
        return float(worker.all_reduce(total))

    with warnings.catch_warnings(record=True, action="always") as told:  # a run raises none
        assert ps.run(evaluates, workers=1).returns == {0: 8.0}
    assert told == []


def test_connected_rank_that_loops_without_an_optimizer_of_its_own_warns(
    make_cluster: MakeCluster,
) -> None:
    worker = ps.Worker(make_cluster("unix", workers=1).client(0), 0)
    loops(worker)
    with pytest.warns(UserWarning, match="rank 0 trained nothing on the servers"):
        worker.finish()


def test_connected_rank_ends_in_order_where_its_cluster_has_ended(
    make_cluster: MakeCluster,
) -> None:
    def lose_cluster(worker: ps.Worker) -> ps.Worker:
        worker.loop_with_gradients()
        worker.client.connection.control.close()
        return worker

    with ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker:
        worker.client.define("w", np.zeros(3))
        lose_cluster(worker)
    alone = lose_cluster(ps.Worker(make_cluster("unix", workers=1).client(0), 0))
    with pytest.warns(UserWarning, match="rank 0 trained nothing on the servers"):
        alone.finish()


def test_run_whose_optimizer_makes_no_step_warns() -> None:
    def forgets(worker: ps.Worker) -> None:
        import torch

        model = torch.nn.Linear(2, 1)
        worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.warns(UserWarning, match="'model' was not trained.*no rank has made a step"):
        ps.run(forgets, workers=1)


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


@dataclass(frozen=True)
class DropsAll(ps.Policy):
    def on_push(self, push: Push, group: GroupView) -> Drop:
        return Drop()


def test_run_whose_policy_drops_every_gradient_warns_with_numbers() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = ps.run(adds_one, workers=2, consistency=DropsAll())
    (told,) = caught
    assert "no gradient of rank 0, rank 1 to group 'default' was applied: DropsAll" in str(
        told.message
    )
    assert "dropped all 2 as too late or too stale. To fix" in str(told.message)
    assert told.filename == __file__
    assert result.dropped == {0: 1, 1: 1}
    assert "dropped={0: 1, 1: 1}" in repr(result)


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


# --- reporters ---------------------------------------------------------------------------------


def logs_twice(worker: ps.Worker) -> None:
    worker.client.define("w", np.zeros(3), rule=ps.Add())
    for step in range(2):
        worker.client.push("w", np.ones(3))
        worker.client.tick().result()
        worker.log(loss=step)


def test_reporters_have_all_that_was_logged_and_one_that_raises_ends_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Raises(Reporter):
        def report(self, report: Report) -> None:
            raise ValueError("no room")

    reporters = [Raises(), ps.CSV(tmp_path / "log.csv")]
    result = ps.run(logs_twice, workers=2, report_to=reporters)
    assert result.state_dict("default")["w"].tolist() == [2.0] * 3
    rows = (tmp_path / "log.csv").read_text().splitlines()[1:]
    assert sorted(row.split(",", 1)[1] for row in rows) == [
        "0,1,loss,0.0",
        "0,2,loss,1.0",
        "1,1,loss,0.0",
        "1,2,loss,1.0",
    ]
    assert capfd.readouterr().err.count("the reporter Raises raised ValueError: no room") == 1


def test_reporter_that_cannot_begin_raises_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        ps.run(logs_twice, report_to=[ps.CSV(tmp_path / "file" / "log.csv")])
    with pytest.raises(TypeError, match="takes a list of reporters"):
        ps.run(logs_twice, report_to=ps.CSV(tmp_path / "log.csv"))  # type: ignore[arg-type]
