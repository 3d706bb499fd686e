"""What codecs left out of gradients is in checkpoints, and a run that goes on begins with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster

import paramserve as ps
from paramserve import Worker
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.manifest import Manifest, residual_path
from paramserve.checkpoint.storage import LocalFolder
from paramserve.client import Client
from paramserve.client import residuals as client_residuals
from paramserve.codecs import Codec, Int4, Int8, PowerSGD, Sign, TopK
from paramserve.config import CheckpointPlan
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.partition import Block
from paramserve.errors import CheckpointDamaged, CodecMismatch, ProtocolError
from paramserve.messages import AskResidual, KeepResidual, encode
from paramserve.rules import SGD, Add
from paramserve.server import residuals as server_residuals

SIZE = 40_000
"""Elements; they are split over two servers."""


def gradient(rank: int, step: int) -> np.ndarray:
    drawn = np.random.default_rng((rank, step)).integers(-8, 8, SIZE)
    return drawn.astype(np.float32)


def define(client: Client, push: Codec) -> Block:
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
    """A cluster that goes on from the newest checkpoint, and writes to another folder, `next`."""
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


def in_thread(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("codec", [TopK(0.01), Int4(), Sign()], ids=lambda codec: codec.called)
def test_applied_is_gradients_less_residuals_where_workers_push_on_meanwhile(
    make_cluster: MakeCluster, tmp_path: Path, codec: Codec, servers: int
) -> None:
    """Each rank goes on with its residual as of the checkpoint, however many pushes later that is
    when the servers have it; whatever the number of servers."""
    cluster = begins(make_cluster, tmp_path)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    blocks = [define(client, codec) for client in clients]
    over = threading.Event()

    def pushes(rank: int) -> None:
        for step in range(100_000):
            if over.is_set():
                return
            clients[rank].push_pull({"w": gradient(rank, step)}, tick=True)

    threads = [in_thread(lambda rank=rank: pushes(rank)) for rank in range(2)]  # type: ignore[misc]
    try:
        while min(client.steps.clocks.get("model", 0) for client in clients) < 5:
            over.wait(0.01)
        cluster.checkpoint()
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    made = newest(tmp_path)
    assert made.cut.lost_residuals == ()
    resumed = goes_on(make_cluster, tmp_path, 2, servers=servers)
    total = np.zeros(SIZE)
    for rank in range(2):
        client = resumed.client(rank=rank)
        blocks[rank] = define(client, codec)
        at = client.steps.resumed["model"]
        assert at < clients[rank].steps.clocks["model"], "it has pushed on"
        total += sum(gradient(rank, step) for step in range(at)) - left(client, blocks[rank])
    assert np.abs(left(client, blocks[1])).max() > 0.1
    np.testing.assert_allclose(client.pull("w"), total, atol=1e-3)


def test_worker_that_sends_nothing_meanwhile_is_told_of_the_checkpoint(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one server has more of its residual than the other, in more pieces."""
    monkeypatch.setattr(client_residuals, "RESIDUAL_ELEMENTS_MAX", 3000)
    whole = np.zeros((200, 100), np.float32)

    def defined(client: Client) -> list[Block]:
        codecs = {"w": Int4(), "p": PowerSGD(1), "never": Int4()}
        return [
            client.define(name, whole, rule=Add(), group="model", push=codec)
            for name, codec in codecs.items()
        ]

    cluster = begins(make_cluster, tmp_path, workers=1)
    client = cluster.client(rank=0)
    blocks = defined(client)
    given = gradient(0, 0)[: whole.size].reshape(whole.shape)
    client.push({"w": given, "p": given}).result()
    began = time.monotonic()
    cluster.checkpoint()
    assert time.monotonic() - began < server_residuals.RESIDUAL_LIMIT_S / 4
    assert newest(tmp_path).cut.lost_residuals == ()
    again = goes_on(make_cluster, tmp_path, 1).client(rank=0)
    expected = client.steps.encoder
    assert expected is not None
    for block, same in zip(blocks, defined(again), strict=True):
        encoder = again.steps.encoder
        assert encoder is not None
        one, other = expected.residual(block), encoder.residual(same)
        if block.spec.pieces[0].name == "never":
            assert one is None
            assert other is None
        else:
            assert one is not None
            assert other is not None
            assert one.tobytes() == other.tobytes()


def test_ranks_that_have_ended_have_left_their_residuals(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = begins(make_cluster, tmp_path)
    expected = []
    for rank in range(2):
        client = cluster.client(rank=rank)
        block = define(client, Int4())
        client.push("w", gradient(rank, 0)).result()
        expected.append(left(client, block))
        client.close()
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == ()
    resumed = goes_on(make_cluster, tmp_path, 2)
    for rank in range(2):
        again = resumed.client(rank=rank)
        assert left(again, define(again, Int4())).tobytes() == expected[rank].tobytes()


def test_rank_that_came_and_ended_twice_has_left_its_last_residual(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = begins(make_cluster, tmp_path, 1)
    for step in range(2):
        client = cluster.client(rank=0)
        block = define(client, Int4())
        client.push("w", gradient(0, step)).result()
        expected = left(client, block)
        client.close()
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == ()
    again = goes_on(make_cluster, tmp_path, 1).client(rank=0)
    assert left(again, define(again, Int4())).tobytes() == expected.tobytes()


def test_residual_that_a_later_decision_has_overtaken_is_not_kept(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """A worker that is stopped leaves its residual, while a step of it is collected: when its clock
    is decided after its end, what it has left is older than the checkpoint."""
    cluster = begins(make_cluster, tmp_path, policy=Sync("sum"))
    clients = [cluster.client(rank=rank) for rank in range(2)]
    for client in clients:
        define(client, Int4())
    for step in range(2):
        for rank, client in enumerate(clients):
            client.push("w", gradient(rank, step))
            client.tick("model")
    clients[0].drain()
    clients[0].push("w", gradient(0, 2))
    clients[0].tick("model")
    clients[0].residuals.stopped()
    clients[0].close(leave=False)
    cluster.mark_dead(0)
    clients[1].push("w", gradient(1, 2))
    clients[1].tick("model")
    clients[1].drain()
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == (0,)
    resumed = goes_on(make_cluster, tmp_path, 2, policy=Sync("sum"))
    again = resumed.client(rank=0)
    block = define(again, Int4())
    assert again.steps.resumed["model"] == 3
    assert not left(again, block).any()
    assert again.residuals.lost_of("model") == {0}


def test_rank_0_goes_on_with_the_residuals_of_ranks_that_are_gone(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = begins(make_cluster, tmp_path, workers=3)
    expected = np.zeros(SIZE, np.float32)
    clients = [cluster.client(rank=rank) for rank in range(3)]
    for rank, client in enumerate(clients):
        block = define(client, Int4())
        client.push("w", gradient(rank, 0)).result()
        expected += left(client, block)
    cluster.checkpoint()
    again = goes_on(make_cluster, tmp_path, 1).client(rank=0)
    np.testing.assert_allclose(left(again, define(again, Int4())), expected, atol=1e-6)


def test_residual_is_given_until_its_rank_has_pushed_and_not_again(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """And a checkpoint that is taken before a rank has come has its residual as it was."""
    cluster = begins(make_cluster, tmp_path)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    blocks = [define(client, Int4()) for client in clients]
    for rank, client in enumerate(clients):
        client.push("w", gradient(rank, 0)).result()
    cluster.checkpoint()
    expected = [left(*each).tobytes() for each in zip(clients, blocks, strict=True)]
    resumed = goes_on(make_cluster, tmp_path, 2)
    first = resumed.client(rank=0)
    block = define(first, Int4())
    assert left(first, block).tobytes() == expected[0]
    resumed.checkpoint()
    assert newest(tmp_path / "next").cut.lost_residuals == ()
    first.close(leave=False)
    resumed.mark_dead(0)
    second = resumed.client(rank=0)
    assert left(second, define(second, Int4())).tobytes() == expected[0]
    second.push("w", gradient(0, 1)).result()
    second.close(leave=False)
    resumed.mark_dead(0)
    third = resumed.client(rank=0)
    assert not left(third, define(third, Int4())).any()
    assert third.residuals.lost_of("model") == {0}
    again = goes_on(make_cluster, tmp_path / "next", 2)
    for rank in range(2):
        client = again.client(rank=rank)
        assert left(client, define(client, Int4())).tobytes() == expected[rank]
        assert client.residuals.lost_of("model") == set()


def test_checkpoint_does_without_a_worker_that_does_not_answer(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_residuals, "RESIDUAL_LIMIT_S", 0.5)
    cluster = begins(make_cluster, tmp_path)
    clients = [cluster.client(rank=rank) for rank in range(2)]
    for rank, client in enumerate(clients):
        define(client, Int4())
        client.push("w", gradient(rank, 0)).result()
    encoder = clients[1].steps.encoder
    assert encoder is not None
    monkeypatch.setattr(encoder, "captured", lambda captured: None)
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == (1,)
    resumed = goes_on(make_cluster, tmp_path, 2)
    for rank in range(2):
        again = resumed.client(rank=rank)
        assert left(again, define(again, Int4())).any() == (rank == 0)
        assert again.residuals.lost_of("model") == {1}


@pytest.mark.parametrize("codec", [None, Int8(feedback=False)], ids=["none", "no feedback"])
def test_checkpoint_without_feedback_has_no_residuals_and_nobody_is_told(
    make_cluster: MakeCluster,
    tmp_path: Path,
    codec: Codec | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_residuals.Residuals, "opened", None)
    cluster = begins(make_cluster, tmp_path, workers=1)
    client = cluster.client(rank=0)
    client.define("w", np.zeros(SIZE, np.float32), rule=Add(), group="model", push=codec)
    client.push("w", gradient(0, 0)).result()
    cluster.checkpoint()
    assert not any("residuals" in each.path for each in newest(tmp_path).files)
    assert client.connection._heartbeat.cut_at is None
    for server in cluster.servers:
        assert all(each.cut is None for each in server.role.shard.sessions.by_client.values())


def test_another_codec_and_a_damaged_residual_are_refused(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = begins(make_cluster, tmp_path, workers=1)
    client = cluster.client(rank=0)
    block = define(client, Int4())
    client.push("w", gradient(0, 0)).result()
    cluster.checkpoint()
    path = tmp_path / newest(tmp_path).name / residual_path("model", block.id, 0)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    again = goes_on(make_cluster, tmp_path, 1).client(rank=0)
    with pytest.raises(CodecMismatch):
        define(again, Sign())
    with pytest.raises(CheckpointDamaged, match=r"residuals/model.*have the hash"):
        define(again, Int4())


def wrong_messages(block: int) -> list[tuple[Any, int]]:
    """With the bytes of payload that go with each."""
    return [
        (KeepResidual(1, block, 0, 16), 0),
        (KeepResidual(1, block, 0, 16), 128),
        (KeepResidual(1, block, 0, -2), 0),
        (KeepResidual(1, block, 0, 1 << 40), 64),
        (KeepResidual(-1, block, 3, 16), 64),
        (KeepResidual(-1, 77, 0, 16), 64),
        (AskResidual(block, -1, 5), 0),
        (AskResidual(block, 0, 0), 0),
        (AskResidual(block, 0, SIZE), 0),
        (AskResidual(block, 0, 1 << 40), 0),
    ]


def test_what_no_worker_sends_is_refused_and_others_go_on(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = begins(make_cluster, tmp_path, workers=1)
    client = cluster.client(rank=0)
    block = define(client, Int4())
    client.push("w", gradient(0, 0)).result()
    for message, nbytes in wrong_messages(block.id):
        link = client.connection.exchange.reach(0, WAIT_S)
        link.send(encode(message), [np.zeros(nbytes, np.uint8)] if nbytes else ())
        header = link.receive(WAIT_S)
        assert header is not None, message
        assert b"ProtocolError" in header, message
        link.close()
    stranger = cluster.client()
    with pytest.raises(ProtocolError, match="shard 0 does not know it"):
        stranger.connection.exchange.reach(0, WAIT_S)
    cluster.checkpoint()
    assert newest(tmp_path).cut.lost_residuals == ()


# --- real processes ------------------------------------------------------------------------------

STEPS, PAUSE = 60, 30


def _steps(worker: Worker, pauses: bool) -> int:
    client, names = worker.client, {"w": TopK(0.01, even_local=True), "v": Int4(even_local=True)}
    for name, codec in names.items():
        zeros = np.zeros(20_000, np.float32)
        client.define(name, zeros, rule=SGD(0.1), group="model", push=codec)
    for step in range(worker.clock, STEPS):
        if pauses and worker.rank == 1 and step == PAUSE:
            threading.Event().wait()  # until the job is stopped
        drawn, values = np.random.default_rng((step, worker.rank)), client.pull(list(names))
        noise = drawn.normal(size=20_000).astype(np.float32)
        client.push_pull({name: noise + values[name] for name in names}, tick=True)
    return worker.clock


@pytest.mark.slow
def test_sync_run_that_is_interrupted_ends_bit_by_bit_as_an_unbroken_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 2, "servers": 2, "consistency": Sync()}

    def run(**given: Any) -> Any:
        return ps.run(_steps, args=(False,), show="none", **options, **given).values["model"]

    unbroken = run()
    folder = tmp_path / "run"
    job = ps.start(_steps, args=(True,), checkpoint=ps.Checkpoint(folder, every_s=1000), **options)
    while not (group := job.status().groups.get("model")) or group.clock < PAUSE:
        threading.Event().wait(0.02)
    middle = job.checkpoint()  # one worker is in its own code, and the other one waits for it
    assert middle.clocks == {"model": PAUSE}
    with suppress(ps.ParamServeError):
        job.stop()
        job.wait()
    found = run(resume=middle.path)
    for name, values in unbroken.items():
        assert found[name].tobytes() == values.tobytes(), name
