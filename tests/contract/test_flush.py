"""What codecs left out of gradients is flushed before the cut of a checkpoint."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster
from tests.suites import each_case

import paramserve as ps
from paramserve import Worker
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest
from paramserve.checkpoint.storage import LocalFolder
from paramserve.client import Client
from paramserve.codecs import Codec, Int4, Int8, Sign, TopK
from paramserve.config import CheckpointPlan
from paramserve.consistency.built_in import Async, Sync
from paramserve.core import flush
from paramserve.core.partition import Block
from paramserve.rules import SGD, Add

SIZE = 40_000
"""Elements; they are split over two servers."""
STEPS, LONG = 60, 150


def gradient(rank: int, step: int) -> np.ndarray:
    drawn = np.random.default_rng((rank, step)).integers(-8, 8, SIZE)
    return drawn.astype(np.float32)


def define(client: Client, push: Codec | None) -> Block:
    zeros = np.zeros(SIZE, np.float32)
    return client.define("w", zeros, rule=Add(), group="model", push=push)


def left(client: Client, block: Block) -> np.ndarray:
    """What a client has left out."""
    encoder = client.steps.encoder
    assert encoder is not None
    found = encoder.residual(block)
    return np.zeros(SIZE, np.float32) if found is None else found


def newest(folder: Path) -> Manifest:
    return Folder(LocalFolder(folder)).manifests()[0][0]


def goes_on(make: MakeCluster, folder: Path, workers: int, **options: Any) -> RoleCluster:
    """A cluster that goes on from the newest checkpoint."""
    writes = folder / "next"
    writes.mkdir(exist_ok=True)
    plan = CheckpointPlan(
        folder=str(writes), run="test", resume_folder=str(folder), resume=newest(folder).name
    )
    given = {"servers": 2, "policy": Async(), **options}
    return make("tcp", workers=workers, checkpoints=plan, **given)


def begins(make: MakeCluster, folder: Path, workers: int = 2, **options: Any) -> RoleCluster:
    plan = CheckpointPlan(folder=str(folder), run="test")
    given = {"servers": 2, "policy": Async(), **options}
    return make("tcp", workers=workers, checkpoints=plan, **given)


@contextmanager
def each_in_a_thread(actions: list[Callable[[], None]]) -> Iterator[None]:
    threads = [threading.Thread(target=each, daemon=True) for each in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(WAIT_S)


def steps(client: Client, codec: Codec, until: int, pause_s: float) -> None:
    define(client, codec)
    for step in range(client.steps.clocks.get("model", 0), until):
        time.sleep(pause_s)
        client.push_pull({"w": gradient(client.rank, step)}, tick=True)


def reach(client: Client, clock: int) -> None:
    until = time.monotonic() + WAIT_S
    while client.steps.clocks.get("model", 0) < clock:
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("codec", [TopK(0.01), Sign()], ids=lambda codec: codec.called)
def test_sync_goes_on_from_a_checkpoint_bit_by_bit_as_the_run_that_wrote_it(
    make_cluster: MakeCluster, tmp_path: Path, codec: Codec, servers: int
) -> None:
    options = {"policy": Sync(), "servers": servers}
    cluster = begins(make_cluster, tmp_path, **options)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    define(clients[0], codec)
    with each_in_a_thread([lambda c=c: steps(c, codec, STEPS, 0.005) for c in clients]):  # type: ignore[misc]
        reach(clients[0], 5)
        cluster.checkpoint()
        at = newest(tmp_path).cut.clocks["model"]
    assert newest(tmp_path).cut.lost_residuals == ()
    assert 5 < at < STEPS
    resumed = goes_on(make_cluster, tmp_path, 2, **options)
    again = [resumed.client(rank=rank) for rank in range(2)]
    with each_in_a_thread([lambda c=c: steps(c, codec, STEPS, 0.0) for c in again]):  # type: ignore[misc]
        pass
    assert again[0].steps.resumed["model"] == at
    assert again[0].pull("w").tobytes() == clients[0].pull("w").tobytes()


@contextmanager
def checkpoint_under_way(cluster: RoleCluster) -> Iterator[None]:
    """Ends when it is committed."""
    with each_in_a_thread([lambda: cluster.checkpoint()]):  # type: ignore[list-item]
        until = time.monotonic() + WAIT_S
        while cluster.servers[0].role.shard.cuts.flush is None:
            assert time.monotonic() < until
            time.sleep(0.001)
        yield


def test_next_push_of_each_worker_goes_whole_and_the_checkpoint_has_it(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """Whatever the number of workers that go on; what is pushed behind the flush is told as left
    out only if it is in the checkpoint."""
    cluster = begins(make_cluster, tmp_path)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    blocks = [define(client, Int4()) for client in clients]
    for client in clients:
        client.push("w", gradient(client.rank, 0)).result()
        assert left(client, blocks[client.rank]).any()
    with checkpoint_under_way(cluster):
        for client in clients:
            client.push("w", gradient(client.rank, 1)).result()  # by the answer it hears
        whole = clients[0]
        whole.push("w", gradient(0, 2)).result()
        assert not left(whole, blocks[0]).any()
        whole.push("w", gradient(0, 3)).result()
        assert left(whole, blocks[0]).any(), "one goes whole"
        clients[1].push("w", gradient(1, 2)).result()
    assert newest(tmp_path).cut.lost_residuals == (0,)
    values = goes_on(make_cluster, tmp_path, 1).client(rank=0).pull("w")
    total = sum(gradient(rank, step) for rank in range(2) for step in range(3)) + gradient(0, 3)
    np.testing.assert_allclose(values, total - left(whole, blocks[0]), atol=1e-3)


def test_checkpoint_does_without_the_flush_of_a_worker_that_stands_still_and_says_so(
    make_cluster: MakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that has ended is told, and not waited for."""
    monkeypatch.setattr(flush, "FLUSH_LIMIT_MAX_S", 0.5)
    cluster = begins(make_cluster, tmp_path, workers=3)
    clients = [cluster.client(rank=rank) for rank in range(3)]
    for client in clients:
        define(client, Int4())
        client.push("w", gradient(client.rank, 0)).result()
    clients[2].close()
    began = time.monotonic()
    cluster.checkpoint()
    assert time.monotonic() - began > 0.5
    assert newest(tmp_path).cut.lost_residuals == (0, 1, 2)
    with caplog.at_level(logging.WARNING, "paramserve"):
        again = goes_on(make_cluster, tmp_path, 3).client(rank=0)
    told = (
        "codecs had left out of the gradients of ranks 0, 1, 2 since their last flush before clock"
    )
    assert sum(told in each.getMessage() for each in caplog.records) == 1
    assert not left(again, define(again, Int4())).any()


@each_case("codec", [None, Int8(feedback=False)], ids=["none", "no feedback"])
def test_checkpoint_without_feedback_waits_for_no_step_and_asks_no_client(
    make_cluster: MakeCluster, tmp_path: Path, codec: Codec | None
) -> None:
    cluster = begins(make_cluster, tmp_path, workers=1)
    client = cluster.client(rank=0)
    define(client, codec)
    client.push("w", gradient(0, 0)).result()
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == ()
    shard = cluster.servers[0].role.shard
    assert shard.cuts._flush_number == 1, "it was over at once"
    assert not any(each.left_out for each in shard.sessions.by_client.values())


# --- real processes ------------------------------------------------------------------------------


def _steps(worker: Worker) -> int:
    client, names = worker.client, {"w": TopK(0.01, even_local=True), "v": Int4(even_local=True)}
    for name, codec in names.items():
        zeros = np.zeros(40_000, np.float32)
        client.define(name, zeros, rule=SGD(0.1), group="model", push=codec)
    for step in range(worker.clock, LONG):
        time.sleep(0.02)
        drawn, values = np.random.default_rng((step, worker.rank)), client.pull(list(names))
        noise = drawn.normal(size=40_000).astype(np.float32)
        client.push_pull({name: noise + values[name] for name in names}, tick=True)
    return worker.clock


def test_sync_run_of_processes_ends_bit_by_bit_as_one_that_goes_on_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"workers": 2, "servers": 2, "consistency": Sync()}
    saves = ps.Checkpoint(tmp_path / "run", every_s=1000)
    job = ps.start(_steps, checkpoint=saves, **options)
    until = time.monotonic() + WAIT_S
    while not (group := job.status().groups.get("model")) or group.clock < 10:
        assert time.monotonic() < until
        time.sleep(0.02)
    middle = job.checkpoint()
    assert middle.clocks["model"] < LONG
    unbroken = job.wait().values["model"]
    found = ps.run(_steps, show="none", resume=middle.path, **options).values["model"]
    for name, values in unbroken.items():
        assert found[name].tobytes() == values.tobytes(), name
