"""What one `push_pull` takes on this machine, beside memcpy in the same run. Needs no rival.

python -m benchmarks.push_pull
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import paramserve as ps


class Case(NamedTuple):
    """How much to send, and how often."""

    name: str
    nbytes: int
    rounds: int


CASES = (Case("8 KB", 8 << 10, 5_000), Case("1 MB", 1 << 20, 1_000), Case("100 MB", 100 << 20, 20))
TINY = (Case("8 KB", 8 << 10, 100), Case("1 MB", 1 << 20, 10))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a second, to see that it works")
    tiny = parser.parse_args(argv).tiny
    table = Table("float32", "push_pull, median", "99%", "GB/s both ways", "of two memcpys")
    with ps.Cluster(servers=1) as cluster:
        client = cluster.client()
        for case in TINY if tiny else CASES:
            table.add_row(*measure(client, case))
    Console().print(table)


def measure(client: ps.Client, case: Case) -> tuple[str, ...]:
    """One row: the gradient is in `client.gradient`, the values stay in their slot."""
    name, size = case.name, case.nbytes // 4
    client.define(name, np.zeros(size, np.float32), rule=ps.SGD(lr=0.01))

    def push_pull() -> None:
        client.push_pull({name: client.gradient(name)}, copy=False)

    def fill() -> None:
        client.gradient(name)[...] = 0.5

    source, target = np.ones(size, np.float32), np.ones(size, np.float32)
    copied_s = statistics.median(_timed(lambda: np.copyto(target, source), case.rounds))
    taken_s = sorted(_timed(push_pull, case.rounds, before=fill))
    median_s = statistics.median(taken_s)
    return (
        name,
        _shown(median_s),
        _shown(taken_s[int(0.99 * len(taken_s))]),
        f"{2 * case.nbytes / median_s / 1e9:.1f}",
        f"{2 * copied_s / median_s:.0%}",
    )


def _timed(
    call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None
) -> list[float]:
    """Seconds that each round took, after some to warm up; `before` is not counted."""
    seconds = []
    for _ in range(rounds + max(3, rounds // 10)):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[-rounds:]


def _shown(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


if __name__ == "__main__":
    main()
