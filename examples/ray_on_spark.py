"""A sharded parameter server on Spark: Spark starts a Ray cluster on its executors, Ray the rest.

Nothing in paramserve knows of Spark; `ps.OnRay()` sees a Ray cluster like any other.

    pip install 'paramserve[ray]' 'ray[client]' 'pyspark>=3.3'   # and a JVM
    python examples/ray_on_spark.py --master 'local[2]'
    python examples/ray_on_spark.py --master yarn --nodes 4 --cpus-per-node 4 --head-cpus 0

The environment's `bin` folder must be in PATH on every node: Spark looks for `ray` there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray
from pyspark.sql import SparkSession
from ray.util.spark import setup_ray_cluster, shutdown_ray_cluster

import paramserve as ps
from arguments import count


@contextmanager
def ray_on_spark(options: argparse.Namespace) -> Iterator[None]:
    """A Ray cluster with one node in each Spark task, and this process connected to it."""
    # Spark's tasks run "python3" of the PATH unless told otherwise; they need this one's packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder: Any = SparkSession.builder
    spark = (
        builder.appName("paramserve")
        .master(options.master)
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    try:
        sized: dict[str, int] = {"num_cpus_head_node": options.head_cpus}
        if options.cpus_per_node is not None:  # Spark wants both, and in local mode neither
            sized |= {"num_cpus_worker_node": options.cpus_per_node, "num_gpus_worker_node": 0}
        setup_ray_cluster(max_worker_nodes=options.nodes, **sized)
        try:
            ray.init()  # finds the cluster in RAY_ADDRESS, which has just been set
            yield
        finally:
            ray.shutdown()
            shutdown_ray_cluster()
    finally:
        spark.stop()


def train(worker: ps.Worker, size: int, steps: int) -> None:
    """What each worker does: push ones, and read the values after that."""
    client = worker.client
    client.define("vector", np.zeros(size), rule=ps.Add())
    for _ in range(steps):
        client.push_pull({"vector": np.ones(size)}, tick=True)


def run(options: argparse.Namespace) -> None:
    """Count all pushes in a vector that is spread over the servers, and check the count."""
    result = ps.run(
        train,
        args=(options.size, options.steps),
        workers=options.workers,
        servers=options.servers,
        consistency=ps.Async(),
        engine=ps.OnRay(),
    )
    vector = np.asarray(result.state_dict("default")["vector"])
    expected = options.workers * options.steps
    if not (vector == expected).all():
        raise AssertionError(f"the vector is not {expected} everywhere: {vector}")
    print(f"{options.servers} servers counted {expected} pushes of {vector.nbytes / 1e6:g} MB each")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--master", default="local[2]", help="local[N] or yarn (default local[2])")
    add("--nodes", type=count, default=2, help="Ray nodes, one per Spark task (default 2)")
    add("--cpus-per-node", type=count, help="needs Spark 3.4; not in local mode, where it is 1")
    add("--head-cpus", type=int, default=4, help="that Ray may use where this runs (default 4)")
    add("--servers", type=count, default=2)
    add("--workers", type=count, default=2)
    add("--size", type=count, default=1_000_000, help="of the vector (default 1000000)")
    add("--steps", type=count, default=20, help="of each worker (default 20)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with ray_on_spark(options):
        try:
            run(options)
        except ps.ParamServeError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
