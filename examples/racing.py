"""One training run whose workers are as slow as they are told to be, and what its logs say of it.

A worker computes a batch, then sleeps until as much time is over as the batch would have taken on
the machine that is played: so four workers need no more than two cores. Which policies run against
each other is not decided here; see `compare_sync_async.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import datasets
import paramserve as ps
import report
from mnist import ConvNet, accuracy, staleness
from paramserve.observe import watch

BATCH = 128
BATCH_S = 0.020
"""What a batch of `BATCH` samples takes a worker that is not slow, in seconds."""
SLOW = 5.0
"""How many times that a slow one takes."""
CHANCE = 0.1
"""Chance of a slow step in the scenario "transient"."""
SCENARIOS = ("even", "persistent", "transient")
LOOK_S = 1.0
"""While it trains, the newest values are evaluated this often; more would disturb the workers."""
LOOKED_AT = 5
"""And on every fifth test image."""
AFTER_S = 1.5
"""A run goes on this long once the target is seen, so that the workers' logs of it come in."""
KEPT = 64
"""Snapshots that wait on a server."""
POINTS = 40
"""Points of a curve; around the target every snapshot is evaluated."""
MEET_S = 120.0


@dataclass(frozen=True)
class Pace:
    """How long the batches of each worker take.

    Attributes:
        scenario: "even"; "persistent": the last worker takes `SLOW` times as long; "transient":
            each step of each worker does with probability `CHANCE`.
    """

    scenario: str
    seed: int

    def seconds(self, rank: int, workers: int, step: int, samples: int) -> float:
        """Seconds of one batch. Steps are drawn by (seed, rank, step): the same ones for every
        policy."""
        slow = False
        if self.scenario == "persistent":
            slow = rank == workers - 1
        elif self.scenario == "transient":
            slow = np.random.default_rng((self.seed, rank, step)).random() < CHANCE
        return BATCH_S * samples / BATCH * (SLOW if slow else 1.0)


@dataclass(frozen=True)
class Entrant:
    """A policy in a race.

    Attributes:
        name: short, for the command line.
        label: as one writes it.
        policy: makes it, from learning rate and number of workers.
        means: an update is a mean of all workers' gradients: it gets the learning rate times the
            workers, so that each sample moves the values as far as under every other policy.
        lr_times, momentum: of the worker's SGD.
        by_clock: a version is a clock of the workers. Otherwise it is some number of their steps.
        steps_per_clock: own steps of a worker between two exchanges.
        every: versions between two snapshots.
        dynamic, adaptive: how batches are shared; `Course` may ask for it for all.
    """

    name: str
    label: str
    policy: Callable[[float, int], Any]
    means: bool = False
    by_clock: bool = False
    lr_times: float = 1.0
    momentum: float = 0.0
    steps_per_clock: int = 1
    every: int = 8
    dynamic: bool = False
    adaptive: tuple[int, int] | None = None


@dataclass(frozen=True)
class Course:
    """What is the same for all entrants of a scenario."""

    data: Path
    """Folder that `prepare` has filled."""
    pace: Pace
    workers: int
    servers: int
    steps: int
    """Most steps of each worker."""
    lr: float
    target: float
    dynamic: bool = False
    adaptive: tuple[int, int] | None = None


def prepare(source: str | None, folder: Path) -> None:
    """Write MNIST as the float arrays that every worker maps: four times less to compute and keep.

    Raises:
        ParamServeError: as `datasets.fetch`.
    """
    data = datasets.load(datasets.fetch(source))
    for part, images, labels in (
        ("train", data.train_images, data.train_labels),
        ("test", data.test_images, data.test_labels),
    ):
        for kind, tensor in zip(
            ("images", "labels"), datasets.tensors(images, labels).tensors, strict=True
        ):
            np.save(folder / f"{part}-{kind}.npy", tensor.numpy())


def training_set(folder: Path) -> list[torch.Tensor]:
    """Images and labels that train."""
    return _mapped(folder, "train")


def test_set(folder: Path) -> list[torch.Tensor]:
    """Images and labels that are only evaluated."""
    return _mapped(folder, "test")


def _mapped(folder: Path, part: str) -> list[torch.Tensor]:
    paths = (folder / f"{part}-{kind}.npy" for kind in ("images", "labels"))
    # "c": torch wants arrays that could be written to; none is.
    return [torch.from_numpy(np.load(path, mmap_mode="c")) for path in paths]


def train(worker: ps.Worker, course: Course, entrant: Entrant, lr: float, meeting: Path) -> None:
    """What each worker does. Every step is logged: that is all that the race is judged by."""
    dataset = TensorDataset(*training_set(course.data))
    _warm(dataset.tensors)
    model = ConvNet()
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=entrant.momentum)
    optimizer = worker.optimizer(model, sgd)
    batches = _batches(worker, dataset, course, entrant)
    _meet(meeting, worker)
    worker.log(samples=0)  # the common first moment
    began = time.monotonic()
    for step, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        takes_s = course.pace.seconds(worker.rank, worker.workers, step, len(labels))
        time.sleep(max(0.0, began + takes_s - time.monotonic()))
        computed = time.monotonic()
        optimizer.step()  # push gradients, pull values
        ended = time.monotonic()
        worker.log(
            loss=loss, samples=len(labels), computed_s=computed - began, waited_s=ended - computed
        )
        began = ended


def _batches(worker: ps.Worker, dataset: Any, course: Course, entrant: Entrant) -> Any:
    adaptive = entrant.adaptive if entrant.adaptive is not None else course.adaptive
    shared = entrant.dynamic or course.dynamic or adaptive is not None
    return worker.loader(
        dataset,
        batch_size=BATCH,
        steps=course.steps,
        shards="dynamic" if shared else "static",
        adaptive_batch=adaptive,
    )


def _warm(tensors: Sequence[torch.Tensor]) -> None:
    """Torch's first steps are slow, and are not what is compared."""
    images, labels = (tensor[:BATCH] for tensor in tensors)
    model = ConvNet()
    for _ in range(3):
        F.nll_loss(model(images), labels).backward()


def _meet(folder: Path, worker: ps.Worker) -> None:
    """Return when all workers have called this. A policy may not wait for anybody, so files do.

    Raises:
        TimeoutError: a process did not arrive.
    """
    (folder / str(worker.rank)).touch()
    until = time.monotonic() + MEET_S
    while len(list(folder.iterdir())) < worker.workers:
        if time.monotonic() > until:
            raise TimeoutError(f"not all of {worker.workers} workers came within {MEET_S:.0f} s")
        time.sleep(0.001)


# --- the driver's side -------------------------------------------------------------------------


def race(entrant: Entrant, course: Course, *, seed: int) -> report.Race:
    """Train until the target is passed, and say what the workers' logs and the servers tell.

    The curve is evaluated afterwards, from snapshots that were taken on the way.
    """
    lr = course.lr * entrant.lr_times * (course.workers if entrant.means else 1)
    images, labels = test_set(course.data)
    with tempfile.TemporaryDirectory() as meeting:
        job = ps.start(
            train,
            args=(course, entrant, lr, Path(meeting)),
            workers=course.workers,
            servers=course.servers,
            consistency=entrant.policy(lr, course.workers),
            seed=seed,
            engine=ps.Local(threads_per_worker=1, deadlines=ps.Deadlines(heartbeat_s=0.25)),
        )
        kept: list[ps.Snapshot] = []
        with watch(job):
            finish = Finish(course.target, images[::LOOKED_AT], labels[::LOOKED_AT])
            for snapshot in job.snapshots(every=entrant.every, keep=KEPT):
                kept.append(snapshot)
                if finish.passed(snapshot, time.monotonic()):
                    job.stop()
            result = job.wait()
    group = job.status().groups["model"]
    log = Log(result.metrics)
    per_update = group.steps * entrant.steps_per_clock / max(group.version, 1)
    steps = None if entrant.by_clock else per_update
    points = [
        (snapshot, seconds)
        for snapshot in kept
        if (seconds := log.reached(snapshot.version, steps)) is not None
    ]
    curve = evaluate(points, course.target, lambda one: accuracy(one.state, images, labels))
    first = next((point for point in curve if point.accuracy >= course.target), None)
    return report.Race(
        name=entrant.name,
        label=entrant.label,
        scenario=course.pace.scenario,
        target=course.target,
        seconds=first.seconds if first is not None else None,
        updates=first.version if first is not None else None,
        steps_per_second=log.steps_per_second,
        staleness=staleness(result),
        waiting=log.waiting,
        dropped=sum(result.dropped.values()),
        samples=log.samples,
        curve=curve,
    )


class Finish:
    """Says when a run may end: some time after the target was seen twice in a row."""

    def __init__(self, target: float, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._target = target
        self._test = images, labels
        self._look_at = 0.0
        self._seen = 0
        self._over_at: float | None = None

    def passed(self, snapshot: ps.Snapshot, now: float) -> bool:
        """Look at a snapshot, if it is time to."""
        if self._over_at is None and now >= self._look_at:
            self._look_at = now + LOOK_S
            reached = accuracy(snapshot.state, *self._test) >= self._target
            self._seen = self._seen + 1 if reached else 0
            if self._seen == 2:
                self._over_at = now + AFTER_S
        return self._over_at is not None and now >= self._over_at


class Log:
    """What the workers have logged, on one time axis that begins when all of them had met."""

    def __init__(self, records: Sequence[Any]) -> None:
        self._began = min(one.time_s for one in records if not one.values["samples"])
        self._steps = sorted(
            (one for one in records if one.values["samples"]), key=lambda one: one.time_s
        )
        self._first: dict[int, float] = {}
        """When the first worker had finished a clock."""
        for one in self._steps:
            self._first.setdefault(one.clock, one.time_s - self._began)
        self._last_clock = max(self._first, default=0)

    @property
    def steps_per_second(self) -> float:
        """Batches of all workers together."""
        return len(self._steps) / (self._steps[-1].time_s - self._began)

    @property
    def waiting(self) -> float:
        """Share of the workers' time that went by in `optimizer.step()`."""
        waited = sum(one.values["waited_s"] for one in self._steps)
        return waited / (waited + sum(one.values["computed_s"] for one in self._steps))

    @property
    def samples(self) -> dict[int, int]:
        """That each worker has computed, by rank."""
        found: dict[int, int] = {}
        for one in self._steps:
            found[one.rank] = found.get(one.rank, 0) + int(one.values["samples"])
        return dict(sorted(found.items()))

    def reached(self, version: int, per_update: float | None) -> float | None:
        """Seconds after which the values had a version; None: the logs do not go so far.

        Args:
            per_update: steps of all workers behind one version. None: a version is a clock, and it
                was there when the first worker had finished it.
        """
        if version == 0:
            return 0.0
        if per_update is not None:
            steps = max(round(version * per_update), 1)
            return (
                self._steps[steps - 1].time_s - self._began if steps <= len(self._steps) else None
            )
        if version > self._last_clock:
            return None
        return min(self._first[clock] for clock in self._first if clock >= version)


def evaluate(
    points: Sequence[tuple[ps.Snapshot, float]],
    target: float,
    judge: Callable[[ps.Snapshot], float],
) -> list[report.Point]:
    """The accuracy of some snapshots: evenly spread ones, and all before the target is passed."""
    found: dict[int, float] = {}
    spread = sorted({round(n) for n in np.linspace(0, len(points) - 1, min(POINTS, len(points)))})
    for number in spread:
        found[number] = judge(points[number][0])
    for low, high in pairwise(spread):
        if found[high] >= target > found[low]:
            for number in range(low + 1, high):
                found[number] = judge(points[number][0])
            break
    return [
        report.Point(points[number][0].version, points[number][1], value)
        for number, value in sorted(found.items())
    ]
