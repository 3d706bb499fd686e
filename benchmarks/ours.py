"""Ours: the same workloads through the public interface of paramserve."""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import paramserve as ps
from benchmarks.floor import Ping, ping_server, run_together
from benchmarks.workloads import (
    Call,
    Dense,
    Gate,
    LargeStep,
    Latency,
    Memory,
    Mnist,
    Span,
    Start,
    Trainer,
    medians,
    per_second,
    timed,
)

MB = 1e6


def dense(load: Dense, scratch: Path) -> dict[str, float]:
    """Pushes are on their way while the next pull is asked for; values stay in their slot."""
    result = ps.run(
        _dense_worker,
        args=(load, scratch),
        workers=load.workers,
        servers=load.servers,
        consistency=ps.Async(),
    )
    spans = list(result.returns.values())
    return {"per_s": per_second(spans, load.workers * load.steps)}


def _dense_worker(worker: ps.Worker, load: Dense, scratch: Path) -> Span:
    client = worker.client
    client.define("w", np.zeros(load.part * load.servers), rule=ps.Add())
    gate = Gate(scratch, load.workers)
    tickets: list[Any] = []

    def step() -> None:
        client.pull("w", copy=False)
        gradient = client.gradient("w")
        gradient.fill(1.0)
        tickets.append(client.push("w", gradient))

    def settle() -> None:
        while tickets:
            tickets.pop().result()

    span = run_together(gate, step, load.warm_steps, load.steps, settle)
    gate.meet("end")
    if worker.rank == 0 and not (client.pull("w") == load.expected).all():
        raise AssertionError(f"the values are not {load.expected}")
    gate.meet("checked")
    return span


def latency(load: Latency, scratch: Path) -> dict[str, float]:
    """Gradient in its slot, values left in theirs; `copying` is the call with own arrays."""
    with ping_server(scratch) as path:
        result = ps.run(_latency_worker, args=(load, path), consistency=ps.Async())
    figures: dict[str, float] = result.returns[0]
    result = ps.run(
        _many_worker, args=(load, scratch), workers=load.workers, consistency=ps.Async()
    )
    spans = list(result.returns.values())
    return figures | {"worker_calls": per_second(spans, load.workers * load.worker_calls)}


def _latency_worker(worker: ps.Worker, load: Latency, path: str) -> dict[str, float]:
    client, ping = worker.client, Ping(path)
    figures: dict[str, float] = {}
    for name, size, count in (
        ("small", load.small, load.calls),
        ("large", load.large, load.large_calls),
    ):
        client.define(name, np.zeros(size, np.float32), rule=ps.Add())
        in_place = InPlace(client, name)
        gradient = np.ones(size, np.float32)
        copying = partial(client.push_pull, {name: gradient})
        for key, work_s in ((name, 0.0), (f"{name}_worked", load.work_s)):
            calls: dict[str, Call] = {
                key: in_place,
                f"{key}_copying": copying,
                f"{key}_ping": ping,
            }
            figures |= medians(calls, count, work_s, {key: in_place.fill})
    return figures


class InPlace:
    """One `push_pull` without a copy on our side: gradient and values in their slots."""

    def __init__(self, client: ps.Client, name: str) -> None:
        self._client = client
        self._name = name
        self._gradient = client.gradient(name)

    def fill(self) -> None:
        """Write the next gradient into a slot of its own."""
        self._gradient = self._client.gradient(self._name)
        self._gradient.fill(1.0)

    def __call__(self) -> None:
        self._client.push_pull({self._name: self._gradient}, copy=False)

    def whole(self) -> None:
        """Both, for where filling counts as work of the worker."""
        self.fill()
        self()


def _many_worker(worker: ps.Worker, load: Latency, scratch: Path) -> Span:
    worker.client.define("w", np.zeros(load.large, np.float32), rule=ps.Add())
    call = InPlace(worker.client, "w")
    gate = Gate(scratch, load.workers)
    return run_together(gate, call.whole, 20, load.worker_calls)


def large_step(load: LargeStep, scratch: Path) -> dict[str, float]:
    """Filling the gradient is not counted: the caller would write it somewhere in any case."""
    result = ps.run(_large_worker, args=(load,), consistency=ps.Async())
    figures: dict[str, float] = result.returns[0]
    return figures


def _large_worker(worker: ps.Worker, load: LargeStep) -> dict[str, float]:
    client = worker.client
    figures: dict[str, float] = {}
    source, target = np.ones(load.size, np.float32), np.empty(load.size, np.float32)
    for name, rule in (("add", ps.Add()), ("sgd", ps.SGD(lr=0.01))):
        client.define(name, np.zeros(load.size, np.float32), rule=rule)
        ours, copies = [], []
        call = InPlace(client, name)
        for number in range(load.calls + 2):
            once = timed(call, prepare=call.fill)
            there, back = partial(np.copyto, target, source), partial(np.copyto, source, target)
            twice = timed(there) + timed(back)
            if number >= 2:
                ours.append(once)
                copies.append(twice)
        figures |= {name: median(ours), f"{name}_memcpy": median(copies)}
    return figures


def mnist(load: Mnist, scratch: Path, engine: Any = None) -> dict[str, float]:
    """`worker.optimizer` around the same model, loader and torch optimizer as the floor's."""
    figures: dict[str, float] = {}
    ways = (
        ("async", ps.Async(), False),
        ("async_overlap", ps.Async(), True),
        ("sync", ps.Sync(reduce="sum"), False),
    )
    for name, consistency, overlap in ways:
        if name not in load.ways:
            continue
        folder = scratch / name
        folder.mkdir()
        result = ps.run(
            _mnist_worker,
            args=(load, folder, overlap),
            workers=load.workers,
            consistency=consistency,
            engine=engine,
            threads_per_worker=1,
        )
        spans = list(result.returns.values())
        figures[f"{name}_per_s"] = per_second(spans, load.workers * load.steps)
    return figures


def _mnist_worker(worker: ps.Worker, load: Mnist, folder: Path, overlap: bool) -> Span:
    import torch

    trainer = Trainer(load, worker.rank)
    sgd = torch.optim.SGD(trainer.model.parameters(), lr=load.lr)
    optimizer = worker.optimizer(trainer.model, sgd, overlap=overlap)
    return trainer.train(load, optimizer.step, Gate(folder, load.workers))


def memory(load: Memory, scratch: Path) -> dict[str, float]:
    """Read while the workers are alive: of a page that one process maps, /proc says private."""
    result = ps.run(
        _memory_worker, args=(load, scratch), workers=load.workers, consistency=ps.Async()
    )
    figures = {f"arena_mb_{rank}": found[1] for rank, found in result.returns.items()}
    return figures | {"private_mb": result.returns[0][0]}


def _memory_worker(worker: ps.Worker, load: Memory, scratch: Path) -> tuple[float, float]:
    client, gate = worker.client, Gate(scratch, load.workers)
    client.define("w", np.zeros(load.total_bytes // 4, np.float32), rule=ps.SGD(lr=0.01))
    for _ in range(load.steps):
        gradient = client.gradient("w")
        gradient.fill(1.0)
        values = client.push_pull({"w": gradient}, copy=False)["w"]
        values.max()  # a worker reads what it pulled: from then on its pages are shared
    gate.meet("trained")
    workers = {int(name) for name in os.listdir(scratch / "trained")}
    found = private_mb(server_pid(workers)), arena_mb(os.getpid())
    gate.meet("read")
    return found


def server_pid(workers: set[int]) -> int:
    """The one process that maps arenas without being a worker.

    Raises:
        LookupError: none or several.
    """
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in workers and _parent(entry) == os.getppid():
            with contextlib.suppress(OSError):
                if arena_mb(int(entry)):
                    found.append(int(entry))
    if len(found) != 1:
        raise LookupError(f"expected one server process, found {found}")
    return found[0]


def _parent(entry: str) -> int:
    try:
        stat = Path("/proc", entry, "stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[1])


def private_mb(pid: int) -> float:
    """Memory that only this process has."""
    text = Path("/proc", str(pid), "smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.M)) * 1024 / MB


def arena_mb(pid: int) -> float:
    """All shared arenas that a process maps."""
    text = Path("/proc", str(pid), "maps").read_text()
    spans = re.findall(r"^(\w+)-(\w+) .*memfd:paramserve", text, re.M)
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans) / MB


def start(load: Start, scratch: Path) -> dict[str, float]:
    """After one run that fills the kernel cache."""

    def run() -> None:
        ps.run(nothing, workers=load.workers, servers=load.servers)

    run()
    return {"seconds": median(timed(run) for _ in range(load.repeats))}


def nothing(worker: ps.Worker) -> None:
    """An empty training function."""
