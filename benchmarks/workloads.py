"""What is measured: sizes, the model, its loader and the clockwork, the same for every contestant.

A contestant (`ours.py`, `floor.py`, `rival_ray.py`, `rival_rpc.py`) has a function for each of
these that takes the workload and a scratch folder and returns named figures: seconds for one call
(medians), or calls a second over all workers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GATE_TIMEOUT_S = 60.0
BLOCK = 50
"""Calls of one kind in a row when several kinds are timed in turn."""

Call = Callable[[], Any]
Span = tuple[float, float]
"""Begin and end by the machine's monotonic clock, which all its processes share."""


@dataclass(frozen=True)
class Dense:
    """Every worker pulls all values, fills its gradient with ones, pushes all; float64, rule Add.

    A worker pulls again when its last pull is there and its pushes are on their way, and must
    read its own writes. The time ends when every push is applied; the values are checked then.
    """

    total_bytes: int = 100_000_000
    servers: int = 2
    workers: int = 4
    steps: int = 5
    warm_steps: int = 1

    @property
    def part(self) -> int:
        """Elements on each server."""
        return self.total_bytes // 8 // self.servers

    @property
    def expected(self) -> float:
        """What every element is in the end: each push adds one."""
        return float(self.workers * (self.steps + self.warm_steps))


@dataclass(frozen=True)
class Latency:
    """One `push_pull` at a time of a small and a large float32 array, one server, rule Add.

    The gradient is filled before each call. That is not counted, except with several workers.

    Attributes:
        work_s: computing between two calls, for the rows that have it.
        sleep_s: sleeping between two calls of the small array, for the row that has it.
        workers: that push and pull the large array at the same time.
        names: arrays of `name_size` that one call pushes and pulls.
    """

    small_bytes: int = 8_192
    large_bytes: int = 1_000_000
    calls: int = 2_000
    large_calls: int = 500
    work_s: float = 200e-6
    sleep_s: float = 2e-3
    slept_calls: int = 400
    workers: int = 4
    worker_calls: int = 300
    names: int = 1_000
    name_size: int = 100
    name_calls: int = 100

    @property
    def small(self) -> int:
        return self.small_bytes // 4

    @property
    def large(self) -> int:
        return self.large_bytes // 4


@dataclass(frozen=True)
class LargeStep:
    """One `push_pull` of a float32 array, the gradient in place, the values left in their slot."""

    total_bytes: int = 100_000_000
    calls: int = 20

    @property
    def size(self) -> int:
        return self.total_bytes // 4


@dataclass(frozen=True)
class Mnist:
    """Training the ConvNet of the example; each worker does `steps` after `warm_steps`."""

    ways: tuple[str, ...] = ("async", "async_overlap", "sync")
    """In which it trains; the rivals have no overlap."""
    workers: int = 2
    steps: int = 600
    warm_steps: int = 50
    batch_size: int = 128
    images: int = 60_000
    lr: float = 0.01


@dataclass(frozen=True)
class Tcp:
    """One worker and one server over TCP on the loopback interface, float32, rule Add.

    A large array is pushed and pulled in one call; the floor sends as many bytes to a process that
    reads them into a buffer it has, and as many back. A small one is timed beside a ping.
    """

    large_bytes: int = 100_000_000
    large_calls: int = 10
    small_bytes: int = 8_192
    calls: int = 1_000

    @property
    def small(self) -> int:
        return self.small_bytes // 4

    @property
    def large(self) -> int:
        return self.large_bytes // 4


@dataclass(frozen=True)
class Memory:
    """A server that holds `total_bytes` of float32 under SGD while `workers` push and pull."""

    total_bytes: int = 100_000_000
    workers: int = 2
    steps: int = 5


@dataclass(frozen=True)
class Start:
    """An empty function on `workers`, from nothing to the end of every process."""

    workers: int = 2
    servers: int = 1
    repeats: int = 3


@dataclass(frozen=True)
class FirstStep:
    """A command that trains the ConvNet, from its start to the end of the last worker's first step.

    The images are few: reading a dataset is no part of it.
    """

    workers: int = 8
    repeats: int = 3
    images: int = 1_000


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a run with one worker and one server, float32.

    Attributes:
        total_bytes: values under Adam, whose state is twice as large.
        paused_bytes: values of the runs whose longest step is looked for; with Adam's state 100 MB.
        seconds: of each run.
        every_s: between two checkpoints.
        file_bytes: of the group that is written and loaded beside plain files.
        rows, dim: of the table under Adagrad.
        batch: rows of one push; `touched` of all rows are pushed again before the increment.
    """

    total_bytes: int = 100_000_000
    paused_bytes: int = 33_000_000
    seconds: float = 20.0
    every_s: float = 5.0
    file_bytes: int = 1_000_000_000
    rows: int = 10_000_000
    dim: int = 64
    batch: int = 65_536
    touched: float = 0.01
    steps_killed: int = 400


class Gate:
    """A place where the processes of one contestant meet before the clock starts."""

    def __init__(self, folder: Path, parties: int) -> None:
        self._folder = folder
        self._parties = parties

    def meet(self, name: str) -> None:
        """Return when all parties have called this with the same name.

        Raises:
            TimeoutError: a process did not arrive.
        """
        place = self._folder / name
        place.mkdir(exist_ok=True)
        (place / str(os.getpid())).touch()
        deadline = time.monotonic() + GATE_TIMEOUT_S
        while len(os.listdir(place)) < self._parties:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(os.listdir(place))} of {self._parties} came to {name}")
            time.sleep(0.0005)


def fresh(scratch: Path, name: str) -> Path:
    """A new folder in `scratch`."""
    folder = scratch / name
    folder.mkdir()
    return folder


def per_second(spans: Sequence[Span], count: int) -> float:
    """Rate of `count` things that were done within these spans together."""
    return count / (max(end for _, end in spans) - min(begin for begin, _ in spans))


def latencies(
    load: Latency, name: str, calls: Mapping[str, Call], before: Mapping[str, Call]
) -> dict[str, float]:
    """Figures of the small or the large array, timed in turn: for each of the calls its median in
    seconds and, behind `_tail`, its 90th percentile as a multiple of that.

    Args:
        name: `small` or `large`.
        calls: by name; with work in between the name ends in `_worked`, with sleep in `_slept`.
    """
    count = load.calls if name == "small" else load.large_calls
    figures: dict[str, float] = {}
    gaps = [("", count, 0.0, 0.0), ("_worked", count, load.work_s, 0.0)]
    if name == "small":
        gaps.append(("_slept", load.slept_calls, 0.0, load.sleep_s))
    for gap, number, work_s, sleep_s in gaps:
        samples = timings(calls, number, work_s, before, sleep_s=sleep_s)
        figures |= {f"{key}{gap}": median(times) for key, times in samples.items()}
        figures |= {f"{key}{gap}_tail": tail(times) for key, times in samples.items()}
    return figures


def tail(times: Sequence[float]) -> float:
    """The 90th percentile as a multiple of the median."""
    return quantiles(times, n=10)[-1] / median(times)


def medians(
    calls: Mapping[str, Call],
    count: int,
    work_s: float = 0.0,
    before: Mapping[str, Call] | None = None,
    block: int = BLOCK,
) -> dict[str, float]:
    """Median seconds of each call; as `timings`."""
    samples = timings(calls, count, work_s, before, block)
    return {name: median(times) for name, times in samples.items()}


def timings(
    calls: Mapping[str, Call],
    count: int,
    work_s: float = 0.0,
    before: Mapping[str, Call] | None = None,
    block: int = BLOCK,
    sleep_s: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of each call, timed in turn so that all see the same machine.

    Args:
        calls: what to time, by name; each is called `count` times, in blocks, after one block that
            is not counted.
        work_s: computing in the caller before each call, not counted.
        before: what to do before that for some of the calls, not counted.
        block: calls of one kind in a row; 1: they alternate.
        sleep_s: sleeping before each call, not counted.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    preparing = before if before is not None else {}
    for begin in range(-block, count, block):
        for name, call in calls.items():
            prepare = preparing.get(name, _nothing)
            number = min(block, count - max(begin, 0))
            times = [timed(call, work_s, prepare, sleep_s) for _ in range(number)]
            if begin >= 0:
                samples[name] += times
    return samples


def until_told(program: str) -> float:
    """Seconds from the start of a Python program until the moment by the machine's clock that it
    prints as its last word."""
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    return float(run.stdout.split()[-1]) - began


def _nothing() -> None:
    return None


def timed(call: Call, work_s: float = 0.0, prepare: Call = _nothing, sleep_s: float = 0.0) -> float:
    """Seconds that one call took, after `prepare` and sleeping or computing for so long."""
    prepare()
    if sleep_s:
        time.sleep(sleep_s)
    began = time.perf_counter()
    ready = began + work_s
    while began < ready:
        began = time.perf_counter()
    call()
    return time.perf_counter() - began


def convnet() -> torch.nn.Module:
    """The network of `examples/mnist.py` (a test holds the two together)."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 3, kernel_size=3),
        nn.MaxPool2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 10),
        nn.LogSoftmax(dim=1),
    )


def batches(load: Mnist, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Shuffled batches out of memory without end.

    The images are random, of MNIST's shape: speed does not depend on what they show.
    """
    import torch

    chance = torch.Generator().manual_seed(seed)
    images = torch.rand(load.images, 1, 28, 28, generator=chance)
    labels = torch.randint(10, (load.images,), generator=chance)
    while True:
        order = torch.randperm(load.images, generator=chance)
        for start in range(0, load.images - load.batch_size + 1, load.batch_size):
            chosen = order[start : start + load.batch_size]
            yield images[chosen], labels[chosen]


class Trainer:
    """One worker's model whose values and gradients are each one flat tensor.

    That is the cheapest form where they are moved as one message: no gathering, no scattering.
    """

    def __init__(self, load: Mnist, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)  # all ranks start from the same values
        self.model = convnet()
        self.values = torch.nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.gradients = torch.zeros_like(self.values)
        start = 0
        for parameter in self.model.parameters():
            end = start + parameter.numel()
            parameter.data = self.values[start:end].view_as(parameter)
            parameter.grad = self.gradients[start:end].view_as(parameter)
            start = end
        self._batches = batches(load, seed=rank)

    def backward(self) -> None:
        """Compute the gradients of the next batch."""
        from torch.nn import functional as F

        images, labels = next(self._batches)
        self.gradients.zero_()
        loss: torch.Tensor = F.nll_loss(self.model(images), labels)
        loss.backward()

    def train(self, load: Mnist, exchange: Call, gate: Gate) -> Span:
        """Do the warm-up and the counted steps; `exchange` moves gradients and values."""
        for _ in range(load.warm_steps):
            self.backward()
            exchange()
        gate.meet("begin")
        began = time.monotonic()
        for _ in range(load.steps):
            self.backward()
            exchange()
        return began, time.monotonic()
