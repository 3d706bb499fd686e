"""Every benchmark in one go, as one table in runs/bench.md and runs/bench.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import (
    bench_checkpoints,
    bench_dense_100mb,
    bench_large_step,
    bench_latency,
    bench_memory,
    bench_mnist,
    bench_policies,
    bench_ray_engine,
    bench_start,
    bench_tables,
    bench_tcp,
    bench_tutorials,
    bench_waiting,
    harness,
)

BENCHMARKS = (
    bench_dense_100mb,
    bench_latency,
    bench_waiting,
    bench_policies,
    bench_large_step,
    bench_mnist,
    bench_memory,
    bench_start,
    bench_tcp,
    bench_tables,
    bench_checkpoints,
    bench_ray_engine,
    bench_tutorials,
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not any(one.startswith("--out") for one in arguments):
        arguments += ["--out", str(harness.ROOT / "runs")]
    return harness.main(arguments, __doc__, [one.measure for one in BENCHMARKS])


if __name__ == "__main__":
    raise SystemExit(main())
