"""Keyed tables in whole runs: seen from the driver while they go on, and written at their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.needs import needs

import paramserve as ps
from paramserve.errors import ClientClosed, ParamServeError, UnknownName, WorkerFailed

pytestmark = pytest.mark.usefixtures("leaves_nothing")

pq = needs("pyarrow.parquet")
DIM = 3


def embed(worker: Any, gate: str = "", fails: bool = False) -> None:
    """Rank r pushes ones to keys 0 to 9 + r, and goes on when the gate is there."""
    import time
    from pathlib import Path

    import numpy as np

    import paramserve as ps

    users = worker.client.table(
        "users", dim=DIM, rule=ps.Adagrad(lr=0.1, eps=0.0), init=ps.Zeros(), admit=ps.MinCount(2)
    )
    worker.client.define("w", np.zeros(2), rule=ps.Add(), consistency=ps.Async())
    keys = np.arange(10 + worker.rank)
    for _ in range(2):
        users.push(keys, np.ones((keys.size, DIM), np.float32)).result()
    worker.client.tick("users")
    while gate and not Path(gate).exists():
        time.sleep(0.01)
    if fails:
        raise LookupError("no more")


@contextmanager
def started(rows: int, gate: Path, **options: Any) -> Iterator[ps.Job]:
    """A run that has made so many rows, and waits at the gate."""
    job = ps.start(embed, args=(str(gate),), consistency=ps.Async(), **options)
    try:
        while (group := job.status().groups.get("users")) is None or (
            group.table is None or group.table.rows < rows
        ):
            assert not job._supervisor.ended.wait(0.02)
        yield job
    finally:
        job.stop()


def first_rows(worker: ps.Worker) -> list[list[float]]:
    """What the first pull of each rank finds."""
    users = worker.client.table("users", dim=DIM, rule=ps.Add(), init=ps.Zeros())
    return users.pull([0, 10, 11]).tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_run_saves_tables_as_files_that_another_cluster_and_another_run_take_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "made" / "tables"
    result = ps.run(
        embed,
        workers=2,
        servers=2,
        consistency=ps.Async(),
        checkpoint=ps.Checkpoint(save_tables=folder),
    )
    assert result.table_files == {"users": str(folder / "users.parquet")}
    assert [each.name for each in folder.iterdir()] == ["users.parquet"]
    read = pq.read_table(result.table_files["users"])
    assert sorted(read["key"].to_pylist()) == list(range(11))
    summary = result.tables["users"]
    # Keys 0 to 9 are pushed four times, and the first time counts but is not applied.
    assert (summary.rows, summary.created, summary.evicted, summary.unadmitted) == (11, 11, 0, 11)
    assert summary.memory_bytes > 11 * 4 * DIM
    assert result.groups["users"].staleness.pushes == 4
    assert result.state_dict("default")["w"].tolist() == [0.0, 0.0]
    with pytest.raises(UnknownName, match="'users' is a table, and no group of tensors"):
        result.state_dict("users")
    with ps.Cluster(servers=1) as cluster:
        users = cluster.client().table("users", dim=DIM, rule=ps.Adagrad(lr=0.1, eps=0.0))
        assert users.from_parquet(result.table_files["users"], state=True) == 11
        one = -0.1 * sum(1 / np.sqrt(1 + n) for n in range(3))
        np.testing.assert_allclose(users.pull([0, 10]), [[one] * DIM, [-0.1] * DIM], rtol=1e-6)
        users.push([10], np.ones((1, DIM), np.float32)).result()  # it goes on from the sum of 1
        second = -0.1 * (1 + 1 / np.sqrt(2))
        np.testing.assert_allclose(users.pull([10]), [[second] * DIM], rtol=1e-6)

    (folder / "words.parquet").write_bytes((folder / "users.parquet").read_bytes())
    loaded = ps.run(first_rows, workers=3, servers=2, checkpoint=ps.Checkpoint(load_tables=folder))
    expected = [[one] * DIM, [-0.1] * DIM, [0.0] * DIM]
    for rank in range(3):
        np.testing.assert_allclose(loaded.returns[rank], expected, rtol=1e-6)
    assert "load_tables was not loaded for 'words'" in caplog.text
    summary = loaded.tables["users"]
    assert (loaded.table_files, summary.rows, summary.created) == ({}, 11, 11)


def test_job_reads_and_writes_tables_while_the_run_goes_on(tmp_path: Path) -> None:
    gate, file = tmp_path / "gate", tmp_path / "now.parquet"
    with started(11, gate, workers=2, servers=2) as job:
        users = job.table("users")
        assert len(users) == users.to_parquet(file) == 11
        assert job.table("users") is users
        with pytest.raises(UnknownName, match="'words'"):
            job.table("words")
        with pytest.raises(UnknownName, match="'users' is a table"):
            job.state_dict("users")
        with pytest.raises(ValueError, match="'users' is a table, of which there are no snapshots"):
            next(job.snapshots(name="users"))
        gate.touch()
        assert job.wait().tables["users"].rows == 11
    assert pq.read_table(file).num_rows == 11
    with pytest.raises(ClientClosed, match="'users' cannot be read: the run has ended"):
        job.table("users")
    with pytest.raises(ClientClosed, match=r"the run has finished .*job\.wait\(\).*save_tables="):
        users.pull([1])


def test_run_that_fails_writes_tables_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="no more") as caught:
        ps.run(
            embed,
            args=("", True),
            workers=1,
            consistency=ps.Async(),
            checkpoint=ps.Checkpoint(save_tables=tmp_path),
        )
    result = caught.value.result
    assert result is not None
    assert pq.read_table(result.table_files["users"]).num_rows == result.tables["users"].rows == 10


@pytest.mark.slow
def test_run_that_is_stopped_writes_tables_as_they_are(tmp_path: Path) -> None:
    with started(10, tmp_path / "gate", checkpoint=ps.Checkpoint(save_tables=tmp_path)) as job:
        job.stop()
        result = job.wait()
    assert result.stopped
    assert pq.read_table(result.table_files["users"]).num_rows == 10


def test_run_whose_tables_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "users.parquet").mkdir()
    told = r"table 'users' was not written to .*users\.parquet"
    checkpoint = ps.Checkpoint(save_tables=tmp_path)
    with pytest.raises(ParamServeError, match=told) as caught:
        ps.run(embed, workers=1, consistency=ps.Async(), checkpoint=checkpoint)
    assert caught.value.result is not None
    assert caught.value.result.values["default"]["w"].tolist() == [0.0, 0.0]
