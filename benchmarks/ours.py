"""Ours: the same workloads through the public interface of paramserve."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import paramserve as ps
from benchmarks.floor import Ping, ping_server, reach_ping, run_together
from benchmarks.processes import arena_mb, private_mb, server_pids
from benchmarks.workloads import (
    Call,
    Dense,
    FirstStep,
    Gate,
    LargeStep,
    Latency,
    Memory,
    Mnist,
    Span,
    Start,
    Trainer,
    latencies,
    medians,
    per_second,
    timed,
    until_told,
)


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
    figures["worker_calls"] = per_second(spans, load.workers * load.worker_calls)
    for name, together in (("names", False), ("names_together", True)):
        result = ps.run(_names_worker, args=(load, together), consistency=ps.Async())
        figures |= {f"{name}{way}": seconds for way, seconds in result.returns[0].items()}
    return figures


def _latency_worker(worker: ps.Worker, load: Latency, path: str) -> dict[str, float]:
    client, ping = worker.client, Ping(reach_ping(path))
    figures: dict[str, float] = {}
    for name, size in (("small", load.small), ("large", load.large)):
        client.define(name, np.zeros(size, np.float32), rule=ps.Add())
        in_place = InPlace(client, name)
        gradient = np.ones(size, np.float32)
        calls: dict[str, Call] = {
            name: in_place,
            f"{name}_copying": partial(client.push_pull, {name: gradient}),
            f"{name}_ping": ping,
        }

        def fill(call: InPlace = in_place) -> None:
            ping.end()
            call.fill()

        before = {name: fill, f"{name}_copying": ping.end, f"{name}_ping": ping.begin}
        figures |= latencies(load, name, calls, before)
    return figures


def _names_worker(worker: ps.Worker, load: Latency, together: bool) -> dict[str, float]:
    """All names in one call; behind `_slots` with the gradients in their slots.

    Args:
        together: whether they are defined in one call, too.
    """
    client = worker.client
    names = [f"p{number}" for number in range(load.names)]
    values = {name: np.zeros(load.name_size, np.float32) for name in names}
    if together:
        client.define(values, rule=ps.Add())
    else:
        for name, value in values.items():
            client.define(name, value, rule=ps.Add())
    own = {name: np.ones(load.name_size, np.float32) for name in names}
    lent: dict[str, Any] = {}

    def fill() -> None:
        lent.update((name, client.gradient(name)) for name in names)
        for gradient in lent.values():
            gradient.fill(1.0)

    calls = {
        "": lambda: client.push_pull(own),
        "_slots": lambda: client.push_pull(lent, copy=False),
    }
    return medians(calls, load.name_calls, before={"_slots": fill}, block=10)


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
            engine=engine if engine is not None else ps.Local(threads_per_worker=1),
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
    found = private_mb(server_pids()[0]), arena_mb(os.getpid())
    gate.meet("read")
    return found


def start(load: Start, scratch: Path) -> dict[str, float]:
    """After one run that fills the kernel cache; `entered`: until the last function is entered."""
    entered: list[float] = []

    def run() -> None:
        began = time.monotonic()
        result = ps.run(enter, workers=load.workers, servers=load.servers, consistency=ps.Async())
        entered.append(max(result.returns.values()) - began)

    run()
    seconds = median(timed(run) for _ in range(load.repeats))
    return {"seconds": seconds, "entered": median(entered[1:])}


def enter(worker: ps.Worker) -> float:
    """A training function that only tells when it was called."""
    return time.monotonic()


def first_define(load: Start, scratch: Path) -> dict[str, float]:
    """The slowest worker's first parameter of 8 KB, and its first table after that."""
    found = []
    for _ in range(load.repeats + 1):
        result = ps.run(_define, workers=load.workers, servers=load.servers, consistency=ps.Async())
        found.append([max(each) for each in zip(*result.returns.values(), strict=True)])
    define, table = (median(each) for each in zip(*found[1:], strict=True))
    return {"seconds": define, "table": table}


def _define(worker: ps.Worker) -> tuple[float, float]:
    client, value, rule = worker.client, np.zeros(2048, np.float32), ps.SGD(lr=0.1)
    define = partial(client.define, "w", value, rule=rule)
    return timed(define), timed(partial(client.table, "rows", dim=8, rule=ps.Adagrad(lr=0.1)))


def first_step(load: FirstStep, scratch: Path) -> dict[str, float]:
    """The script of a user, who imports torch and starts a run."""
    call = f"ours.train_once({load.workers}, {load.images})"
    program = f"import torch; from benchmarks import ours; {call}"
    return {"seconds": median([until_told(program) for _ in range(load.repeats + 1)][1:])}


def train_once(workers: int, images: int) -> None:
    result = ps.run(
        _step_once,
        args=(images,),
        workers=workers,
        consistency=ps.Async(),
        engine=ps.Local(threads_per_worker=1),
    )
    print(max(result.returns.values()))


def _step_once(worker: ps.Worker, images: int) -> float:
    import torch

    trainer = Trainer(Mnist(images=images), worker.rank)
    sgd = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    optimizer = worker.optimizer(trainer.model, sgd)
    trainer.backward()
    optimizer.step()
    return time.monotonic()
