"""100 MB of float64 over K servers: N workers push it and pull it, timed for several K and N.

Each server adds up its own part of the vector, so more of them help even on one machine, as long as
it has cores for them and its memory keeps up.

    python examples/sharded_100mb.py --servers 1,2,4 --workers 1,2,4
    python examples/sharded_100mb.py --sync
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import paramserve as ps
from arguments import count, counts
from ending import exit_code
from engines import ENGINES, engine_of
from meeting import meet

MB = 1_000_000
LINK_BITS_PER_S = 10e9
SHARDS = 100
"""How many the arithmetic at the end spreads the vector over."""


class Measured(NamedTuple):
    """One row of the table."""

    servers: int
    workers: int
    updates_per_s: float
    gb_per_s: float


def train(worker: ps.Worker, size: int, steps: int) -> tuple[float, float]:
    """What each worker does; returns when it began and ended its steps."""
    client = worker.client
    client.define("vector", np.zeros(size), rule=ps.Add())
    step(client)  # the first one also makes the shared memory
    meet(worker)
    began = time.time()
    for _ in range(steps):
        step(client)
    return began, time.time()


def step(client: ps.Client) -> None:
    """Push ones and read the values after that; neither is copied on its way."""
    gradient = client.gradient("vector")
    gradient.fill(1.0)
    client.push_pull({"vector": gradient}, tick=True, copy=False)


def measure(servers: int, workers: int, options: argparse.Namespace) -> Measured:
    """One run, checked: every number of the vector counts all pushes."""
    size = options.megabytes * MB // 8
    result = ps.run(
        train,
        args=(size, options.steps),
        workers=workers,
        servers=servers,
        consistency=ps.Sync(reduce="sum") if options.sync else ps.Async(),
        engine=engine_of(options.engine),
    )
    expected = workers * (options.steps + 1)
    values = np.asarray(result.state_dict("default")["vector"])
    if not (values == expected).all():
        raise AssertionError(f"the vector is not {expected} everywhere: {values}")
    began, ended = zip(*result.returns.values(), strict=True)
    updates_per_s = workers * options.steps / (max(ended) - min(began))
    both_ways = 2 * options.megabytes * MB
    return Measured(servers, workers, updates_per_s, updates_per_s * both_ways / 1e9)


def table(rows: Sequence[Measured], options: argparse.Namespace) -> Table:
    """One row for each K and N."""
    policy = "sync" if options.sync else "async"
    title = f"{options.megabytes} MB of float64, {policy}, {options.steps} steps of each worker"
    found = Table(title=title, title_justify="left")
    for column in ("servers", "workers", "updates per second", "GB/s, both ways"):
        found.add_column(column, justify="right")
    for row in rows:
        speed, traffic = f"{row.updates_per_s:,.1f}", f"{row.gb_per_s:,.2f}"
        found.add_row(str(row.servers), str(row.workers), speed, traffic)
    return found


def arithmetic(workers: int, megabytes: int) -> str:
    """Why one shards over machines: what one step takes on links of 10 Gb/s each."""
    own_s = 8 * megabytes * MB / LINK_BITS_PER_S
    one_s = workers * own_s
    many_s = one_s / SHARDS
    limit = "a worker's own link sets" if own_s > many_s else "the servers' links set"
    return (
        f"On machines of their own with links of 10 Gb/s, {workers} workers with {megabytes} MB "
        f"each bring {workers * megabytes:,} MB to the servers in one step. One server takes "
        f"{one_s * 1e3:,.1f} ms to receive that (its values go out meanwhile, the other way). "
        f"{SHARDS} shards on {SHARDS} machines receive {workers * megabytes / SHARDS:g} MB each, "
        f"in {many_s * 1e3:,.1f} ms. {own_s * 1e3:,.1f} ms is what a worker needs to send its "
        f"part, so with {SHARDS} shards {limit} the pace: a step is "
        f"{one_s / max(own_s, many_s):,.1f} times as fast as with one server."
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=count, default=100)
    add("--servers", type=counts, default=[1, 2, 4], help="several (default 1,2,4)")
    add("--workers", type=counts, default=[1, 2, 4], help="several (default 1,2,4)")
    add("--steps", type=count, default=5, help="of each worker (default 5)")
    add("--sync", action="store_true", help="all workers' gradients together, in step")
    add("--engine", choices=ENGINES, default="local")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Run every K with every N, print the table and the arithmetic."""
    options = parse(argv)
    console = Console()
    pairs = [(servers, workers) for servers in options.servers for workers in options.workers]
    rows = [measure(servers, workers, options) for servers, workers in pairs]
    console.print(table(rows, options))
    console.print(arithmetic(max(options.workers), options.megabytes))


if __name__ == "__main__":
    raise SystemExit(main())
