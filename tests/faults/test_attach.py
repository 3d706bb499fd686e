"""A served cluster as it is read from outside: by a handle, and by `paramserve get`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.faults.servers import SOON_S, Servers, new_token
from tests.faults.test_serving import free_port
from tests.needs import needs
from torch import nn

import paramserve as ps
from paramserve.cli import main
from paramserve.errors import CoordinatorGone, NotAuthenticated, ServerGone, UnknownName
from paramserve.launch import connect as connecting

STEPS = 20


def tied_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


@contextmanager
def training(address: str, token: str) -> Iterator[None]:
    """A worker that has trained `STEPS` steps by `ps.connect`, and waits while the block runs."""
    trained, done = threading.Event(), threading.Event()

    def train() -> None:
        with ps.connect(address, rank=0, workers=1, token_file=token) as worker:
            model = tied_model()
            optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
            users = worker.client.table("users", dim=2, rule=ps.Add())
            users.put([7], np.ones((1, 2)))
            for step in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                worker.log(step=step)
            worker.client.connection.send_log()
            trained.set()
            done.wait(60.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        assert trained.wait(60.0)
        yield
    finally:
        done.set()
        thread.join(60.0)


def test_attached_reader_gets_the_model_tables_snapshots_metrics_and_files(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pyarrow = needs("pyarrow.parquet")
    _, address = servers.serve(workers=1)
    with ps.attach(address, token_file=servers.token) as cluster:
        assert cluster.status().state == "starting"
        with pytest.raises(UnknownName, match="group 'model' is not there yet"):
            cluster.state_dict()
        snapshots = cluster.snapshots(every=10)
        seen = []
        reading = threading.Thread(target=lambda: seen.extend(snapshots))
        with training(address, servers.token):
            assert cluster.status().groups["model"].version == STEPS, "with no heartbeat since then"
            reading.start()
            model = tied_model()
            model.load_state_dict(cluster.state_dict())
            assert int(model[1].num_batches_tracked) == STEPS
            assert cluster.table("users").pull([7]).tolist() == [[1.0, 1.0]]
            status = cluster.status()
            assert (status.state, status.workers) == ("running", {0: "running"})
            with ps.attach(address, token_file=servers.token) as late:
                assert late.status().seconds > status.seconds > 0, "from the cluster's start"
            assert status.metrics == {"step": STEPS - 1}
            assert [record.values["step"] for record in cluster.metrics()] == [*range(STEPS)]

            out, folder = tmp_path / "model.pt", tmp_path / "tables"
            arguments = ["get", address, "--token-file", servers.token, "--out", str(out)]
            assert main([*arguments, "--tables", str(folder)]) == 0
            assert capsys.readouterr().out.splitlines() == [
                f"paramserve: {len(model.state_dict())} tensors of 'model' are in {out}",
                f"paramserve: table 'users' is in {folder / 'users.parquet'}",
            ]
            saved = torch.load(out, weights_only=True)
            assert all(torch.equal(saved[name], v) for name, v in model.state_dict().items())
            assert pyarrow.read_table(folder / "users.parquet").num_rows == 1
            assert main([*arguments, "--group", "other"]) == 1
            assert "no group 'other'" in capsys.readouterr().err
        reading.join(SOON_S)
        assert not reading.is_alive(), "the iteration ends with the last worker"
        assert [each.version for each in seen] in ([], [STEPS]), "of what is trained meanwhile"
        assert cluster.status().state == "finished"
        with pytest.raises(UnknownName, match="no group 'modle'; its groups: 'model', 'users'"):
            list(cluster.snapshots(name="modle"))


def test_reader_of_a_cluster_that_ends_in_order_is_told_so(servers: Servers) -> None:
    first, address = servers.serve(workers=1, until_done=True)
    with ps.attach(address, token_file=servers.token) as cluster:
        with ps.connect(address, rank=0, token_file=servers.token) as worker:
            worker.client.table("users", dim=2, rule=ps.Add()).put([7], np.ones((1, 2)))
            users = cluster.table("users")
            assert users.pull([7]).tolist() == [[1.0, 1.0]]
            assert cluster.status().workers == {0: "running"}
        first.finish(SOON_S)
        ended = f"the cluster of the server at {address} has ended .*: all its workers have left"
        with pytest.raises(ServerGone, match=ended):
            users.pull([7])
        with pytest.raises(CoordinatorGone, match=ended):
            cluster.status()


def test_attach_to_what_is_not_there_is_told_at_once(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, address = servers.serve(workers=1)
    with pytest.raises(NotAuthenticated):
        ps.attach(address, token_file=new_token(tmp_path / "other"))
    monkeypatch.setattr(connecting, "HANDLE_CONNECT_S", 0.2)
    with pytest.raises(CoordinatorGone, match="does not answer"):
        ps.attach(f"127.0.0.1:{free_port()}", token_file=servers.token)
    with pytest.raises(ValueError, match="'trial' is the name of a cluster"):
        ps.attach("trial", token_file=servers.token)
    with pytest.raises(ValueError, match="is an address"):
        ps.attach(address, token_file=servers.token, engine=ps.Local())


def test_cluster_is_read_by_its_name_and_by_the_address_of_its_socket() -> None:
    with ps.Cluster(name="read-from-outside") as cluster:
        client = cluster.client()
        client.define("w", np.zeros(2), rule=ps.Add())
        with ps.attach("read-from-outside") as named:
            snapshots = named.snapshots(every=1, name="default")
            seen = []
            reading = threading.Thread(target=lambda: seen.append(next(snapshots)))
            reading.start()
            while reading.is_alive():
                client.push("w", np.ones(2)).result()
            (first,) = seen
            assert np.asarray(first.state["w"]).tolist() == [first.version] * 2
            client.assign("w", np.full(2, 7.0))
            assert np.asarray(named.state_dict("default")["w"]).tolist() == [7.0, 7.0]
            (address,) = named.addresses
            with ps.attach(address) as other:
                assert np.asarray(other.state_dict("default")["w"]).tolist() == [7.0, 7.0]
                assert other.status().state == "running"
            version = client.push("w", np.ones(2)).result().version
            assert named.status().groups["default"].version == version
            named.close()
            assert list(snapshots) == [], "closed with its handle, and there is one more"
            assert named.status().state == "running"
