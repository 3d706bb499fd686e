"""What reporters cost: steps a second of a run with all of them, against one without; and a scrape.

A run of two workers that log a number every 10 steps; pairs of runs, one after the other. With
`--width 256` a step takes less than a millisecond, so that hundreds of numbers are logged a second.

    python -m benchmarks.reporting --pairs 3
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import paramserve as ps
from paramserve.observe.metrics import Monotonic
from paramserve.observe.status import GroupStatus, RunStatus, ServerLoad, Staleness, WorkerLoad
from paramserve.reporters import Prometheus, Report, RunInfo

WORKERS, LOG_EVERY, SCRAPES, MANY = 2, 10, 200, 64


def train(worker: ps.Worker, seconds: float, width: int) -> float:
    """Steps a second, once the first ones are over."""
    torch.set_num_threads(1)
    torch.manual_seed(worker.rank)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    model.append(nn.Linear(width, 10))
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))
    steps, began = 0, 0.0
    while not began or time.perf_counter() - began < seconds:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % LOG_EVERY == 0:
            worker.log(loss=loss)
        if not began and steps == 50:
            steps, began = 0, time.perf_counter()
    return steps / (time.perf_counter() - began)


@contextlib.contextmanager
def all_reporters() -> Iterator[list[Any]]:
    """Each one, writing to a folder that goes again; without a network."""
    os.environ |= {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            yield [
                ps.CSV(folder / "loss.csv"),
                ps.HTML(folder / "report"),
                ps.TensorBoard(folder / "tensorboard"),
                ps.Prometheus(port=0),
                ps.WandB(project="benchmark", dir=str(folder)),
                ps.MLflow("benchmark", tracking_uri=str(folder / "mlflow")),
            ]
        finally:
            import_module("wandb").teardown()  # its process, which ends with this one else


def speed(seconds: float, width: int, reporters: Sequence[Any]) -> float:
    given = seconds, width
    done = ps.run(
        train, args=given, workers=WORKERS, consistency=ps.Async(), report_to=[*reporters]
    )
    return sum(done.returns.values())


def scrape_s() -> list[float]:
    """Seconds of a scrape of `MANY` workers and 8 servers, over loopback, as Prometheus does it."""
    ranks = range(MANY)
    stale = {rank: Staleness(100, 1.5, 4) for rank in ranks}
    group = GroupStatus(9, 3, 9, 0, Staleness(6400, 1.5, 4), staleness_by_rank=stale)
    status = RunStatus(
        "running",
        1.0,
        dict.fromkeys(ranks, "running"),
        {"model": group},
        {"loss": 0.5},
        loads=dict.fromkeys(ranks, WorkerLoad(10.0, 2.0, 0.0, 1 << 28, 0.5)),
        servers=dict.fromkeys(range(8), ServerLoad(1 << 20, 0, 9, 0, MANY, 1 << 27)),
    )
    reporter = Prometheus(port=0)
    reporter.open(RunInfo("train", MANY, 8, "Async()", 1))
    reporter.report(Report(status, Monotonic().samples(status), []))
    took = []
    try:
        for _ in range(SCRAPES):
            began = time.perf_counter()
            with urllib.request.urlopen(f"http://{reporter.address}/metrics", timeout=10) as page:
                page.read()
            took.append(time.perf_counter() - began)
    finally:
        reporter.close()
    return took


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run")
    parser.add_argument("--width", type=int, default=1024, help="of the model's layers")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    options = parser.parse_args(argv)
    pairs, seconds = (1, 0.5) if options.tiny else (options.pairs, options.seconds)
    ratios, speeds = [], []
    for _ in range(pairs):
        without = speed(seconds, options.width, [])
        with all_reporters() as reporters:
            reporting = speed(seconds, options.width, reporters)
        speeds.append((without, reporting))
        ratios.append(reporting / without)
    took = sorted(scrape_s())
    table = Table("figure", "median", "of each", title="What reporters cost")
    told = ", ".join(f"{b:,.0f} of {a:,.0f}" for a, b in speeds)
    table.add_row("steps a second with all reporters", f"{median(ratios):.1%}", told)
    slow = f"slowest of 100: {took[int(len(took) * 0.99)] * 1e3:.1f} ms"
    table.add_row(f"a scrape of {MANY} workers", f"{median(took) * 1e3:.1f} ms", slow)
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
