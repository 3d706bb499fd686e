"""Who runs where on a Ray cluster: servers spread over nodes, workers on nodes that suit them.

    python examples/placement.py                                # on a simulated cluster of 4 nodes
    python examples/placement.py --address auto --resource GPU  # on yours, workers on GPUs

The simulated nodes are processes of this machine. Two of them have the custom resource "trainer",
as nodes of yours may have "spot" or a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import ray

import paramserve as ps
from arguments import count

STORE_BYTES = 100_000_000
"""Bytes of each simulated node's store; nothing of ours lies in Ray's object store."""


def train(worker: ps.Worker, steps: int) -> str:
    """Push ones; returns the node that this worker runs on."""
    worker.client.define("vector", np.zeros(10), rule=ps.Add())
    for _ in range(steps):
        worker.client.push("vector", np.ones(10))
    return str(ray.get_runtime_context().get_node_id())


@contextlib.contextmanager
def simulated() -> Iterator[str]:
    """A Ray cluster of four nodes on this machine; gives its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=False)
    try:
        for resources in ({}, {}, {"trainer": 1}, {"trainer": 1}):
            cluster.add_node(
                num_cpus=2,
                resources=resources,
                object_store_memory=STORE_BYTES,
                include_dashboard=False,
            )
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def run(address: str, options: argparse.Namespace) -> None:
    """Two spread servers, and workers where the resource is."""
    gpu = options.resource == "GPU"
    needs = ps.Needs(num_gpus=1) if gpu else ps.Needs(resources={options.resource: 1})
    engine = ps.OnRay(address, servers="spread", workers="anywhere", worker=needs)
    ray.init(address, log_to_driver=True, logging_level="warning", ignore_reinit_error=True)
    for node in ray.nodes():
        shown = {k: v for k, v in node["Resources"].items() if k in ("CPU", "GPU", "trainer")}
        print(f"node {node['NodeID'][:8]}: {shown}")
    job = ps.start(
        train,
        args=(options.steps,),
        workers=options.workers,
        servers=options.servers,
        consistency=ps.Async(),
        engine=engine,
    )
    job.handle()  # returns when the servers are up
    for group in ray.util.placement_group_table().values():
        if group["state"] == "CREATED":
            for bundle, node in sorted(group["bundles_to_node_id"].items()):
                print(f"room for {group['bundles'][bundle]} on node {node[:8]}")
    result = job.wait()
    for rank, node in sorted(result.returns.items()):
        print(f"worker {rank} ran on node {node[:8]}")
    print("the vector at the end:", result.state_dict("default")["vector"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--address", help="of a Ray cluster; default: a simulated one")
    add("--resource", default="trainer", help="where workers run: GPU, or a custom resource")
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=2)
    add("--steps", type=count, default=10, help="of each worker (default 10)")
    options = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        address = options.address
        run(address if address is not None else stack.enter_context(simulated()), options)


if __name__ == "__main__":
    main()
