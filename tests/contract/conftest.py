"""Clusters within the test's process, for the client's suites; see `role_cluster`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.contract.role_cluster import KINDS, RoleCluster, clusters

MakeCluster = Callable[..., RoleCluster]


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Makes clusters, and closes them after the test."""
    with clusters() as make:
        yield make


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """How clients reach servers."""
    return str(request.param)


@pytest.fixture(params=[1, 2], ids=["1shard", "2shards"])
def shards(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def cluster(make_cluster: MakeCluster, kind: str, shards: int) -> RoleCluster:
    """An asynchronous cluster over each transport, with 1 and 2 shards."""
    return make_cluster(kind, servers=shards)
