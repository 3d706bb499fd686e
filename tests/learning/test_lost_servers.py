"""A run whose servers are killed again and again learns as one that lost none."""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import datasets
import mnist
import paramserve as ps
from paramserve.errors import ParamServeError
from paramserve.launch.entries import Key

KILLS = 20
APART = 40
"""Steps of each worker, at least, between two kills that are not lost."""
STEPS = 2500
WITHIN = 0.003
"""Of the test images."""


def train(worker: ps.Worker, folder: Path, log: str) -> None:
    """Each step is noted, with its time, once the servers have acknowledged it."""
    data = datasets.load(folder)
    dataset = datasets.tensors(data.train_images, data.train_labels)
    model = mnist.ConvNet()
    optimizer = worker.optimizer(model, torch.optim.Adam(model.parameters(), lr=0.001))
    with Path(f"{log}-{worker.rank}").open("a") as steps:
        for images, labels in worker.loader(dataset, batch_size=128, steps=STEPS):
            optimizer.zero_grad()
            F.nll_loss(model(images), labels).backward()
            optimizer.step()
            print(time.time(), file=steps, flush=True)


def trained(folder: Path, log: Path, **options: object) -> ps.Job:
    return ps.start(
        train,
        args=(folder, str(log)),
        workers=2,
        servers=2,
        consistency=ps.Async(),
        seed=0,
        **options,  # type: ignore[arg-type]  # of `start`
    )


def next_steps(log: Path, killed: list[float]) -> list[float]:
    """From each kill to the next step of any worker that the new servers acknowledged."""
    logs = log.parent.glob(f"{log.name}-*")
    times = sorted(float(line) for path in logs for line in path.read_text().split())
    gaps = [(b, b - a) for a, b in pairwise(times)]
    found = []
    for at, until in zip(killed, [*killed[1:], float("inf")], strict=True):
        within = [each for each in gaps if at < each[0] < until]
        if within:  # else the next server was killed before
            found.append(max(within, key=lambda each: each[1])[0] - at)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_mnist_after_20_killed_servers_is_as_good_as_undisturbed(tmp_path: Path) -> None:
    try:
        folder = datasets.fetch()
    except ParamServeError as error:
        pytest.skip(str(error))
    chance, killed = random.Random(3), list[float]()
    checkpoint = ps.Checkpoint(tmp_path / "runs", every_s=0.3)
    with trained(folder, tmp_path / "log", checkpoint=checkpoint) as job:
        last = 0
        while len(killed) < KILLS:
            found = job.status().checkpoints
            clock = found.clocks.get("model", 0) if found is not None else 0
            if clock > last + APART:
                last = clock
                time.sleep(chance.random() * 0.2)
                victim = Key("server", chance.randrange(2))
                (pid,) = [p.pid for p, k in job._supervisor._processes.items() if k == victim]
                killed.append(time.time())
                os.kill(pid, signal.SIGKILL)
                while len(job.status().rollbacks) < len(killed) or job.status().state != "running":
                    time.sleep(0.01)
            time.sleep(0.01)
        result = job.wait()
    assert len(result.rollbacks) == KILLS
    undisturbed = trained(folder, tmp_path / "whole").wait()
    images = mnist.testset(folder)
    reached, whole = (mnist.accuracy(each.state_dict(), *images) for each in (result, undisturbed))
    print(f"accuracy {reached:.2%} after {KILLS} kills, {whole:.2%} undisturbed")
    took = sorted(next_steps(tmp_path / "log", killed))
    print(
        f"kill to next acknowledged push: median {took[len(took) // 2]:.2f} s, most {took[-1]:.2f}"
    )
    assert reached > whole - WITHIN
