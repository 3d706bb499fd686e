"""Whole runs with real processes: what comes back, how they end, what they leave."""

from __future__ import annotations

import atexit
import pickle
import shutil
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults import victims
from tests.faults.leftovers import folders

import paramserve as ps
from paramserve.errors import (
    ClientClosed,
    CoordinatorGone,
    RunTimeout,
    UnknownName,
    WorkerFailed,
)
from paramserve.observe import Staleness

pytestmark = pytest.mark.usefixtures("leaves_nothing")

POLICIES = [ps.Sync(reduce="sum"), ps.Async()]


@pytest.mark.parametrize(("servers", "policy"), list(zip((2, 1), POLICIES, strict=True)))
def test_run_gives_returns_values_and_staleness(policy: Any, servers: int) -> None:
    result = ps.run(victims.count, workers=3, servers=servers, consistency=policy)
    assert set(result.returns) == {0, 1, 2}
    np.testing.assert_array_equal(result.values["default"]["w"], [60.0, 60.0, 60.0])
    if isinstance(policy, ps.Sync):
        assert all(each.max == 0 for each in result.staleness.values())
    assert not result.failures
    assert not result.stopped


def test_run_staleness_of_a_short_run_is_complete() -> None:
    result = ps.run(victims.count, kwargs={"steps": 3}, workers=1)
    assert result.staleness == {0: Staleness(pushes=3, mean=0.0, max=0)}


def test_run_metrics_are_all_there_by_rank_and_clock() -> None:
    result = ps.run(victims.regress, kwargs={"steps": 30}, workers=2, consistency=ps.Async())
    for rank in range(2):
        clocks = [record.clock for record in result.metrics if record.rank == rank]
        assert clocks == list(range(1, 31))
    assert all(record.values["norm"] > 0 for record in result.metrics)


def test_worker_that_returns_early_lets_the_rest_go_on() -> None:
    result = ps.run(victims.count_by_rank, workers=3, consistency=ps.Sync(reduce="sum"))
    assert result.returns == {0: 5, 1: 10, 2: 15}
    np.testing.assert_array_equal(result.values["default"]["w"], np.full(3, 30.0))


def test_worker_surroundings_have_thread_settings_and_no_torch() -> None:
    result = ps.run(victims.surroundings, engine=ps.Local(threads_per_worker=3))
    seed, environment, argv, modules = result.returns[0]
    assert seed == result.seed, "which the run chose"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert environment[name] == "3"
    assert argv == ["worker 0"]
    assert not {"torch", "ray", "pytest"} & set(modules)
    assert result.values == {}
    with pytest.raises(UnknownName, match="no group 'model'"):
        result.state_dict()


# --- ends that are no success --------------------------------------------------------------------


def test_worker_that_raises_fails_the_run_with_its_traceback() -> None:
    with pytest.raises(WorkerFailed) as caught:
        ps.run(victims.fail_on, args=(1, 3), workers=2)
    result = caught.value.result
    assert result is not None
    assert result.stopped
    assert result.values["default"]["w"].min() >= 3.0  # rank 0 may have gone on
    assert result.groups["default"].version >= 3
    text = str(caught.value)
    assert "worker 1 raised LookupError: no batch 3" in text
    assert text.count("no batch 3") == text.count("Applied:") == text.count("To fix:") == 1
    assert "victims.py" in text
    pickled = pickle.loads(pickle.dumps(caught.value))
    assert (pickled.failed, pickled.result) == (caught.value.failed, None)


def test_return_value_that_cannot_travel_fails_the_run() -> None:
    with pytest.raises(WorkerFailed, match="what the training function returned"):
        ps.run(victims.returns_what_cannot_travel)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_continue_goes_on_without_the_worker_that_raised(policy: Any) -> None:
    result = ps.run(
        victims.fail_on, args=(0, 3), workers=3, consistency=policy, on_worker_death="continue"
    )
    assert result.returns == {1: 20, 2: 20}
    assert "LookupError" in str(result.failures[0])
    np.testing.assert_array_equal(result.values["default"]["w"], np.full(3, 43.0))


def test_continue_fails_when_every_worker_has_failed() -> None:
    with pytest.raises(WorkerFailed, match="exited with code 0"):
        ps.run(victims.exit_early, workers=2, on_worker_death="continue")


def test_timeout_stops_the_run_and_names_who_is_not_done() -> None:
    with pytest.raises(RunTimeout, match=r"timeout_s=1\.5; not done: worker 0"):
        ps.run(victims.sleep_forever, timeout_s=1.5)


def test_worker_that_exits_fails_the_run_and_wait_raises_it_each_time() -> None:
    job = ps.start(victims.exit_early)
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="exited with code 0 before its function returned"):
            job.wait()
    with pytest.raises(WorkerFailed):
        job.state_dict()
    assert list(job.snapshots()) == []
    assert job.status().state == "failed"
    assert "running" not in job.status().workers.values()


# --- while it runs --------------------------------------------------------------------------------


CONNECTS_WITHIN_S = 60.0


def test_stop_keeps_the_values_of_that_moment_though_the_runs_folder_is_gone(pipe: str) -> None:
    job = ps.start(victims.regress, args=(pipe, 10), workers=2, servers=2)
    assert Path(pipe).read_text() == "here\n"
    deadline = time.monotonic() + CONNECTS_WITHIN_S
    while job._reader is None and time.monotonic() < deadline:
        time.sleep(0.01)
    (folder,) = folders()
    shutil.rmtree(Path(tempfile.gettempdir()) / folder)
    job.stop()
    result = job.wait()
    assert result.stopped
    assert result.returns == {}
    assert np.abs(result.values["default"]["w"]).sum() > 0
    assert "stopped=True" in repr(result)
    assert np.abs(np.asarray(job.state_dict("default")["w"])).sum() > 0
    assert job.status().state == "stopped"
    assert job.status().workers == {0: "stopped", 1: "stopped"}
    job.stop()


def test_stop_before_the_servers_are_up_ends_at_once() -> None:
    job = ps.start(victims.sleep_forever)
    job.stop()
    assert job.wait().values == {}
    assert list(job.snapshots()) == [], "stopped before it could have had a group"


def test_snapshots_come_in_order_at_every_kth_version_to_each_reader() -> None:
    """One of the readers takes the first only, until the run has ended."""
    job = ps.start(victims.regress, kwargs={"steps": 200}, workers=2)
    seen: dict[int, list[ps.Snapshot]] = {}

    def read(every: int) -> None:
        seen[every] = list(job.snapshots(every=every, name="default"))

    threads = [threading.Thread(target=read, args=(every,)) for every in (20, 25)]
    for thread in threads:
        thread.start()
    slow = job.snapshots(every=1, name="default", keep=2)
    first = next(slow)
    result = job.wait()
    with pytest.raises(ClientClosed, match=r"run has finished .* Applied: no. .* job.wait"):
        job.handle()
    for thread in threads:
        thread.join()
    for every, found in seen.items():
        versions = [snapshot.version for snapshot in found]
        assert versions == sorted(set(versions))
        assert {version % every for version in versions} == {0}
        assert versions[-1] == 200
        np.testing.assert_array_equal(found[-1].state["w"], result.values["default"]["w"])
        assert [snapshot.seconds for snapshot in found] == sorted(s.seconds for s in found)
    rest = list(slow)
    assert [snapshot.version for snapshot in rest] == [199, 200]
    assert rest[-1].dropped >= 200 - first.version - 2
    with pytest.raises(UnknownName, match="no group 'defualt'; its groups: 'default'"):
        list(job.snapshots(name="defualt"))


def test_running_job_can_be_read_and_connected_to(pipe: str) -> None:
    job = ps.start(victims.regress, args=(pipe, 5), workers=2)
    assert Path(pipe).read_text() == "here\n"
    assert np.abs(np.asarray(job.state_dict("default")["w"])).sum() > 0
    with pytest.raises(UnknownName, match="'default'"):
        job.state_dict("model")
    client = job.handle().connect()
    assert client.rank == -1
    assert client.pull("w").shape == (victims.SIZE,)
    with pickle.loads(pickle.dumps(job.handle())).connect() as elsewhere:
        assert elsewhere.connection.id != client.connection.id
        assert elsewhere.pull("w").shape == (victims.SIZE,)
    assert job.status().workers == {0: "running", 1: "running"}
    handle = job.handle()
    far = pickle.loads(pickle.dumps(handle))
    assert handle.status().workers == far.status().workers == {0: "running", 1: "running"}
    job.stop()
    with pytest.raises(ClientClosed):
        client.pull("w")
    for ask in (handle.status, handle.metrics, handle.state_dict):
        with pytest.raises(ClientClosed, match=r"run was stopped .* Applied: no. .* job.wait"):
            ask()
    with pytest.raises(CoordinatorGone, match=r"has ended, or cannot be reached.* job.wait"):
        far.status()
    for each in (handle, far):
        each.close()


def test_two_runs_at_a_time_do_not_meet() -> None:
    engine = ps.Local()
    jobs = [ps.start(victims.count, args=(n,), engine=engine) for n in (5, 10)]
    assert [job.wait().returns[0] for job in jobs] == [[5.0] * 3, [10.0] * 3]


# --- after the function has returned --------------------------------------------------------------


STOP_S = 0.05


def flushes_at_exit(worker: ps.Worker, path: str, seconds: float) -> None:
    """Register a handler that takes this long before it writes a file, as loggers do."""

    def flush() -> None:
        time.sleep(seconds)
        Path(path).write_text("flushed")

    atexit.register(flush)


def test_exit_handler_that_takes_longer_than_a_stop_runs_to_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    engine = ps.Local(deadlines=ps.Deadlines(stop_s=STOP_S))
    ps.run(flushes_at_exit, args=(str(path), 10 * STOP_S), engine=engine)
    assert path.read_text() == "flushed"
    assert capfd.readouterr().err == ""


def test_exit_handler_that_takes_too_long_is_cut_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    engine = ps.Local(deadlines=ps.Deadlines(exit_s=0.1))
    ps.run(flushes_at_exit, args=(str(path), 60.0), engine=engine)
    assert not path.exists()
    told = capfd.readouterr().err
    assert "worker 0 still ran 0.1 s after the end of its function" in told
    assert "Deadlines(exit_s=...)" in told


# --- records --------------------------------------------------------------------------------------


def logs_and_ends(worker: ps.Worker) -> None:
    """The first incarnations of ranks 1 and 2 end right after what they have logged."""
    worker.log(incarnation=worker.incarnation)
    if worker.rank and worker.incarnation == 1:
        raise SystemExit(3) if worker.rank == 1 else ZeroDivisionError("on purpose")


def test_records_of_workers_that_raise_and_exit_are_in_the_result() -> None:
    """No heartbeat is due before they end."""
    deadlines = ps.Deadlines(heartbeat_s=8.0, stall_s=30.0)
    result = ps.run(
        logs_and_ends,
        workers=3,
        on_worker_death=ps.Restart(1),
        engine=ps.Local(deadlines=deadlines),
        timeout_s=60,
    )
    found = sorted((each.rank, each.values["incarnation"]) for each in result.metrics)
    assert found == [(0, 1.0), (1, 1.0), (1, 2.0), (2, 1.0), (2, 2.0)]


LIMITS = ps.Limits(header_bytes_max=1 << 16, log_records_max=300)
RECORDS = 2000
NAMES = [f"layer.{number}.weight.gradient.norm" for number in range(40)]


def test_flood_of_records_ends_no_run_and_every_record_is_returned_or_counted() -> None:
    def train(worker: ps.Worker) -> None:
        for step in range(RECORDS):
            worker.log(step=step, **dict.fromkeys(NAMES, 1.0))

    result = ps.run(train, workers=2, engine=ps.Local(limits=LIMITS))
    assert len(result.metrics) + result.dropped_records == 2 * RECORDS
    assert result.dropped_records > 0
    for rank in range(2):
        steps = [record.values["step"] for record in result.metrics if record.rank == rank]
        assert steps == sorted(set(steps)), "in order, each once"
        assert RECORDS - 1 in steps, "the oldest are dropped first"


def test_records_that_fit_all_come_back() -> None:
    count = LIMITS.log_records_max - 1

    def train(worker: ps.Worker) -> None:
        for step in range(count):
            worker.log(step=step, **dict.fromkeys(NAMES, 1.0))

    result = ps.run(train, workers=2, engine=ps.Local(limits=LIMITS))
    assert result.dropped_records == 0
    assert Counter(record.rank for record in result.metrics) == {0: count, 1: count}


# --- surroundings of values -----------------------------------------------------------------------


def scaled_model() -> Any:
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


def trains_scaled(worker: ps.Worker) -> None:
    import torch

    model = scaled_model()
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model[0].history["scale"].append(2.0 + worker.rank)


@pytest.mark.slow
def test_result_with_extra_state_loads_strictly() -> None:
    job = ps.start(trains_scaled, workers=2, timeout_s=60)
    model = scaled_model()
    for snapshot in job.snapshots(every=1):
        model.load_state_dict(snapshot.state)
    result = job.wait()
    model.load_state_dict(result.state_dict())
    assert model[0].history == {"scale": [1.0, 2.0]}, "rank 0's, of the end"
