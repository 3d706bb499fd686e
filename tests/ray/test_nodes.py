"""Where `OnRay` puts processes, what it says when there is no room, and the loss of nodes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from tests.contract.test_engine_contract import (
    HERE,
    WAIT_S,
    bodies,
    report_of,
    role,
    status_of,
    until_ended,
)
from tests.faults import checkpoint_victims
from tests.ray.nodes import NODES

import paramserve as ps
from paramserve.engine.base import Fleet, Process, Role
from paramserve.engine.on_ray import Needs, OnRay
from paramserve.engine.on_ray.process import KILLED, RayProcess
from paramserve.errors import CannotPlace, ParamServeError

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

ROLES = ("coordinator", "server 0", "server 1", "worker 0", "worker 1")
ANYWHERE = Needs(num_cpus=0.5)


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture(autouse=True)
def _all_is_free(ray_cluster: object) -> None:
    """Wait until Ray counts as free what the test before has given back."""
    import ray

    deadline = time.monotonic() + WAIT_S
    while ray.available_resources().get("CPU") != sum(node["num_cpus"] for node in NODES):
        assert time.monotonic() < deadline, "something is still reserved"
        time.sleep(0.05)


def zones() -> dict[str, str]:
    """Of each node by its id."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: node["Labels"]["zone"] for node in alive}


def launch(fleet: Fleet, name: str, entry: str = "pause") -> RayProcess:
    process: Any = fleet.launch(Role(name, f"engine_entries:{entry}", b"", b""))
    return process


def placed(engine: OnRay, roles: Sequence[str] = ROLES) -> dict[str, str]:
    """The zone of each role."""
    with contextlib.closing(engine.open(roles)) as fleet:
        running: list[RayProcess] = []
        for name in roles:
            running.append(launch(fleet, name))
            report_of(fleet, "up")
        return {process.name: zones()[process.node] for process in running}


def reserved() -> list[str]:
    """States of placement groups that are not removed."""
    from ray.util.placement_group import placement_group_table

    states = [group["state"] for group in placement_group_table().values()]
    return [state for state in states if state != "REMOVED"]


# --- placement -----------------------------------------------------------------------------------


def test_packed_servers_and_workers_beside_share_a_node() -> None:
    assert len(set(placed(OnRay(worker=ANYWHERE)).values())) == 1


def test_spread_servers_have_a_node_each_with_their_workers() -> None:
    found = placed(OnRay(servers="spread"))
    assert found["server 0"] != found["server 1"]
    assert found["worker 0"] == found["server 0"] == found["coordinator"]
    assert found["worker 1"] == found["server 1"]


def test_workers_apart_are_where_no_server_is() -> None:
    found = placed(OnRay(servers="spread", workers="apart"))
    assert found["server 0"] != found["server 1"]
    assert not {found["worker 0"], found["worker 1"]} & {found["server 0"], found["server 1"]}


def test_workers_anywhere_use_several_nodes() -> None:
    found = placed(OnRay(workers="anywhere"))
    assert found["worker 0"] != found["worker 1"]


def test_resources_and_labels_are_honoured() -> None:
    gadgets, widgets = Needs(resources={"gadget": 1}), Needs(resources={"widget": 1})
    found = placed(
        OnRay(
            coordinator=Needs(num_cpus=0, label_selector={"zone": "head"}),
            server=widgets,
            worker=Needs(resources=gadgets.resources, label_selector={"zone": "!b"}),
        ),
        ("coordinator", "server 0", "worker 0", "worker 1"),
    )
    assert found == {"coordinator": "head", "server 0": "b", "worker 0": "a", "worker 1": "a"}


def test_runtime_env_of_a_kind_is_set_and_wins() -> None:
    needs = Needs(runtime_env={"env_vars": {"OMP_NUM_THREADS": "5"}})
    with contextlib.closing(OnRay(worker=needs).open(["worker 0"])) as fleet:
        fleet.launch(
            Role(
                "worker 0",
                "engine_entries:environment",
                b"OMP_NUM_THREADS",
                b"",
                environment={"OMP_NUM_THREADS": "1"},
            )
        )
        assert report_of(fleet, "value") == b"5"


def test_runtime_env_that_cannot_be_made_is_told_with_the_reason() -> None:
    needs = Needs(runtime_env={"working_dir": "file:///no/such/folder.zip"})
    with contextlib.closing(OnRay(worker=needs).open(["worker 0"])) as fleet:
        launch(fleet, "worker 0")
        seen = until_ended(fleet)
    assert b"could not be started" in bodies(seen)["failed"]
    assert status_of(seen) == KILLED


@pytest.mark.parametrize(
    ("engine", "roles", "text"),
    [
        (
            OnRay(server=Needs(num_cpus=50), place_s=0.2),
            ["server 0"],
            r"50 CPU for server 0 within 0\.2 s\. It has 3 nodes: .*4 CPU, zone=head.*free now: ",
        ),
        (
            OnRay(worker=Needs(num_gpus=1, label_selector={"zone": "moon"}), place_s=0.2),
            ["server 0", "worker 0"],
            "1 CPU for server 0; 1 CPU and 1 GPU on a node with zone=moon for worker 0",
        ),
        (
            OnRay(servers="spread", place_s=0.2),
            [f"server {number}" for number in range(4)],
            "for server 3, each on a node of its own",
        ),
        (
            OnRay(servers="spread", workers="apart", place_s=0.2),
            ["server 0", "server 1", "server 2", "worker 0"],
            "for worker 0, on other nodes than the servers",
        ),
    ],
    ids=["too-much", "label", "spread", "apart"],
)
def test_request_that_cannot_be_met_says_what_was_asked_and_what_there_is(
    engine: OnRay, roles: list[str], text: str
) -> None:
    with pytest.raises(CannotPlace, match=text):
        engine.open(roles)
    assert not reserved()


# --- the connection ------------------------------------------------------------------------------


def test_other_address_than_that_of_the_connection_is_refused() -> None:
    with pytest.raises(ParamServeError, match=r"is connected to Ray at .*, not at 127\.0\.0\.1:9"):
        OnRay("127.0.0.1:9").open()


def test_tls_of_ray_without_its_files_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(ParamServeError, match="RAY_TLS_SERVER_CERT is not set"):
        OnRay().open()
    for name in ("SERVER_CERT", "SERVER_KEY"):
        (tmp_path / name).touch()
        monkeypatch.setenv(f"RAY_TLS_{name}", str(tmp_path / name))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "missing"))
    with pytest.raises(ParamServeError, match=r"RAY_TLS_CA_CERT names .*missing, which cannot be"):
        OnRay().open()
    (tmp_path / "missing").touch()
    with contextlib.closing(OnRay().open()) as fleet:
        assert fleet.tls is not None
        assert fleet.tls.authority == str(tmp_path / "missing")


DRIVER = """
import sys
sys.path.insert(0, {here!r})
from paramserve.engine.base import Role
from paramserve.engine.on_ray import OnRay

fleet = OnRay({address!r}).open(["worker 0", "worker 1", "worker 2"])
entries = ["pause", "spin", "start_another"]
roles = [Role(f"worker {{n}}", f"engine_entries:{{e}}", b"x", b"") for n, e in enumerate(entries)]
running = [fleet.launch(role) for role in roles]
seen = []
while len(seen) < 3:
    seen += fleet.events(20.0)
pids = [each.pid for each in running] + [int(e.body) for e in seen if e.kind == "started"]
print(*pids, flush=True)
sys.stdin.read()
"""


def test_killed_drivers_processes_end(ray_cluster: Cluster) -> None:
    script = DRIVER.format(here=str(HERE), address=ray_cluster.address)
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    assert driver.stdin is not None
    with driver.stdout, driver.stdin:
        processes = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        assert len(processes) == 4
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


# --- lost nodes ----------------------------------------------------------------------------------


@pytest.fixture
def extra(ray_cluster: Cluster) -> Iterator[Any]:
    """A node that a test may lose."""
    node = ray_cluster.add_node(num_cpus=1, resources={"lent": 1}, labels={"zone": "extra"})
    yield node
    if node in ray_cluster.worker_nodes:
        ray_cluster.remove_node(node)


def test_lost_node_ends_its_processes_and_a_restart_finds_another(
    ray_cluster: Cluster, extra: Any
) -> None:
    engine = OnRay(worker=Needs(resources={"lent": 1}), place_s=30)
    with contextlib.closing(engine.open(["server 0", "worker 0"])) as fleet:
        other = launch(fleet, "server 0")
        report_of(fleet, "up")
        process = launch(fleet, "worker 0")
        report_of(fleet, "up")
        ray_cluster.remove_node(extra, allow_graceful=False)
        assert status_of(until_ended(fleet)) == KILLED
        assert process.why
        assert other.exit_status is None
        spare = ray_cluster.add_node(num_cpus=1, resources={"lent": 1}, labels={"zone": "spare"})
        try:
            again = launch(fleet, "worker 0")
            report_of(fleet, "up")
            assert zones()[again.node] == "spare"
        finally:
            fleet.close()
            ray_cluster.remove_node(spare)


def test_run_whose_server_was_on_a_lost_node_goes_on_elsewhere(
    ray_cluster: Cluster, extra: Any, tmp_path: Path
) -> None:
    job = ps.start(
        checkpoint_victims.regress,
        args=(600,),
        workers=2,
        seed=5,
        engine=OnRay(server=Needs(resources={"lent": 1}), place_s=30),
        checkpoint=ps.Checkpoint(tmp_path / "runs", every_s=0.5),
    )
    while not ((told := job.status().checkpoints) and told.written):
        time.sleep(0.01)
    spare = ray_cluster.add_node(num_cpus=1, resources={"lent": 1}, labels={"zone": "spare"})
    try:
        ray_cluster.remove_node(extra, allow_graceful=False)
        result = job.wait()
    finally:
        job.stop()
        ray_cluster.remove_node(spare)
    (back,) = result.rollbacks
    assert set(result.returns.values()) == {back.clocks["default"]}
    whole = ps.run(checkpoint_victims.regress, args=(600,), workers=2, seed=5)
    np.testing.assert_array_equal(result.values["default"]["w"], whole.values["default"]["w"])


def test_restart_without_another_node_is_given_up(ray_cluster: Cluster, extra: Any) -> None:
    engine = OnRay(worker=Needs(resources={"lent": 1}), place_s=2)
    with contextlib.closing(engine.open(["worker 0"])) as fleet:
        launch(fleet, "worker 0")
        report_of(fleet, "up")
        ray_cluster.remove_node(extra, allow_graceful=False)
        until_ended(fleet)
        launch(fleet, "worker 0")
        seen = until_ended(fleet)
    told = bodies(seen)["failed"]
    assert b"CannotPlace" in told
    assert b"It has 3 nodes" in told
    assert status_of(seen) == KILLED


def test_process_contract_is_met_by_on_ray() -> None:
    with contextlib.closing(OnRay().open()) as fleet:
        process: Process = fleet.launch(role("pause"))
        report_of(fleet, "up")
        assert process.wait(0.0) is None
        assert process.name == "a pause"
        assert os.path.exists(f"/proc/{process.pid}")
