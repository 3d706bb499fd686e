"""Servers that were started by themselves, end, and come back with what their checkpoint has."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.faults.servers import Servers

import paramserve as ps
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.cli import main
from paramserve.errors import CheckpointError, CheckpointFolderTaken, CoordinatorGone, ServerGone
from paramserve.messages import Bye, Watch, encode
from paramserve.transport.auth import credentials_of
from paramserve.transport.link import Link

EVERY_S = 0.1
WAIT_S = 20.0


def wait_for_another(folder: Path) -> None:
    """Until a checkpoint is there that began after this."""
    seen, until = 0, time.monotonic() + WAIT_S
    before = max(Folder(LocalFolder(folder)).numbers(), default=0)
    while seen < before + 2:
        assert time.monotonic() < until
        time.sleep(0.02)
        seen = max(Folder(LocalFolder(folder)).numbers(), default=0)


def push(worker: Any, times: int) -> None:
    for _ in range(times):
        worker.client.push({"w": np.ones(4)}).result()
        worker.client.tick("model")


def connect(servers: Servers, address: str) -> Any:
    return ps.connect(address, rank=0, workers=1, token_file=servers.token)


def test_servers_come_back_with_their_values_and_the_worker_goes_on(
    servers: Servers, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    (first, second), address = servers.pair(workers=1, checkpoint=str(runs), every_s=EVERY_S)
    with pytest.raises(ServerGone), connect(servers, address) as worker:  # noqa: PT012
        worker.client.define({"w": np.zeros(4)}, rule=ps.Add(), group="model")
        push(worker, 7)
        wait_for_another(runs)
        with ps.attach(address, token_file=servers.token) as cluster:
            told = cluster.status().checkpoints
        assert told is not None
        assert Path(told.path).parent == runs
        second.signal(signal.SIGKILL)
        push(worker, 1)
    assert f"it begins with the newest checkpoint in {runs}" in first.error()[1]
    # One server fewer, which finds in the folder what there is.
    again, address = servers.serve(bind=address, servers=1, workers=1, checkpoint=str(runs))
    with connect(servers, address) as worker:
        assert worker.incarnation == 2
        worker.client.define({"w": np.full(4, 99.0)}, rule=ps.Add(), group="model")
        assert worker.client.clock("model") == 7
        np.testing.assert_array_equal(worker.client.pull("w"), np.full(4, 7.0))
        with pytest.raises(CheckpointFolderTaken, match="run 'serve-"):
            ps.serve("127.0.0.1:0", token_file=servers.token, checkpoint=str(runs))
        push(worker, 3)
    again.signal(signal.SIGTERM)
    again.finish()
    # Told to end, the server has written all of it.
    last, address = servers.serve(workers=1, checkpoint=str(runs))
    with connect(servers, address) as worker:
        np.testing.assert_array_equal(worker.client.pull("w"), np.full(4, 10.0))
    last.signal(signal.SIGTERM)
    last.finish()
    # What no client has come to has nothing to write.
    before = Folder(LocalFolder(runs)).numbers()
    idle, _ = servers.serve(workers=1, checkpoint=str(runs), every_s=EVERY_S)
    idle.signal(signal.SIGTERM)
    idle.finish()
    assert Folder(LocalFolder(runs)).numbers() == before


def test_workers_go_on_with_servers_that_come_back(servers: Servers, tmp_path: Path) -> None:
    """They are in processes that are not started again; one of two servers is killed. Under `Async`
    each goes on at its own clock, and no push is lost or doubled.

    The server dies with much unread, which resets its connections: the coordinator waits for it a
    while, and the first rank comes back to the old cluster before that is over."""
    runs, steps = tmp_path / "runs", 300
    options = {"workers": 2, "checkpoint": str(runs), "every_s": EVERY_S}
    (first, second), address = servers.pair(**options)
    place = {"address": address, "token": servers.token, "steps": steps, "back_s": WAIT_S}
    ranks = [
        servers.start("counter", rank=rank, deadlines={"reconnect_s": reconnect_s}, **place)
        for rank, reconnect_s in enumerate((0.2, 1.0))
    ]
    ranks[0].wait("half")
    second.signal(signal.SIGSTOP)
    time.sleep(5 * EVERY_S)
    second.signal(signal.SIGKILL)
    assert first.error()[0] == "ServerGone"
    again, _ = servers.serve(bind=address, servers=1, **options)
    for rank in ranks:
        rank.finish(WAIT_S)
        begun, resumed = rank.all("began")
        assert begun == 0 < resumed < steps
    with ps.attach(address, token_file=servers.token) as cluster:
        (total,) = cluster.state_dict("model").values()
    np.testing.assert_array_equal(total, np.full(4, 2.0 * steps))
    again.signal(signal.SIGTERM)
    again.finish()


def test_worker_gives_up_a_cluster_that_does_not_come_back(
    servers: Servers, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for options in ({}, {"checkpoint": str(tmp_path / "runs")}):
        one, address = servers.serve(workers=1, **options)

        def ends(worker: Any, one: Any = one) -> None:
            one.signal(signal.SIGKILL)
            worker.client.define({"w": np.zeros(4)}, rule=ps.Add())

        with pytest.raises((ServerGone, CoordinatorGone)) as gone:
            ps.work(ends, address, rank=0, token_file=servers.token, back_s=1.0)
        notes = [note.partition("; at last: ")[0] for note in getattr(gone.value, "__notes__", [])]
        assert notes == (["the cluster did not come back for 1 s (back_s=)"] if options else [])
        assert ("rank 0 lost the cluster: " in capfd.readouterr().err) == bool(options)
    with pytest.raises(ValueError, match="the environment has no PARAMSERVE_ADDRESS"):
        ps.work(ends)
    with pytest.raises(ValueError, match="rank, workers, token_file and tls are for an address"):
        ps.work(ends, rank=0)
    with pytest.raises(ValueError, match="back_s must be"):
        ps.work(ends, address, rank=0, back_s=-1)


def test_damaged_checkpoint_is_left_out(servers: Servers, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for value in (1.0, 2.0):
        one, address = servers.serve(workers=1, checkpoint=str(runs))
        with connect(servers, address) as worker:
            worker.client.define({"w": np.zeros(4)}, rule=ps.Add())
            worker.client.push({"w": np.full(4, value)}).result()
        one.signal(signal.SIGTERM)
        one.finish()
    second, _ = Folder(LocalFolder(runs)).manifests()[0]
    (file,) = (runs / second.name / "values").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    # One that waits for another server ends when it is told to.
    half, _ = servers.serve(servers=2, workers=1, checkpoint=str(runs))
    half.signal(signal.SIGTERM)
    half.finish()
    one, address = servers.serve(workers=1, checkpoint=str(runs))
    with connect(servers, address) as worker:
        np.testing.assert_array_equal(worker.client.pull("w"), np.ones(4))
    one.signal(signal.SIGTERM)
    one.finish()


def test_folder_is_refused_before_anything_listens(servers: Servers, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="is no folder of checkpoints"):
        ps.serve("127.0.0.1:0", token_file=servers.token, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="told to the first server"):
        ps.serve("127.0.0.1:0", token_file=servers.token, join="x:1", checkpoint=tmp_path)
    resumes = ps.Checkpoint(tmp_path / "runs", on_server_death="resume")
    with pytest.raises(ValueError, match=r'on_server_death="resume" .* is for ps\.run and ps\.st'):
        ps.serve("127.0.0.1:0", token_file=servers.token, checkpoint=resumes)
    assert not (tmp_path / "runs").exists()
    options = ["serve", "--bind", "127.0.0.1:0", "--token-file", servers.token]
    assert main([*options, "--checkpoint-every", "5"]) == 2


def test_cluster_that_is_strict_ends_where_a_checkpoint_cannot_be_written(
    servers: Servers, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    one, address = servers.serve(workers=1, checkpoint=str(runs), every_s=EVERY_S, strict=True)
    why = "a checkpoint was not written"
    with pytest.raises(ServerGone, match=why), connect(servers, address) as worker:  # noqa: PT012
        worker.client.define({"w": np.zeros(4)}, rule=ps.Add(), group="model")
        push(worker, 1)
        runs.rename(tmp_path / "away")
        runs.touch()
        kind, text = one.error(WAIT_S)
        push(worker, 1)
    assert (kind, why in text) == ("CheckpointError", True)


@pytest.mark.parametrize("order", ["first first", "second first", "second only"])
def test_servers_that_are_told_to_end_write_a_last_checkpoint_in_any_order(
    order: str, servers: Servers, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    (first, second), address = servers.pair(workers=1, checkpoint=str(runs), every_s=600.0)
    with connect(servers, address) as worker:
        worker.client.define({"w": np.zeros(4)}, rule=ps.Add(), group="model")
        push(worker, 7)
    began = time.monotonic()
    both = [first, second] if order == "first first" else [second, first]
    for process in both[: 1 if order == "second only" else 2]:
        process.signal(signal.SIGTERM)
    if order == "second only":
        assert "the server of shard 1 was told to end" in first.error()[1]
    else:
        first.finish()
    second.finish()
    assert time.monotonic() - began < 15.0, "no barrier waits for a removed rank"
    again, address = servers.serve(bind=address, workers=1, checkpoint=str(runs))
    with connect(servers, address) as worker:
        worker.client.define({"w": np.full(4, 99.0)}, rule=ps.Add(), group="model")
        np.testing.assert_array_equal(worker.client.pull("w"), np.full(4, 7.0))
    again.signal(signal.SIGTERM)
    again.finish()


def test_clients_that_end_in_another_order_on_each_server_hold_up_no_checkpoint(
    servers: Servers, tmp_path: Path
) -> None:
    """As of threads that close at one time; then more clients, one by one."""
    runs = tmp_path / "runs"
    processes, address = servers.pair(workers=1, checkpoint=str(runs), every_s=EVERY_S)
    with connect(servers, address) as worker:
        worker.client.define({"w": np.zeros(4)}, rule=ps.Add(), group="model")
        links = [visit(worker, servers, number) for number in range(60)]
        for first, second in ((0, 1), (1, 0)):
            for number, pair in enumerate(links):
                pair[first if number % 2 else second].send(encode(Bye()))
            time.sleep(0.2)
        for pair in links:
            for link in pair:
                link.close()
        for number in range(60, 300):
            for link in visit(worker, servers, number):
                link.send(encode(Bye()))
                link.close()
        wait_for_another(runs)
        with ps.attach(address, token_file=servers.token) as cluster:
            told = cluster.status().checkpoints
        assert told is not None
        assert told.failed == 0
    for each in processes:
        each.signal(signal.SIGTERM)
    for each in processes:
        each.finish()


def visit(worker: Any, servers: Servers, number: int) -> list[Link]:
    """A client that no worker waits for connects to both servers and has one call answered."""
    exchange = worker.client.connection.exchange
    hello = structs.replace(exchange._hello, client=1000 + number, rank=-1, again=False)
    links = []
    for shard in exchange.shards:
        options = {"credentials": credentials_of(servers.token), "timeout_s": WAIT_S}
        links.append(Link.connect(shard.addresses, hello, **options))
        links[-1].send(encode(Watch(1, 0, 0, 0)))
    for link in links:
        link.receive(WAIT_S)
    return links
