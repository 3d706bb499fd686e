"""One update of each compiled rule over 100 MB of float32 on one core, against torch's kernels.

The rivals are torch's own: foreach, and fused where a class has it. Each pair is timed in turns, so
that both meet the same machine. The last column is the rule's traffic, in bytes that have to be
moved for each element, divided by its time: what memory gave.

    python -m benchmarks.rules_dense --rounds 7
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paramserve.rules import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Lion,
    NAdam,
    PushInfo,
    RMSprop,
    Run,
)

SIZE = 25_000_000
"""Elements: 100 MB."""
PUSH = PushInfo(0, 0, 0, 0, 1.0, 1.0)
CASES: list[tuple[Any, dict[str, Any] | None]] = [
    (SGD(lr=0.01), {"lr": 0.01}),
    (SGD(lr=0.01, momentum=0.9), {"lr": 0.01, "momentum": 0.9}),
    (Adam(), {}),
    (Adagrad(), {}),
    (RMSprop(), {}),
    (RMSprop(momentum=0.9, centered=True), {"momentum": 0.9, "centered": True}),
    (Adadelta(), {}),
    (Adamax(), {}),
    (NAdam(), {}),
    (Lion(), None),
    (LAMB(), None),
    (FTRL(), None),
]
"""Rules, and the options of torch's class of this name; None: torch has none."""


def ours(
    rule: Any, value: np.ndarray[Any, Any], gradient: np.ndarray[Any, Any]
) -> Callable[[], None]:
    rule.prepare(value.dtype)
    state, hyper, count = rule.init_state(value.size, value.dtype), rule.hyper(), 0

    def step() -> None:
        nonlocal count
        rule.apply(value, gradient, state, hyper, [Run(0, value.size, count, (value.size,))], PUSH)
        count += 1

    return step


def torchs(name: str, options: dict[str, Any], value: Any, gradient: Any) -> Callable[[], None]:
    param = torch.nn.Parameter(torch.from_numpy(value))
    param.grad = torch.from_numpy(gradient)
    optimizer: Any = getattr(torch.optim, name)([param], **options)
    return lambda: optimizer.step()


def rivals(name: str, options: dict[str, Any], gradient: Any) -> dict[str, Callable[[], None]]:
    found = {}
    for way in ("foreach", "fused"):
        try:
            step = torchs(name, {**options, way: True}, np.ones(SIZE, np.float32), gradient)
            step()
        except (TypeError, RuntimeError, ValueError):
            continue
        found[way] = step
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
    table = Table(title=f"ms for {SIZE * 4 / 1e6:.0f} MB, one core, medians of {rounds}")
    for column in ("rule", "ours", "foreach", "fused", "of the faster", "GB/s"):
        table.add_column(column, justify="left" if column == "rule" else "right")
    for rule, options in CASES:
        steps = {"ours": ours(rule, np.ones(SIZE, np.float32), gradient)}
        if options is not None:
            steps |= rivals(rule.name, options, gradient)
        took: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds + 1):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                took[name].append(time.perf_counter() - began)
        ms = {name: median(each[1:]) * 1000 for name, each in took.items()}
        fastest = min((ms[name] for name in ms if name != "ours"), default=None)
        # Values and states are read and written, the gradient is read.
        passes = 2 * (1 + len(rule.states(rule.hyper()))) + 1
        passes += 4 if isinstance(rule, LAMB) else 0  # its second pass reads three, writes one
        cells = [f"{ms[name]:.1f}" if name in ms else "-" for name in ("ours", "foreach", "fused")]
        cells.append(f"{fastest / ms['ours']:.2f}" if fastest is not None else "-")
        named = ", ".join(f"{k}={v}" for k, v in (options or {}).items() if k != "lr")
        label = f"{rule.name}({named})"
        table.add_row(label, *cells, f"{passes * 4 * SIZE / ms['ours'] / 1e6:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
