"""Every tutorial's workload: ours by the examples' own training functions, and the plain programs.

Figures are per second over all workers: pushes of the vector, updates of the sharded one, steps of
the models. Each contestant does all of them, one after the other; plain RPC only MNIST. What needs
torch is imported late: the vectors' workers do without.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import paramserve as ps
import sharded_100mb
import vector
from benchmarks.workloads import Gate, Span, fresh, per_second

WORKERS = 2
BATCH_SIZE = 128
LR = 0.01


@dataclass(frozen=True)
class Load:
    """How much of each, for two workers.

    The digits take MNIST's place: speed does not depend on what the images show, nor on what the
    text of the language model says.
    """

    digits: Path
    policies: tuple[str, ...] = ("sync", "async")
    vector_steps: int = 2_000
    vector_servers: tuple[int, ...] = (1, 2)
    warm_steps: int = 50
    megabytes: int = 100
    sharded_steps: int = 5
    sharded_servers: int = 2
    mnist_steps: int = 400
    language_steps: int = 8
    sizes: tuple[int, int, int] = 10_000, 256, 512
    """Sizes of the language model: vocabulary, embedding, hidden."""
    words: int = 100_000
    length: int = 20
    pieces: int = 20

    def text(self) -> np.ndarray:
        """Words drawn at random."""
        chance = np.random.default_rng(0)
        return chance.integers(self.sizes[0], size=self.words, dtype=np.int32)


def local(load: Load, scratch: Path) -> dict[str, float]:
    """Ours, on the Local engine."""
    return _ours(load, scratch, ps.Local(threads_per_worker=1))


def on_ray(load: Load, scratch: Path) -> dict[str, float]:
    """Ours, on a Ray cluster of this machine."""
    from benchmarks.tutorials.quiet import ray_session

    with ray_session():
        return _ours(load, scratch, ps.OnRay(server=ps.Needs(num_cpus=0), threads_per_worker=1))


def plain_ray(load: Load, scratch: Path) -> dict[str, float]:
    """The programs in plain Ray."""
    from benchmarks.tutorials import language_model_ray, mnist_ray, sharded_ray, vector_ray
    from benchmarks.tutorials.quiet import ray_session
    from language_model import Sizes

    figures = {}
    with ray_session():
        for servers in load.vector_servers:
            figures[f"vector_{servers}"] = vector_ray.pushes_per_s(
                servers, load.vector_steps, load.warm_steps
            )
        for policy in load.policies:
            figures[f"sharded_{policy}"] = sharded_ray.measure(
                load.sharded_servers, WORKERS, load.megabytes, load.sharded_steps, policy == "sync"
            )
        for policy in load.policies:
            figures[f"mnist_{policy}"], _ = mnist_ray.measure(
                policy, WORKERS, load.digits, load.mnist_steps, BATCH_SIZE, LR
            )
        figures["language"], _ = language_model_ray.measure(
            WORKERS,
            load.text(),
            Sizes(*load.sizes),
            load.language_steps,
            load.length,
            load.pieces,
            LR,
        )
    return figures


def plain_rpc(load: Load, scratch: Path) -> dict[str, float]:
    """The program in plain RPC."""
    from benchmarks.tutorials import mnist_rpc
    from benchmarks.tutorials.quiet import loopback

    loopback()
    figures = {}
    with mnist_rpc.members(WORKERS):
        for policy in load.policies:
            figures[f"mnist_{policy}"], _ = mnist_rpc.measure(
                policy, WORKERS, load.digits, load.mnist_steps, BATCH_SIZE, LR
            )
    return figures


def _ours(load: Load, scratch: Path, engine: Any) -> dict[str, float]:
    import language_model
    import mnist

    figures = {}
    for servers in load.vector_servers:
        folder = fresh(scratch, f"vector{servers}")
        spans = _run(engine, ps.Async(), servers, _vector, load, folder).returns
        figures[f"vector_{servers}"] = _rate(spans, load.vector_steps)
    known = {"sync": ps.Sync(reduce="sum"), "async": ps.Async()}
    policies = {name: known[name] for name in load.policies}
    size = load.megabytes * sharded_100mb.MB // 8
    for name, policy in policies.items():
        train = sharded_100mb.train, size, load.sharded_steps
        spans = _run(engine, policy, load.sharded_servers, *train).returns
        figures[f"sharded_{name}"] = _rate(spans, load.sharded_steps)
    for name, policy in policies.items():
        train = mnist.train, load.digits, load.mnist_steps, BATCH_SIZE, LR
        figures[f"mnist_{name}"] = _rate(_run(engine, policy, 1, *train).returns, load.mnist_steps)
    sizes = language_model.Sizes(*load.sizes)
    options = Namespace(
        lr=LR, length=load.length, batch_size=load.pieces, steps=load.language_steps + 1
    )
    result = _run(engine, ps.Async(), 1, language_model.train, load.text(), sizes, options)
    figures["language"] = _logged_per_s(result.metrics)
    return figures


def _run(engine: Any, policy: Any, servers: int, train: Any, *args: Any) -> ps.Result:
    return ps.run(
        train,
        args=args,
        workers=WORKERS,
        servers=servers,
        engine=engine,
        consistency=policy,
    )


def _vector(worker: ps.Worker, load: Load, folder: Path) -> Span:
    """The example's function without a pause, timed until all its pushes are applied."""
    vector.train(worker, load.warm_steps, 0.0)
    worker.client.pull("vector")
    gate = Gate(folder, worker.workers)
    gate.meet("begin")
    began = time.monotonic()
    vector.train(worker, load.vector_steps, 0.0)
    worker.client.pull("vector")  # a worker reads its own writes
    ended = time.monotonic()
    gate.meet("end")
    expected = worker.workers * (load.warm_steps + load.vector_steps)
    if not (worker.client.pull("vector") == expected).all():
        raise AssertionError(f"not {expected} pushes were applied")
    gate.meet("checked")
    return began, ended


def _rate(spans: dict[int, Span], steps: int) -> float:
    return per_second(list(spans.values()), len(spans) * steps)


def _logged_per_s(records: Sequence[Any]) -> float:
    """Steps a second by the workers' logs, without the first step of each."""
    first = {rank: min(r.time_s for r in records if r.rank == rank) for rank in range(WORKERS)}
    later = [record.time_s for record in records if record.time_s > first[record.rank]]
    return len(later) / (max(later) - min(first.values()))
