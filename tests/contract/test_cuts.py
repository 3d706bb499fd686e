"""Values of one cut: the same pushes on every shard, while clients push."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, in_threads

from paramserve.client import Client, Snapshots
from paramserve.core.cut_parts import ShardCut
from paramserve.errors import UnknownName
from paramserve.launch.reading import Reader
from paramserve.rules import Add

LARGE = 40_000
"""float64 elements that are split over the shards."""
CUTS = 15
PUSHES = 40


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    return make_cluster("unix", servers=2)


def kept(cluster: RoleCluster) -> list[dict[int, ShardCut]]:
    return [server.role.shard.cuts.parts_here for server in cluster.servers]


def test_values_of_a_cut_have_the_same_pushes_on_all_shards(cluster: RoleCluster) -> None:
    reader, pushers = cluster.client(), [cluster.client() for _ in range(2)]
    reader.define({"w": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())
    over = threading.Event()

    def push(client: Client) -> None:
        ones = {"w": np.ones(LARGE), "b": np.ones(3)}
        while not over.is_set():
            client.push(ones)

    def read() -> None:
        deadline = time.monotonic() + 10.0
        try:
            while len(seen) < CUTS or (not moved() and time.monotonic() < deadline):
                seen.append(Reader(reader).read("default"))
        finally:
            over.set()

    def moved() -> bool:
        return bool(seen[0]["b"][0] < seen[-1]["b"][0])

    seen: list[dict[str, np.ndarray]] = []
    for client in pushers:
        client.blocks()
    in_threads(*(lambda each=each: push(each) for each in pushers), read)
    counts = [{*np.unique(state["w"]), *np.unique(state["b"])} for state in seen]
    assert [len(each) for each in counts] == [1] * len(seen)
    assert moved()
    assert not any(kept(cluster))


def test_snapshots_have_the_same_pushes_on_all_shards(cluster: RoleCluster) -> None:
    reader, pushers = cluster.client(), [cluster.client() for _ in range(2)]
    reader.define({"w": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add(), group="g")
    snapshots = Snapshots(reader)
    assert snapshots.watch("g", every=5, keep=64)

    def push(client: Client) -> None:
        ones = {"w": np.ones(LARGE), "b": np.ones(3)}
        for _ in range(PUSHES):
            client.push(ones)
        client.pull("b")

    for client in pushers:
        client.blocks()
    in_threads(*(lambda each=each: push(each) for each in pushers))
    deadline, after, seen = time.monotonic() + 5.0, 0, dict[int, set[float]]()
    while after < 2 * PUSHES and time.monotonic() < deadline:
        found = snapshots.take("g", after)
        if found is not None:
            after = found.version
            seen[after] = {*np.unique(found.values["w"]), *np.unique(found.values["b"])}
    assert after == 2 * PUSHES
    assert [len(each) for each in seen.values()] == [1] * len(seen)
    assert not any(kept(cluster))


def test_cut_that_was_let_go_is_refused(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define("w", np.zeros(LARGE), rule=Add())
    with client.dense.cut([block]) as cut:
        client.push("w", np.ones(LARGE))
        assert client.dense.fetch(block, 0, cut=cut)[0].max() == 0.0
        assert client.dense.fetch(block, 0)[0].min() == 1.0
        with pytest.raises(UnknownName, match="no block 99"):
            cluster.servers[0].role.shard.cuts.parts_here[cut].block(99)
    with pytest.raises(UnknownName, match="has released cut"):
        client.dense.fetch(block, 0, cut=cut)


def test_client_that_ends_leaves_no_cut(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    block = client.define("w", np.zeros(LARGE), rule=Add())
    client.dense.cut([block]).__enter__()
    assert all(kept(cluster))
    client.close()
    other.pull("w")
    assert not any(kept(cluster))
