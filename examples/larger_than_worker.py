"""Train a table that is four times as large as all the memory that a worker may have.

Rows live on the servers. A worker has those of its batch, so its memory does not depend on the size
of the table. Here each worker first forbids itself more than `--limit-mb` of address space
(RLIMIT_AS, which counts everything: Python, libraries, maps of shared memory) and sees that the
limit holds. Then it goes over new keys until the table is four times as large. Each row learns the
64 bits of its key.

    python examples/larger_than_worker.py --workers 1 --limit-mb 1024

The servers have no such limit: between them they need the memory for the table.
"""

from __future__ import annotations

import argparse
import itertools
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

import paramserve as ps
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of

BITS = 64
"""Bits of a key, and the width of a row."""
BATCH = 8_192
"""Keys of a batch: 2 MB of rows."""
TIMES = 4
"""How much larger than the limit the table gets."""
SAMPLE = 512
"""Every so many-th key is looked at again in the end."""
ODD = np.uint64(0x9E3779B97F4A7C15)
"""Makes keys with many different bits of 0, 1, 2, ..."""


class Outcome(NamedTuple):
    """Outcome of a worker: what it had of its limit, and the state of the table."""

    peak_mb: float
    table_mb: float
    rows: int
    right: float
    """Share of the bits of sampled keys that their rows tell."""


def train(worker: ps.Worker, limit_mb: int) -> Outcome:
    """What each worker does. The limit is that of this process alone."""
    limit(limit_mb)
    table = worker.client.table("rows", dim=BITS, rule=ps.Adagrad(lr=0.5))
    seen = []
    for keys in batches(worker):
        rows = table.pull(keys)
        table.push(keys, rows - goals(keys)).result()  # the gradient of half the squared distance
        seen.append(keys[::SAMPLE])
        if table.memory_bytes() > TIMES * limit_mb << 20:
            break
    sample = np.concatenate(seen)
    right = np.mean((table.pull(sample) > 0) == (goals(sample) > 0))
    return Outcome(peak_mb(), table.memory_bytes() / 2**20, len(table), float(right))


def limit(megabytes: int) -> None:
    """Forbid this process more address space than that, and see that it is forbidden."""
    size = megabytes << 20
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    try:
        np.empty(size, np.uint8)
    except MemoryError:
        return
    raise ps.ParamServeError(
        f"this process may take {megabytes} MB, its limit, once more",
        fix="run the example where RLIMIT_AS is kept, as on Linux",
    )


def batches(worker: ps.Worker) -> Iterator[np.ndarray]:
    """New keys without an end, others for each worker."""
    for number in itertools.count(worker.rank, worker.workers):
        first = number * BATCH
        yield (np.arange(first, first + BATCH, dtype=np.uint64) * ODD).view(np.int64)


def goals(keys: np.ndarray) -> np.ndarray:
    """Rows that tell their keys' bits, float32 [n, 64]: 0.5 for 1 and -0.5 for 0."""
    bits = np.unpackbits(keys.view(np.uint8).reshape(-1, 8), axis=1)
    return bits.astype(np.float32) - 0.5


def peak_mb() -> float:
    """The most address space that this process has had."""
    found = re.search(r"VmPeak:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says it"
    return int(found[1]) / 1024


def show(outcomes: list[Outcome], options: argparse.Namespace, console: Console) -> None:
    last = max(outcomes, key=lambda each: each.rows)
    for rank, each in enumerate(outcomes):
        console.print(
            f"worker {rank}: limit {options.limit_mb:,} MB of address space, at most "
            f"{each.peak_mb:,.0f} MB taken; {each.right:.1%} of the bits learned"
        )
    console.print(
        f"table: {last.rows:,} rows, {last.table_mb:,.0f} MB on {options.servers} servers: "
        f"{last.table_mb / options.limit_mb:.1f} times the limit"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=count, default=1)
    add("--servers", type=count, default=1)
    add("--engine", choices=ENGINES, default="local")
    add("--limit-mb", type=count, default=1024, help="of each worker (default 1,024)")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train, and print the table's size beside the workers'."""
    options = parse(argv)
    console = Console()
    result = ps.run(
        train,
        args=(options.limit_mb,),
        workers=options.workers,
        servers=options.servers,
        engine=engine_of(options.engine),
        consistency=ps.Async(),
    )
    show([Outcome(*each) for each in result.returns.values()], options, console)


if __name__ == "__main__":
    raise SystemExit(main())
