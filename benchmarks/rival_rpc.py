"""Rival: torch.distributed.rpc with TensorPipe, a server process that holds tensors.

What makes it fast, and is done here: one tensor for each server (a view would send its whole
storage), `rpc_async` to all servers at once, push and pull in one call where the workload allows
it, the values sent as they lie without a copy (other pushes may change them meanwhile, which
asynchronous training bears), and large buffers kept by malloc instead of mapped anew for each
message (see `harness.ENVIRONMENTS`). Transports and channels are TensorPipe's own choice, which
is shared memory on one host; naming others was not faster.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import rpc

from benchmarks.floor import run_together, team
from benchmarks.workloads import (
    Dense,
    Gate,
    Latency,
    Mnist,
    Span,
    Trainer,
    fresh,
    latencies,
    medians,
    per_second,
)

TIMEOUT_S = 120.0


class Server:
    """The values of one server; a lock makes each addition whole."""

    def __init__(self, size: int, dtype: torch.dtype, workers: int = 1) -> None:
        self.values = torch.zeros(size, dtype=dtype)
        self.lock = threading.Lock()
        self.pushes = 0
        self.parts: list[torch.Tensor] = []
        """Further values, each a tensor by itself: a view would be sent with its whole storage."""
        self._workers = workers
        self._waiting: list[torch.futures.Future[torch.Tensor]] = []
        self._sum = torch.zeros(size, dtype=dtype)

    def push(self, gradient: torch.Tensor, alpha: float) -> None:
        with self.lock:
            self.values.add_(gradient, alpha=alpha)
            self.pushes += 1

    def push_sync(self, gradient: torch.Tensor, alpha: float) -> torch.futures.Future[torch.Tensor]:
        """The values after the gradients of all workers, summed, are applied."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with self.lock:
            self._sum.add_(gradient)
            self._waiting.append(future)
            self.pushes += 1
            if len(self._waiting) < self._workers:
                return future
            self.values = self.values.add(self._sum, alpha=alpha)
            self._sum.zero_()
            released, self._waiting = self._waiting, []
        for one in released:
            one.set_result(self.values)
        return future


_server: Server
"""Server of this process: what the functions below, called from other processes, work on."""


def pull() -> torch.Tensor:
    return _server.values


def push(gradient: torch.Tensor) -> None:
    _server.push(gradient, 1.0)


def push_pull(gradient: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    _server.push(gradient, alpha)
    return _server.values


def push_pull_all(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    with _server.lock:
        for value, gradient in zip(_server.parts, gradients, strict=True):
            value.add_(gradient)
        return _server.parts


@rpc.functions.async_execution
def push_pull_sync(gradient: torch.Tensor, alpha: float) -> torch.futures.Future[torch.Tensor]:
    return _server.push_sync(gradient, alpha)


def assign(values: torch.Tensor) -> None:
    _server.values = values


def pushes() -> int:
    return _server.pushes


def cluster(
    scratch: Path, servers: int, workers: int, hold: Callable[[], Server], work: Any, *args: Any
) -> list[Any]:
    """Start servers and workers; what `work(rank, *args)` returned on each worker."""
    found = team(_member, servers + workers, scratch, servers, workers, hold, work, args)
    return found[servers:]


def _member(
    rank: int, scratch: Path, servers: int, workers: int, hold: Any, work: Any, args: Any
) -> Any:
    global _server
    torch.set_num_threads(1)
    name = f"server{rank}" if rank < servers else f"worker{rank - servers}"
    if rank < servers:
        _server = hold()
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{scratch / 'rendezvous'}",
        rpc_timeout=TIMEOUT_S,
        num_worker_threads=max(2, workers),
    )
    start: Any = rpc.init_rpc  # torch has no types here
    start(name, rank=rank, world_size=servers + workers, rpc_backend_options=options)
    try:
        return work(rank - servers, *args) if rank >= servers else None
    finally:
        rpc.shutdown()


class _Hold:
    """Makes a server's values in its own process."""

    def __init__(self, size: int, dtype: torch.dtype, workers: int = 1) -> None:
        self._arguments = size, dtype, workers

    def __call__(self) -> Server:
        return Server(*self._arguments)


def _hold_names(load: Latency) -> Server:
    server = Server(0, torch.float32)
    server.parts = [torch.zeros(load.name_size) for _ in range(load.names)]
    return server


def dense(load: Dense, scratch: Path) -> dict[str, float]:
    """Pull from all servers at once, push to all at once and wait: RPC keeps no order."""
    hold = _Hold(load.part, torch.float64)
    spans = cluster(scratch, load.servers, load.workers, hold, _dense_worker, load, scratch)
    return {"per_s": per_second(spans, load.workers * load.steps)}


def _dense_worker(rank: int, load: Dense, scratch: Path) -> Span:
    names = [f"server{number}" for number in range(load.servers)]
    gradients = [torch.empty(load.part, dtype=torch.float64) for _ in names]

    def pull_all() -> list[torch.Tensor]:
        asked = [rpc.rpc_async(name, pull) for name in names]
        return [one.wait() for one in asked]

    def step() -> None:
        pull_all()
        for gradient in gradients:
            gradient.fill_(1.0)
        sent = [
            rpc.rpc_async(name, push, (gradient,))
            for name, gradient in zip(names, gradients, strict=True)
        ]
        torch.futures.wait_all(sent)

    gate = Gate(scratch, load.workers)
    span = run_together(gate, step, load.warm_steps, load.steps)
    gate.meet("end")
    if rank == 0 and not all((values == load.expected).all() for values in pull_all()):
        raise AssertionError(f"the values are not {load.expected}")
    return span


def latency(load: Latency, scratch: Path) -> dict[str, float]:
    """`rpc_sync` of one function that adds and returns the values."""
    figures: dict[str, float] = {}
    for name, size in (("small", load.small), ("large", load.large)):
        folder = fresh(scratch, name)
        hold = _Hold(size, torch.float32)
        figures |= cluster(folder, 1, 1, hold, _latency_worker, load, name, size)[0]
    folder = fresh(scratch, "names")
    hold = partial(_hold_names, load)
    figures["names"] = cluster(folder, 1, 1, hold, _names_worker, load)[0]
    folder = fresh(scratch, "workers")
    hold = _Hold(load.large, torch.float32)
    spans = cluster(folder, 1, load.workers, hold, _many_worker, load, folder)
    return figures | {"worker_calls": per_second(spans, load.workers * load.worker_calls)}


def _latency_worker(rank: int, load: Latency, name: str, size: int) -> dict[str, float]:
    gradient = torch.empty(size)
    step = {name: lambda: rpc.rpc_sync("server0", push_pull, (gradient,))}
    return latencies(load, name, step, {name: lambda: gradient.fill_(1.0)})


def _names_worker(rank: int, load: Latency) -> float:
    gradients = [torch.ones(load.name_size) for _ in range(load.names)]
    step = {"": lambda: rpc.rpc_sync("server0", push_pull_all, (gradients,))}
    return medians(step, load.name_calls, block=10)[""]


def _many_worker(rank: int, load: Latency, folder: Path) -> Span:
    gradient = torch.empty(load.large)

    def step() -> None:
        gradient.fill_(1.0)
        rpc.rpc_sync("server0", push_pull, (gradient,))

    return run_together(Gate(folder, load.workers), step, 20, load.worker_calls)


def mnist(load: Mnist, scratch: Path) -> dict[str, float]:
    """One call for each step, asynchronously and synchronously (`async_execution`)."""
    size = Trainer(load, 0).values.numel()
    count = load.workers * load.steps
    figures: dict[str, float] = {}
    for name, call in (("async", push_pull), ("sync", push_pull_sync)):
        if name not in load.ways:
            continue
        folder = fresh(scratch, name)
        hold = _Hold(size, torch.float32, load.workers)
        spans = cluster(folder, 1, load.workers, hold, _mnist_worker, load, call, folder)
        figures[f"{name}_per_s"] = per_second(spans, count)
    return figures


def _mnist_worker(rank: int, load: Mnist, call: Any, folder: Path) -> Span:
    trainer = Trainer(load, rank)

    def exchange() -> None:
        values = rpc.rpc_sync("server0", call, (trainer.gradients, -load.lr))
        trainer.values.copy_(values)

    gate = Gate(folder, load.workers)
    if rank == 0:
        rpc.rpc_sync("server0", assign, (trainer.values,))
    gate.meet("assigned")
    span = trainer.train(load, exchange, gate)
    gate.meet("end")
    expected = load.workers * (load.steps + load.warm_steps)
    if rpc.rpc_sync("server0", pushes) != expected:
        raise AssertionError(f"not {expected} pushes were applied")
    return span
