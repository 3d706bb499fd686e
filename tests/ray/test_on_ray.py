"""Whole runs on a Ray cluster of three nodes: as on `Local`, and found from other processes."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.faults.test_serving import eventually
from tests.ray import victims

import paramserve as ps
from paramserve.errors import ClientClosed, CoordinatorGone, NameTaken, ServerGone, WorkerFailed
from paramserve.launch.entries import Key

pytestmark = pytest.mark.usefixtures("ray_cluster")

ATTACHED_S = 60.0
SECOND_DRIVER = """
import sys
import numpy as np
import paramserve as ps

handle = ps.attach("shared", engine=ps.OnRay(sys.argv[1]))
with handle.connect() as client:
    client.push("w", np.ones(4)).result()
    print(*client.pull("w"))
"""


def until_at_work(job: ps.Job) -> None:
    """Wait until a worker has pushed something."""
    client = job.handle().connect()
    client.define("w", np.zeros(2), rule=ps.Add())
    while not np.any(client.pull("w")):
        pass


def killed(job: ps.Job, victim: Key) -> None:
    """SIGKILL a process of a run once the training is under way."""
    until_at_work(job)
    processes = {key: process for process, key in job._supervisor._processes.items()}
    os.kill(processes[victim].pid, signal.SIGKILL)


def test_job_of_a_task_that_raises_gives_its_cpus_back() -> None:
    import ray
    from ray.util import placement_group_table

    @ray.remote(num_cpus=0)
    def starts_and_raises() -> None:
        import threading

        import paramserve as ps

        def train(worker: ps.Worker) -> None:
            threading.Event().wait(60.0)

        with ps.start(train, engine=ps.OnRay()) as job:
            job.handle()  # it is up
            raise LookupError("in the task")

    with pytest.raises(LookupError, match="in the task"):
        ray.get(starts_and_raises.remote())
    states = {group["state"] for group in placement_group_table().values()}
    assert states <= {"REMOVED"}


def test_job_of_a_killed_actor_gives_its_room_back() -> None:
    """Ray itself keeps a placement group until the whole job of its creator has ended."""
    import ray
    from ray.util import list_named_actors, placement_group_table

    @ray.remote(num_cpus=0)
    class Trial:
        def start(self) -> None:
            import threading

            import paramserve as ps

            def train(worker: ps.Worker) -> None:
                threading.Event().wait(60.0)

            self.job = ps.start(train, engine=ps.OnRay())
            self.job.handle()  # it is up

    def has_left_nothing() -> None:
        assert {group["state"] for group in placement_group_table().values()} <= {"REMOVED"}
        names = [each["name"] for each in list_named_actors(all_namespaces=True)]
        assert not [name for name in names if name.startswith("paramserve")]

    trial = Trial.remote()
    ray.get(trial.start.remote())
    ray.kill(trial)
    eventually(has_left_nothing, AssertionError)


@pytest.mark.parametrize(
    "codec",
    [None, pytest.param(ps.Int4(16, even_local=True), marks=pytest.mark.slow)],
    ids=["values", "codec"],
)
def test_sync_run_equals_that_on_local_bit_by_bit(codec: ps.Codec | None) -> None:
    import ray

    def learn(worker: ps.Worker, steps: int, codec: ps.Codec | None) -> tuple[object, int]:
        return victims.least_squares(worker, steps, codec), hash("the same with this seed")

    steps = ray.put(8)  # arrives as its value, as in a task of Ray
    found = [
        ps.run(learn, args=(steps, codec), workers=2, servers=2, engine=engine, seed=7)
        for engine in (ps.Local(), ps.OnRay())
    ]
    assert found[0].returns == found[1].returns
    assert found[1].returns[0] == found[1].returns[1], "which is reduced"
    for result in found:
        sent = result.groups["default"].sent_by_rank
        assert len(sent) == (2 if codec is not None else 0), "what was asked for was encoded"
    one, other = (result.state_dict("default")["w"] for result in found)
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_metrics_of_a_run_are_taken_by_ray(capfd: pytest.CaptureFixture[str]) -> None:
    told = ps.RayMetrics()
    ps.run(victims.least_squares, engine=ps.OnRay(), report_to=[told])
    steps = told._metrics["paramserve_steps"].info
    assert (steps["name"], steps["tag_keys"]) == ("paramserve_steps", ("run", "group"))
    assert told._counted["paramserve_steps", (("group", "default"),)] == 8.0
    assert "reporter" not in capfd.readouterr().err, "one that fails is told of"


def test_refs_in_lists_and_closures_are_read_by_the_workers() -> None:
    import ray

    whole = ray.put(100)

    def learn(worker: ps.Worker, parts: list[ray.ObjectRef[int]]) -> float:
        mine = ray.get(parts[worker.rank], timeout=20) + ray.get(whole, timeout=20)
        return worker.all_reduce(float(mine), "sum")

    parts = [ray.put(rank) for rank in range(2)]
    result = ps.run(learn, args=(parts,), workers=2, engine=ps.OnRay())
    assert result.returns == {0: 201.0, 1: 201.0}
    with pytest.raises(TypeError, match=r"argument 0 \(list: it holds ObjectRef.*captured 'whole'"):
        ps.run(learn, args=(parts,), workers=2)


@pytest.mark.slow
def test_async_run_on_several_nodes_learns() -> None:
    engine = ps.OnRay(servers="spread", workers="apart", worker=ps.Needs(num_cpus=0.5))
    result = ps.run(
        victims.least_squares,
        args=(60,),
        workers=2,
        servers=2,
        consistency=ps.Async(),
        engine=engine,
    )
    assert max(result.returns.values()) < 10  # it begins at 77.5, the mean of 0 to 15 squared


@pytest.mark.slow
def test_workers_get_the_threads_and_the_nodes_that_were_asked_for() -> None:
    needs = ps.Needs(resources={"gadget": 1}, label_selector={"zone": "b"})
    engine = ps.OnRay(worker=needs, threads_per_worker=3)
    result = ps.run(victims.where, workers=2, engine=engine)
    nodes = {labels["ray.io/node-id"] for labels in zone("b")}
    assert {node for node, _ in result.returns.values()} == nodes
    assert {threads for _, threads in result.returns.values()} == {"3"}


def zone(name: str) -> Iterator[dict[str, str]]:
    import ray

    for node in ray.nodes():
        if node["Alive"] and node["Labels"].get("zone") == name:
            yield node["Labels"]


@pytest.mark.slow
def test_worker_that_died_is_named_and_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGKILL"):
        ps.run(victims.dies_once, args=(str(tmp_path),), workers=2, engine=ps.OnRay())


@pytest.mark.slow
def test_run_goes_on_without_a_dead_worker(tmp_path: Path) -> None:
    result = ps.run(
        victims.dies_once,
        args=(str(tmp_path),),
        workers=2,
        engine=ps.OnRay(),
        on_worker_death="continue",
    )
    assert result.returns == {0: (0, 6)}
    assert "SIGKILL" in str(result.failures[1])


@pytest.mark.parametrize(
    "consistency",
    [ps.Sync(reduce="sum"), pytest.param(ps.Async(), marks=pytest.mark.slow)],
    ids=["sync", "async"],
)
def test_restarted_worker_goes_on_where_it_died(
    tmp_path: Path, consistency: ps.Sync | ps.Async
) -> None:
    result = ps.run(
        victims.dies_once,
        args=(str(tmp_path),),
        workers=2,
        engine=ps.OnRay(),
        consistency=consistency,
        on_worker_death=ps.Restart(2),
    )
    assert result.returns == {0: (0, 6), 1: (3, 6)}
    assert [(each.rank, each.clock) for each in result.restarts] == [(1, 3)]
    assert np.asarray(result.state_dict("default")["w"]).tolist() == [12.0, 12.0]


def test_lost_server_ends_the_run() -> None:
    job = ps.start(victims.endless, workers=1, servers=2, engine=ps.OnRay())
    killed(job, Key("server", 1))
    with pytest.raises(ServerGone, match="server 1"):
        job.wait()


@pytest.mark.slow
def test_stopped_run_keeps_its_values() -> None:
    job = ps.start(victims.endless, workers=1, engine=ps.OnRay())
    until_at_work(job)
    job.stop()
    result = job.wait()
    assert result.stopped
    assert np.all(np.asarray(result.state_dict("default")["w"]) > 0)


def test_handle_connects_in_tasks_and_actors_and_says_when_it_is_over() -> None:
    import ray

    @ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
    def push(handle: ps.Handle) -> None:
        with handle.connect() as client:
            client.push("w", np.ones(4)).result()

    @ray.remote(num_cpus=0)
    class Pusher:
        def __init__(self, handle: ps.Handle) -> None:
            self.client = handle.connect()

        def push(self) -> None:
            self.client.push("w", np.ones(4)).result()

    with ps.Cluster(servers=2, engine=ps.OnRay(servers="spread")) as cluster:
        client, handle = cluster.client(), cluster.handle()
        client.define("w", np.zeros(4), rule=ps.Add())
        pusher = Pusher.remote(handle)
        ray.get([push.remote(handle), *(pusher.push.remote() for _ in range(2))])
        assert client.pull("w").tolist() == [3.0] * 4
    with pytest.raises(ClientClosed, match="was closed"):
        handle.connect()
    with pytest.raises(CoordinatorGone):
        pickle.loads(pickle.dumps(handle)).connect()


@pytest.mark.slow
def test_named_cluster_is_found_by_another_driver_and_only_once(ray_cluster: object) -> None:
    address: str = ray_cluster.address
    engine = ps.OnRay()
    with ps.Cluster(name="shared", engine=engine) as cluster:
        client = cluster.client()
        client.define("w", np.zeros(4), rule=ps.Add())
        told = subprocess.run(
            [sys.executable, "-c", SECOND_DRIVER, address],
            capture_output=True,
            text=True,
            timeout=ATTACHED_S,
        )
        assert told.stdout == "1.0 1.0 1.0 1.0\n", told.stderr
        assert told.stderr == ""  # neither Ray nor we have anything to say
        with pytest.raises(NameTaken, match="shared"):
            ps.Cluster(name="shared", engine=engine)
    assert engine.find("shared") is None
    with ps.Cluster(name="shared", engine=engine):
        assert engine.find("shared") is not None
