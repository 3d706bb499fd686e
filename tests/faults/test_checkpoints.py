"""Servers and drivers that are killed: the run goes on from a checkpoint, and loses no more."""

from __future__ import annotations

import functools
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.faults import checkpoint_victims as victims
from tests.faults.drivers import ROOT
from tests.needs import needs

import paramserve as ps
from paramserve.cli import cli
from paramserve.errors import CheckpointError
from paramserve.launch.entries import COORDINATOR, Key

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STEPS = 200
DRIVER = """
import sys
import time
import paramserve as ps
from tests.faults import checkpoint_victims as victims

job = ps.start(victims.regress, args=(200,), workers=2, servers=2, seed=5,
               checkpoint=ps.Checkpoint(sys.argv[1], every_s=0.1), resume=True)
while job.status().checkpoints.written < 2:
    time.sleep(0.01)
print("here", flush=True)
job.wait()
"""


def values(result: ps.Result) -> bytes:
    return bytes(result.values["default"]["w"].tobytes())


def wait_for_checkpoint(job: ps.Job, before: str = "") -> str:
    """Until another one is there; its path."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        told = job.status().checkpoints
        if told is not None and told.path not in ("", before) and told.written:
            return told.path
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint was written: {job.status()}")


def kill(job: ps.Job, key: Key) -> None:
    for process, each in job._supervisor._processes.items():
        if each == key:
            os.kill(process.pid, signal.SIGKILL)


def wait_for_rollbacks(job: ps.Job, count: int) -> None:
    """Until the run has gone back so often, and workers run again."""
    until = time.monotonic() + 30.0
    while time.monotonic() < until:
        status = job.status()
        if len(status.rollbacks) == count and status.rollbacks[-1].seconds:
            return
        time.sleep(0.005)
    raise AssertionError(f"it did not go on: {job.status()}")


@functools.cache
def unbroken() -> ps.Result:
    """Sums are in rank order whatever the number of servers: one run is good for all."""
    return ps.run(victims.regress, args=(STEPS,), workers=2, seed=5)


def test_sync_run_whose_processes_were_killed_ends_bit_by_bit_as_an_unbroken_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = ps.Checkpoint(tmp_path / "runs", every_s=0.1)
    with ps.start(
        victims.regress, args=(STEPS,), workers=2, servers=2, seed=5, checkpoint=settings
    ) as job:
        first, handle = wait_for_checkpoint(job), job.handle()
        sent = pickle.loads(pickle.dumps(handle))  # as in another process
        for each in (handle, sent):
            assert each.status().groups
        kill(job, Key("server", 1))
        wait_for_rollbacks(job, 1)
        sent.close()  # it connects anew
        for reads in (job, handle, sent):
            assert reads.state_dict("default")["w"].shape == (victims.SIZE,)
        for each in (handle, sent):
            assert each.status().groups
            each.close()
        wait_for_checkpoint(job, first)
        kill(job, COORDINATOR)
        result = job.wait()
    assert values(result) == values(unbroken())
    assert [str(each.error).split(":")[0][:9] for each in result.rollbacks] == [
        "server 1 ",
        "coordinat",
    ]
    for back in result.rollbacks:
        at = back.clocks["default"]
        assert 0 < at <= back.clocks_before["default"] < STEPS
        assert back.updates_lost == back.clocks_before["default"] - at
        assert back.path.startswith(f"{tmp_path}/runs/step-{at}")
        assert 0.0 < back.seconds < 10.0
    assert set(result.returns.values()) == {result.rollbacks[-1].clocks["default"]}
    told = capfd.readouterr().err
    assert told.count(": the run goes on from the checkpoint") == 2
    assert result.checkpoints is not None
    assert result.checkpoints.path.startswith(f"{tmp_path}/runs/step-{STEPS}")
    assert result.checkpoints.clocks == {"default": STEPS}
    assert result.checkpoints.written > 2


@pytest.mark.slow
def test_async_run_whose_servers_are_killed_counts_each_push_once(tmp_path: Path) -> None:
    """By the workers' own logs: what a rank finds of its own where it goes on is what it has pushed
    by the clock of the cut, on all servers; what it has pushed since is told as lost."""
    chance, log = random.Random(7), tmp_path / "log"
    settings = ps.Checkpoint(tmp_path / "runs", every_s=0.1)
    with ps.start(
        victims.counts,
        args=(2 * STEPS, str(log)),
        workers=3,
        servers=2,
        consistency=ps.Async(),
        checkpoint=settings,
    ) as job:
        path = ""
        for number in range(3):
            path = wait_for_checkpoint(job, path)
            time.sleep(chance.random() * 0.2)
            kill(job, Key("server", chance.randrange(2)))
            wait_for_rollbacks(job, number + 1)
        result = job.wait()
    assert np.unique(result.values["default"]["w"]).tolist() == [2.0 * STEPS]
    assert len(result.rollbacks) == 3
    begun, lost = [0] * 3, 0
    for rank in range(3):
        pushed = 0
        for line in (tmp_path / f"log-{rank}").read_text().splitlines():
            what, clock, *found = line.split()
            if what == "pushed":
                pushed = int(clock)
                continue
            assert [float(each) for each in found] == [float(clock)], "each once, on all servers"
            assert int(clock) <= pushed + 1, "the last one may have been on its way"
            lost, pushed = lost + max(pushed - int(clock), 0), int(clock)
            begun[rank] += 1
    assert max(begun) > 2, "a rank that is slow to start may not have begun between two kills"
    assert lost > 0
    assert sum(back.updates_lost for back in result.rollbacks) <= lost + 9


@pytest.mark.parametrize("strict", [False, True])
def test_run_whose_folder_is_gone_trains_on_and_says_so(tmp_path: Path, strict: bool) -> None:
    folder = tmp_path / "runs"
    settings = ps.Checkpoint(folder, every_s=0.1, strict=strict)
    with ps.start(victims.regress, args=(STEPS,), workers=1, checkpoint=settings) as job:
        wait_for_checkpoint(job)
        folder.rename(tmp_path / "away")
        folder.touch()
        if not strict:
            result = job.wait()
        else:
            with pytest.raises(CheckpointError, match="Not a directory") as caught:
                job.wait()
            result = caught.value.result
            assert result is not None
    told = result.checkpoints
    assert told is not None
    assert told.written >= 1
    assert told.failed >= 1
    assert "Not a directory" in told.why
    assert result.values["default"]["w"].shape == (victims.SIZE,)
    assert result.returns == ({} if strict else {0: 0})


def test_run_whose_driver_was_killed_goes_on_by_the_same_command(tmp_path: Path) -> None:
    """On another number of servers, too; and its last checkpoint is that of its end."""
    folder = tmp_path / "runs"
    command = [sys.executable, "-c", DRIVER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "here\n"
        driver.kill()
    result = ps.run(
        victims.regress,
        args=(STEPS,),
        workers=2,
        servers=3,
        checkpoint=ps.Checkpoint(folder, every_s=0.1),
        resume=True,
    )
    assert 0 < min(result.returns.values()) < STEPS
    assert result.seed == 5, "it is the checkpoint's"
    assert values(result) == values(unbroken())
    again = ps.run(victims.regress, args=(STEPS,), workers=2, resume=folder)
    assert again.returns == {0: STEPS, 1: STEPS}
    np.testing.assert_array_equal(again.values["default"]["w"], result.values["default"]["w"])


def test_strict_run_whose_last_checkpoint_fails_keeps_values_and_tables(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with pytest.raises(ps.errors.CheckpointError) as caught:
        ps.run(
            victims.lose_the_folder,
            args=(str(folder),),
            workers=1,
            consistency=ps.Async(),
            checkpoint=ps.Checkpoint(
                folder, every_s=600, strict=True, save_tables=tmp_path / "tables"
            ),
        )
    result = caught.value.result
    assert result is not None
    assert result.values["default"]["w"].tolist() == [1.0] * 4
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["users.parquet"]


@pytest.mark.slow
def test_loader_with_other_batches_than_those_that_are_done_is_refused(tmp_path: Path) -> None:
    goes_on = functools.partial(
        ps.run, victims.epochs, workers=2, checkpoint=tmp_path / "runs", resume=True
    )
    assert goes_on(args=(2, 8)).returns == {0: [0, 1], 1: [0, 1]}
    with pytest.raises(ps.errors.WorkerFailed) as refused:
        goes_on(args=(4, 4))
    assert refused.value.fix.startswith("give the loader the dataset, batch_size")
    text = str(refused.value)
    assert "whose 4 steps were made with 32 samples in batches of 8, and this loader" in text
    assert "has 32 samples in batches of 4: which samples" in text
    assert goes_on(args=(3, 4, 2)).returns == {0: [2], 1: [2]}


@pytest.mark.slow
def test_rank_that_had_died_before_its_first_step_takes_part_where_the_run_goes_on(
    tmp_path: Path,
) -> None:
    goes_on = functools.partial(
        ps.run, victims.epochs, workers=2, checkpoint=tmp_path / "runs", resume=True
    )
    broken = goes_on(args=(2, 8, None, 1), on_worker_death="continue")
    assert broken.returns == {0: [0, 1]}
    assert goes_on(args=(3, 8)).returns == {0: [2], 1: [2]}


@pytest.mark.slow
def test_run_that_had_ended_goes_on_as_one_that_was_longer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its ranks wait for each other from the first clock on, though all of them had left."""
    folder = tmp_path / "runs"
    for servers, begins, steps in ((1, 0, STEPS // 2), (2, STEPS // 2, STEPS)):
        result = ps.run(
            victims.regress_late,
            args=(steps,),
            workers=2,
            servers=servers,
            seed=5 if begins == 0 else None,
            checkpoint=folder,
            resume=True,
        )
        assert result.returns == {0: begins, 1: begins}
        assert result.groups["default"].version == steps
    assert values(result) == values(unbroken())
    said = capfd.readouterr().err.splitlines()
    goes_on = f"paramserve: the run goes on from the checkpoint {folder}/step"
    assert [line for line in said if line.startswith("paramserve: ")] == [
        f"paramserve: {folder} has no checkpoint to go on from: the run begins anew",
        f"{goes_on}-100 ('default' at clock 100)",
    ]


def test_run_in_a_store_of_whole_objects_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After a kill, on another number of servers, and in the commands; no password is shown."""
    whole_objects, torch = needs("tests.whole_objects"), needs("torch")
    whole_objects.register(monkeypatch, tmp_path)
    root = tmp_path / "runs"
    url, told = whole_objects.url_of(root, whole_objects.USER + "@"), whole_objects.url_of(root)
    with ps.start(
        victims.regress,
        args=(STEPS,),
        workers=2,
        servers=2,
        seed=5,
        checkpoint=ps.Checkpoint(url, every_s=0.1),
    ) as job:
        wait_for_checkpoint(job)
        kill(job, Key("server", 1))
        wait_for_rollbacks(job, 1)
        result = job.wait()
    assert values(result) == values(unbroken())
    assert result.rollbacks[0].path.startswith(f"{told}/step-")
    assert result.checkpoints is not None
    assert result.checkpoints.path.startswith(f"{told}/step-{STEPS}")
    assert list(root.glob(f"step-{STEPS}/values/default.safetensors.at-*"))
    again = ps.run(victims.regress, args=(STEPS,), workers=2, servers=3, resume=url)
    assert values(again) == values(result)
    out = tmp_path / "model.pt"

    def call(command: str, *more: str) -> str:
        done = CliRunner().invoke(cli, ["checkpoints", command, url, *more])
        assert done.exit_code == 0, done.output
        return done.output

    assert f"step-{STEPS}" in call("ls")
    assert call("verify").count("is whole") == 3
    assert "group 'default' at clock" in call("show")
    call("export", "--to", "torch", "--out", str(out))
    assert torch.load(out)["w"].numpy().tobytes() == values(result)
    assert "removed step-" in call("prune", "--keep", "1")
    assert len(call("ls").splitlines()) == 2
    assert "s3cret" not in "".join((*capfd.readouterr(), call("ls"), str(result)))


@pytest.mark.slow
def test_interrupted_run_goes_on_with_the_results_of_its_first_calls(tmp_path: Path) -> None:
    """Ctrl-C writes a checkpoint. The calls from before it give what they gave then; behind it they
    are new, also in a loop that begins at the clock."""
    folder, began = tmp_path / "runs", tmp_path / "began"

    def interrupt() -> None:
        while not began.exists():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    goes_on = functools.partial(
        ps.run, victims.agrees, workers=2, checkpoint=folder, resume=True, show="none"
    )
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        goes_on(args=(100_000, 1.0, str(began)))
    thread.join()
    saved = interrupted.value.result.checkpoints  # type: ignore[attr-defined]
    assert (saved.written, saved.failed) == (1, 0)
    clock = saved.clocks["default"]
    assert saved.path == f"{folder}/step-{clock}"
    result = goes_on(args=(clock + 4, 7.0))
    sums = [2.0 * step for step in range(clock, clock + 4)]
    assert result.returns[0] == {"first": [1.0, 2.0], "sums": sums}
    assert result.returns[1] == result.returns[0]
    more = goes_on(args=(clock + 6, 7.0), workers=3)
    sums = [3.0 * step for step in range(clock + 4, clock + 6)]
    assert [more.returns[rank] for rank in range(3)] == [{"first": [1.0, 2.0], "sums": sums}] * 3
