"""Clusters within the test's process, for the client's suites; see `role_cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.echo_host import MakeHost, hosts_in
from tests.contract.harness import Harness
from tests.contract.role_cluster import KINDS, RoleCluster, clusters

from paramserve.client import connection
from paramserve.compiling import load_table
from paramserve.rules import SGD, Adagrad, Adam, Add
from paramserve.rules.rows import row_layout
from paramserve.transport import peers

MakeCluster = Callable[..., RoleCluster]


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[MakeHost]:
    """Makes hosts of the transports' suites, and closes them after the test."""
    with hosts_in(tmp_path) as make:
        yield make


@pytest.fixture
def make_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeCluster]:
    """Makes clusters, and closes them after the test."""
    monkeypatch.setattr(connection, "CLOSE_S", 0.2)
    monkeypatch.setattr(peers, "CONNECT_S", 0.3)
    with clusters() as make:
        yield make


@pytest.fixture(scope="session")
def tables_ready() -> None:
    """Kernels of tables: a first compile takes longer than a test may."""
    for rule in (Add(), SGD(0.1), Adagrad(lr=0.1), Adam()):
        for dtype in ("float32", "bfloat16", "float16"):
            load_table(rule, row_layout(rule, 4, dtype))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How clients reach servers."""
    return str(request.param)


@pytest.fixture(params=[1, 2], ids=["1shard", "2shards"])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[("unix", 1), ("tcp", 2)], ids=["unix-1", "tcp-2"])
def layout(request: pytest.FixtureRequest) -> tuple[str, int]:
    """How clients reach servers, and how many there are: shared memory and payloads, one shard,
    which saves some messages, and two. `test_client_contract.py` has every transport."""
    return tuple(request.param)


@pytest.fixture
def cluster(make_cluster: MakeCluster, layout: tuple[str, int]) -> RoleCluster:
    """An asynchronous cluster."""
    kind, shards = layout
    return make_cluster(kind, servers=shards)


@pytest.fixture(params=["unix", "tcp"])
def remote(request: pytest.FixtureRequest, make_cluster: MakeCluster, shards: int) -> RoleCluster:
    """Cluster whose servers can stand still: over sockets; see `cluster`."""
    return make_cluster(request.param, servers=shards)


@pytest.fixture(params=["unix", "tcp"])
def harness(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Iterator[Harness]:
    """A cluster whose member must be served after whatever the test does."""
    harness = Harness(make_cluster(request.param))
    yield harness
    harness.goes_on()
