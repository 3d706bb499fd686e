"""Checkpoints of paramserve while it trains: what they cost, and what comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import paramserve as ps
from benchmarks.processes import private_mb, server_pids
from benchmarks.workloads import Mnist, Saving, Trainer

POLL_S = 0.005
MB = 1e6
STARTS = 3
"""Runs that are compared: the time of one varies by 0.3 s."""
TICK_S = 0.01
BLOCK_BYTES = 8 << 20


def training(load: Saving, scratch: Path) -> dict[str, float]:
    """Steps under Adam, without checkpoints and with them, in turn."""
    found = {}
    for name, checkpoint in (
        ("without", None),
        ("with", ps.Checkpoint(scratch / "with", every_s=load.every_s)),
    ):
        times, _ = _steps(load.total_bytes, ps.Async(), load.seconds, checkpoint)
        found[f"{name}_per_s"] = len(times) / sum(times)
    return found | {"slowed": found["without_per_s"] / found["with_per_s"] - 1}


def pauses(load: Saving, scratch: Path) -> dict[str, float]:
    """The longest step of a run with checkpoints beyond the median, and the memory they took."""
    found: dict[str, float] = {}
    for name, policy in (("async", ps.Async()), ("sync", ps.Sync())):
        checkpoint = ps.Checkpoint(scratch / name, every_s=load.every_s / 2)
        times, grown_mb = _steps(load.paused_bytes, policy, load.seconds / 2, checkpoint)
        plain, _ = _steps(load.paused_bytes, policy, load.seconds / 2, None)
        found[f"{name}_pause"] = max(times) - median(times)
        found[f"{name}_plain_pause"] = max(plain) - median(plain)
        found[f"{name}_step"] = median(times)
        found[f"{name}_grown_mb"] = grown_mb
    return found


def _steps(
    nbytes: int, policy: Any, seconds: float, checkpoint: ps.Checkpoint | None
) -> tuple[list[float], float]:
    """Seconds of each step, and how much the server's private memory grew at most."""
    job = ps.start(
        _push_and_pull,
        args=(nbytes // 4, seconds),
        consistency=policy,
        checkpoint=checkpoint,
    )
    with job:
        while not job.status().groups:
            time.sleep(POLL_S)
        time.sleep(1.0)
        server = server_pids()[0]
        least = most = private_mb(server)
        until = time.monotonic() + seconds * 0.8
        with contextlib.suppress(OSError):  # it may have ended
            while time.monotonic() < until:
                most = max(most, private_mb(server))
                time.sleep(0.05)
        return job.wait().returns[0], most - least


def _push_and_pull(worker: ps.Worker, size: int, seconds: float) -> list[float]:
    client = worker.client
    client.define("w", np.zeros(size, np.float32), rule=ps.Adam(lr=0.001))
    client.gradient("w").fill(1.0)
    times = []
    until = time.monotonic() + 1.0  # warm
    begun = False
    while True:
        began = time.perf_counter()
        gradient = client.gradient("w")
        gradient[:1] = 1.0
        client.push_pull({"w": gradient}, copy=False, tick=True)
        if begun:
            times.append(time.perf_counter() - began)
        if time.monotonic() > until:
            if begun:
                return times
            begun, until = True, time.monotonic() + seconds


def files(load: Saving, scratch: Path) -> dict[str, float]:
    """A checkpoint of one large group, and a run that goes on from it, beside plain files."""
    floor_write = timed_write(scratch / "plain", load.file_bytes)
    forget(scratch / "plain")
    floor_read = timed_read(scratch / "plain")
    os.remove(scratch / "plain")
    folder, size = scratch / "files", load.file_bytes // 4
    with ps.start(
        _define, args=(size, str(scratch / "end")), checkpoint=ps.Checkpoint(folder, every_s=3600)
    ) as job:
        _until((scratch / "defined").exists)
        saved = job.checkpoint()
        (scratch / "end").touch()
        job.wait()
    loaded_s, empty_s = (min(_ready_s(each) for _ in range(STARTS)) for each in (folder, None))
    return {
        "write_per_s": saved.bytes / saved.seconds / MB,
        "load_per_s": load.file_bytes / max(loaded_s - empty_s, TICK_S) / MB,
        "floor_write_per_s": load.file_bytes / floor_write / MB,
        "floor_read_per_s": load.file_bytes / floor_read / MB,
    }


def _define(worker: ps.Worker, size: int, end: str) -> None:
    worker.client.define("w", np.ones(size, np.float32), group="w", rule=ps.Add())
    worker.client.define("ready", np.ones(1, np.float32), group="ready", rule=ps.Add())
    Path(end).with_name("defined").touch()
    _until(Path(end).exists)


def _ready_s(folder: Path | None) -> float:
    """Seconds from the start of a run to the servers' first answer, with what a checkpoint has."""
    for path in folder.rglob("*") if folder is not None else ():
        if path.is_file():
            forget(path)
    began = time.monotonic()
    ready = ps.run(_first_pull, resume=folder or False).returns[0]
    return float(ready) - began


def _first_pull(worker: ps.Worker) -> float:
    """When the servers have answered: they do so when all is loaded. A value of another group is
    asked for, so a client's own copy of 1 GB is left out."""
    worker.client.define("ready", np.ones(1, np.float32), group="ready", rule=ps.Add())
    worker.client.pull("ready")
    return time.monotonic()


def timed_write(path: Path, nbytes: int) -> float:
    """Seconds to write a file and to sync it."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for at in range(0, nbytes, BLOCK_BYTES):
            file.write(memoryview(block)[: nbytes - at])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def timed_read(path: Path) -> float:
    """Seconds to read a file."""
    into = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.readinto(into):
            pass
    return time.perf_counter() - began


def forget(path: Path) -> None:
    """Have the system keep nothing of a file in memory."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(load: Saving, scratch: Path) -> dict[str, float]:
    """A full checkpoint of a table, then one after a part of its rows has changed."""
    steps = [scratch / name for name in ("filled", "touch", "touched", "end")]
    with ps.start(
        _rows,
        args=(load, *map(str, steps)),
        consistency=ps.Async(),
        checkpoint=ps.Checkpoint(scratch / "table", every_s=3600),
    ) as job:
        _until(steps[0].exists)
        full = job.checkpoint()
        steps[1].touch()
        _until(steps[2].exists)
        increment = job.checkpoint()
        steps[3].touch()
        longest = job.wait().returns[0]
    rows = load.rows * load.touched
    return {
        "full_s": full.seconds,
        "increment_s": increment.seconds,
        "share": increment.seconds / full.seconds,
        "bytes": increment.bytes / (rows * (8 + 2 * 4 * load.dim)),
        "pause_ms": longest * 1e3,
        "shard_pause_ms": increment.pause_s * 1e3,
    }


def _rows(
    worker: ps.Worker, load: Saving, filled: str, touch: str, touched: str, end: str
) -> float:
    found = worker.client.table("t", dim=load.dim, rule=ps.Adagrad(lr=0.1))
    gradient = np.ones((load.batch, load.dim), np.float32)

    def push(keys: Any) -> None:
        found.push(keys, gradient[: keys.size]).result()

    for at in range(0, load.rows, load.batch):
        push(np.arange(at, min(at + load.batch, load.rows)))
    Path(filled).touch()
    _until(Path(touch).exists)
    chance = np.random.default_rng(0)
    chosen = chance.choice(load.rows, int(load.rows * load.touched), replace=False)
    for at in range(0, chosen.size, load.batch):
        push(chosen[at : at + load.batch])
    Path(touched).touch()
    few, longest = chosen[:100], 0.0
    while not Path(end).exists():  # small pulls while the increment is written
        began = time.perf_counter()
        found.pull(few)
        longest = max(longest, time.perf_counter() - began)
        time.sleep(0.001)
    return longest


def recovery(load: Saving, scratch: Path) -> dict[str, float]:
    """Time from the death of a server to the next step that is done, with a checkpoint 10 s old.
    The driver has imported torch, as programs that have a model do."""
    import torch  # noqa: F401

    log = scratch / "steps"
    with ps.start(
        _log_steps,
        args=(str(log), load.steps_killed),
        consistency=ps.Async(),
        checkpoint=ps.Checkpoint(scratch / "recovery", every_s=3600),
    ) as job:
        _until(log.exists)
        job.checkpoint()
        time.sleep(load.seconds / 2)
        killed = time.monotonic()
        os.kill(server_pids()[0], signal.SIGKILL)
        job.wait()
    lines = [line.split() for line in log.read_text().splitlines()]
    again = [float(at) for incarnation, at in lines if incarnation != "1"]
    return {"seconds": min(again) - killed}


def _log_steps(worker: ps.Worker, log: str, steps: int) -> None:
    import torch

    trainer = Trainer(Mnist(images=2_000), 0)
    optimizer = worker.optimizer(
        trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    )
    until = time.monotonic() + 60.0
    with open(log, "a", buffering=1) as file:
        while worker.clock < steps or worker.incarnation == 1:
            if time.monotonic() > until:
                raise TimeoutError("the server was not killed")
            trainer.backward()
            optimizer.step()
            file.write(f"{worker.incarnation} {time.monotonic()}\n")
            time.sleep(0.005)


def _until(condition: Callable[[], bool], limit_s: float = 300.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("what the other process is to do has not come")
        time.sleep(POLL_S)
