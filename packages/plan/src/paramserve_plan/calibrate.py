"""`paramserve plan --calibrate`: fit the model to this machine, predict another run, and run it.

Fitted to runs with 1 worker or 1 server; predicted, and then measured, is one with 4 workers and 2
servers. On one machine there are no links: workers and servers share memory and cores. So messages
cost processor time and a latency, bytes cost passes over memory, and passes of two processes at
once slow each other down. Each figure is the one with which the model repeats a measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paramserve.consistency.base import Policy
from paramserve.engine.local import Local
from paramserve.launch import run
from paramserve.machine import cores
from paramserve.rules.sgd import SGD
from paramserve.worker import Worker
from paramserve_plan.model import Model
from paramserve_plan.setting import Compute, Costs, Network, Setting
from paramserve_plan.show import in_bytes, in_seconds

ROUNDS_MIN, ROUNDS_MAX = 30, 1000
SECONDS = 2.0
"""About as long is measured for each size."""
BYTES_S = 1e9
"""A guess, for the number of rounds only."""


def measure(
    policy: Policy, workers: int, servers: int, sizes: Sequence[float], step_s: float = 0.0
) -> list[float]:
    """Seconds of a worker's step, by size: sleep for `step_s`, push and pull that many bytes.

    Returns:
        For each size the median over steps, averaged over the workers.
    """
    result = run(
        step_times,
        args=([max(1, int(each) // 4) for each in sizes], step_s),
        workers=workers,
        servers=servers,
        consistency=policy,
        engine=Local(threads_per_worker=1),
    )
    by_worker = [result.returns[rank] for rank in sorted(result.returns)]
    return [statistics.fmean(each) for each in zip(*by_worker, strict=True)]


def rounds_of(size: int, workers: int, step_s: float) -> int:
    """How many steps take about `SECONDS`."""
    guess_s = step_s + workers * (1e-4 + 4 * size / BYTES_S)
    return max(ROUNDS_MIN, min(ROUNDS_MAX, int(SECONDS / guess_s)))


def step_times(worker: Worker, sizes: Sequence[int], step_s: float) -> list[float]:
    """What each worker does: for each size (in float32) its median step."""
    client = worker.client
    for size in sizes:
        client.define(f"{size}", np.zeros(size, np.float32), rule=SGD(lr=0.01))
    found = []
    for size in sizes:
        name = f"{size}"
        rounds = rounds_of(size, worker.workers, step_s)
        taken = []
        end = time.perf_counter()
        for _ in range(rounds + max(3, rounds // 10)):
            if step_s:
                time.sleep(step_s)
            client.push_pull({name: client.gradient(name)}, tick=True, copy=False)
            start, end = end, time.perf_counter()
            taken.append(end - start)
        found.append(statistics.median(taken[-rounds:]))
    return found


def slept_s(step_s: float, rounds: int = 20) -> float:
    """What a sleep of `step_s` really takes."""
    if not step_s:
        return 0.0
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        time.sleep(step_s)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


SMALL_BYTES = 8 << 10
WORKERS, SHARDS = 4, 2
NO_LINK_GBPS = 1e6
CLOCKS = 60
ROUNDS = 3
"""Rounds of fitting messages and latency to each other."""
HALVINGS = 24
ENOUGH = 0.30
"""A prediction is good if it is off by no more than this."""
LATENCY_S = (1e-8, 1e-2)
MESSAGE_S = (1e-8, 1e-2)
BYTE_S = (1e-13, 1e-7)
CONTENTION = (1.0, 4.0)


class Fitted(NamedTuple):
    """This machine, as the model sees it."""

    cores: int
    latency_s: float
    message_s: float
    byte_s: float
    contention: float

    def setting(self, workers: int, shards: int, nbytes: float, step_s: float = 0.0) -> Setting:
        """A cluster on this machine."""
        return Setting(
            workers,
            shards,
            nbytes,
            Network(NO_LINK_GBPS, NO_LINK_GBPS, self.latency_s),
            Compute(step_s),
            Costs(self.message_s, self.byte_s, self.cores, self.contention),
        )

    def step_s(
        self, policy: Policy, workers: int, shards: int, nbytes: float, sleep_s: float = 0.0
    ) -> float:
        """What the model says that a step takes."""
        setting = self.setting(workers, shards, nbytes, sleep_s)
        return Model(setting, policy, clocks=CLOCKS).play().step_s


class Compared(NamedTuple):
    """One configuration, measured and modelled."""

    workers: int
    shards: int
    nbytes: float
    sleep_s: float
    measured_s: float
    modelled_s: float
    fitted: str
    """What was fitted to it; empty: nothing, it is the prediction."""

    @property
    def off(self) -> float:
        """Part of the measured time by which the model is off."""
        return self.modelled_s / self.measured_s - 1.0


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found. The last line is the prediction."""

    fitted: Fitted
    lines: Sequence[Compared]

    @property
    def predicted(self) -> Compared:
        """The configuration to which nothing was fitted."""
        return self.lines[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "fitted": self.fitted._asdict(),
            "lines": [each._asdict() | {"off": each.off} for each in self.lines],
            "predicted_s": self.predicted.modelled_s,
            "measured_s": self.predicted.measured_s,
            "off": self.predicted.off,
        }


def calibrate(policy: Policy, model_bytes: float, step_s: float) -> Calibration:
    """Measure, fit, predict, and measure what was predicted.

    Args:
        model_bytes: of the predicted run.
        step_s: that its workers sleep instead of computing.
    Raises:
        ValueError: the policy makes own steps, of which a run without a model has none.
    """
    if hasattr(policy, "every"):
        raise ValueError(f"--calibrate cannot run {policy!r}: a policy without own steps, please")
    policy.check(WORKERS)
    sizes = (SMALL_BYTES, model_bytes)
    small_1, large_1 = measure(policy, 1, 1, sizes)
    small_4, large_4 = measure(policy, WORKERS, 1, sizes)
    (split,) = measure(policy, 1, SHARDS, [model_bytes])
    sleep_s = slept_s(step_s)
    fitted = fit(policy, model_bytes, Measured(small_1, small_4, large_1, large_4, split), cores())
    predicted_s = fitted.step_s(policy, WORKERS, SHARDS, model_bytes, sleep_s)
    (measured_s,) = measure(policy, WORKERS, SHARDS, [model_bytes], step_s)
    lines = [
        Compared(workers, shards, nbytes, 0.0, found_s, 0.0, what)
        for workers, shards, nbytes, found_s, what in (
            (1, 1, SMALL_BYTES, small_1, "latency"),
            (WORKERS, 1, SMALL_BYTES, small_4, "message"),
            (1, 1, model_bytes, large_1, "contention"),
            (WORKERS, 1, model_bytes, large_4, "byte"),
            (1, SHARDS, model_bytes, split, "contention"),
        )
    ]
    lines = [
        each._replace(modelled_s=fitted.step_s(policy, each.workers, each.shards, each.nbytes))
        for each in lines
    ]
    last = Compared(WORKERS, SHARDS, model_bytes, step_s, measured_s, predicted_s, "")
    return Calibration(fitted, [*lines, last])


class Measured(NamedTuple):
    """Seconds of a step in the runs to which the model is fitted.

    A few bytes, and the model's bytes, with 1 and with 4 workers; the model's bytes with 1 worker
    and 2 servers.
    """

    small_1_s: float
    small_4_s: float
    large_1_s: float
    large_4_s: float
    split_s: float


def fit(policy: Policy, model_bytes: float, measured: Measured, cores: int) -> Fitted:
    """The machine with which the model repeats these measurements, as far as it can."""
    fitted = Fitted(cores, measured.small_1_s / 10, measured.small_1_s / 10, 1e-10, 1.0)

    def solved(name: str, bounds: tuple[float, float], goal_s: float, *run: Any) -> Fitted:
        def having(value: float) -> Fitted:
            changed: Any = {name: value}
            return fitted._replace(**changed)

        return having(solve(lambda value: having(value).step_s(policy, *run), goal_s, bounds))

    for _ in range(ROUNDS):
        fitted = solved("message_s", MESSAGE_S, measured.small_4_s, WORKERS, 1, SMALL_BYTES)
        fitted = solved("latency_s", LATENCY_S, measured.small_1_s, 1, 1, SMALL_BYTES)
    fitted = solved("byte_s", BYTE_S, measured.large_4_s, WORKERS, 1, model_bytes)
    # What two servers gain over one is what counts, not how well the pass fits a single worker.
    alone_s = fitted.step_s(policy, 1, 1, model_bytes)
    goal_s = alone_s * measured.split_s / measured.large_1_s
    return solved("contention", CONTENTION, goal_s, 1, SHARDS, model_bytes)


def solve(rises: Callable[[float], float], goal: float, bounds: tuple[float, float]) -> float:
    """Point where a rising function reaches a goal, or the nearer bound; by halving ratios."""
    low, high = bounds
    if rises(low) >= goal:
        return low
    if rises(high) <= goal:
        return high
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        if rises(middle) < goal:
            low = middle
        else:
            high = middle
    return sqrt(low * high)


def show_calibration(name: str, found: Calibration, console: Console) -> None:
    fitted = found.fitted
    table = Table("workers x servers", box=SIMPLE, title=f"{name} on {fitted.cores} cores")
    for column in ("bytes", "compute", "measured", "modelled", "off", "used for"):
        table.add_column(column, justify="right")
    for each in found.lines:
        last = each is found.predicted
        table.add_row(
            f"{each.workers} x {each.shards}",
            in_bytes(each.nbytes),
            in_seconds(each.sleep_s) if each.sleep_s else "",
            in_seconds(each.measured_s),
            in_seconds(each.modelled_s),
            f"{each.off:+.0%}",
            "prediction" if last else each.fitted,
        )
    console.print(table)
    console.print(
        f"Fitted: a message {in_seconds(fitted.message_s)} and {in_seconds(fitted.latency_s)} on "
        f"its way, a pass over memory {1e-9 / fitted.byte_s:.3g} GB/s, "
        f"{fitted.contention:.2f} times slower while another core works.",
        highlight=False,
        soft_wrap=True,
    )
    last_line = found.predicted
    console.print(
        f"Predicted {in_seconds(last_line.modelled_s)}, measured {in_seconds(last_line.measured_s)}"
        f": {last_line.off:+.0%}, {'within' if abs(last_line.off) <= ENOUGH else 'NOT within'} "
        f"{ENOUGH:.0%}.",
        highlight=False,
    )
