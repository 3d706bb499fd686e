"""One Ray cluster of three nodes on this machine for the whole session; it asks no other host.

Its processes live as long as the session; this process is connected only while a module that uses
it is tested, because Ray puts threads and signal handlers into each process that is connected.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.needs import needs

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

NODES: tuple[dict[str, Any], ...] = (
    {"num_cpus": 4, "labels": {"zone": "head"}},
    {"num_cpus": 2, "labels": {"zone": "a"}, "resources": {"gadget": 4}},
    {"num_cpus": 2, "labels": {"zone": "b"}, "resources": {"gadget": 4, "widget": 1}},
)
"""The head first."""


def quiet(folder: Path) -> dict[str, str]:
    """An environment in which Ray finds no other cluster, and asks no host on the network."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (home / "ray_bootstrap_config.yaml").write_text("{}")
    return {
        "HOME": str(home),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
        "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
        "RAY_prestart_worker_first_driver": "0",
        # A node that was killed is noticed after 1.5 s instead of 15.
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    }


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Cluster]:
    """The cluster; no process is connected to it."""
    if "ray" not in sys.modules:
        needs("ray")
    # Short: the path of a Unix socket is below it.
    folder = Path(tempfile.mkdtemp(prefix="ps-ray-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        for name, value in quiet(folder).items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        try:
            for node in NODES:
                cluster.add_node(include_dashboard=False, wait=False, **node)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def ray_cluster(ray_nodes: Cluster) -> Iterator[Cluster]:
    """The cluster, with this process connected to it."""
    import ray

    ray.init(address=ray_nodes.address, logging_level="WARNING")
    try:
        yield ray_nodes
    finally:
        ray.shutdown()
