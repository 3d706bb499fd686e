"""Train a table that is four times as large as all the memory that a worker may have.

Rows live on the servers. A worker has those of its batch, so its memory does not depend on how large
the table is. Here each worker first forbids itself more than `--limit-mb` of address space
(RLIMIT_AS, which counts everything: Python, libraries, maps of shared memory), and shows that the
limit holds. Then they go over keys until the table is four times as large: each row learns values
that follow from its key.

    python examples/larger_than_worker.py --workers 1 --limit-mb 512

The server is another process and has no such limit: it needs the memory for the table.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape

import paramserve as ps
from arguments import count

DIM = 64
BATCH = 16_384
"""Keys of a batch: 4 MB of rows."""
TIMES = 4
"""How much larger than the limit the table gets."""
SAMPLE = 64
"""Every so many-th key is looked at again in the end."""


class Outcome(NamedTuple):
    """Of a worker: its limit holds; the table; and how far its rows still are from their goals."""

    peak_mb: float
    table_mb: float
    rows: int
    error_before: float
    error_after: float


def train(worker: ps.Worker, limit_mb: int) -> Outcome:
    """What each worker does. The limit is that of this process alone."""
    resource.setrlimit(resource.RLIMIT_AS, (limit_mb << 20, limit_mb << 20))
    check_limit(limit_mb)
    rule, init = ps.Adagrad(lr=0.5), ps.Normal(std=0.01)
    table = worker.client.table("rows", dim=DIM, rule=rule, init=init)
    seen: list[np.ndarray] = []
    for keys in batches(worker):
        gradients = table.pull(keys) - goals(keys)  # of half the squared distance
        table.push(keys, gradients).result()
        seen.append(keys[::SAMPLE])
        if table.memory_bytes() > TIMES * limit_mb << 20:
            break
    sample = np.concatenate(seen)
    before, after = np.square(goals(sample)).mean(), np.square(table.pull(sample) - goals(sample))
    peak_mb = address_space_mb()
    table_mb = table.memory_bytes() / 2**20
    return Outcome(peak_mb, table_mb, len(table), float(before), float(after.mean()))
