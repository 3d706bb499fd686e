"""Three update rules of a few lines each, run on the servers.

`Logs` says which worker sent what, `Weights` trusts some workers more than others, `Clips` bounds
each gradient's norm.

    python examples/custom_rule.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import paramserve as ps
from arguments import count
from engines import ENGINES, engine_of
from meeting import meet


@dataclass(frozen=True)
class Logs(ps.CustomRule):
    """Gradient descent that says who pushed, from which clock, and how stale it was."""

    lr: float = 0.1

    def update(self, value: Any, gradient: Any, state: Mapping[str, Any], push: Any) -> None:
        print(
            f"worker {push.worker}, clock {push.clock}, staleness {push.staleness}: "
            f"gradient {np.array2string(gradient, precision=2)}",
            flush=True,
        )
        value -= self.lr * gradient


@dataclass(frozen=True)
class Weights(ps.CustomRule):
    """Gradient descent in which each worker's gradient counts as much as `weights` says."""

    lr: float = 0.1
    weights: tuple[float, ...] = (1.0, 1.0)

    def update(self, value: Any, gradient: Any, state: Mapping[str, Any], push: Any) -> None:
        value -= self.lr * self.weights[push.worker] * gradient


@dataclass(frozen=True)
class Clips(ps.CustomRule):
    """Gradient descent with each tensor's gradient clipped to a norm."""

    whole_tensors = True  # a norm needs the whole tensor, so none is cut over two servers
    lr: float = 0.1
    norm: float = 1.0

    def update(self, value: Any, gradient: Any, state: Mapping[str, Any], push: Any) -> None:
        length = np.linalg.norm(gradient)
        value -= self.lr * gradient * min(1.0, self.norm / max(length, 1e-12))


RULES = (Logs, Weights, Clips)


def train(
    worker: ps.Worker, rule: ps.CustomRule, goals: Sequence[float], steps: int, pause_s: float
) -> None:
    """Pull the values towards this worker's own goal."""
    client, goal = worker.client, goals[worker.rank]
    client.define("w", np.zeros(3), rule=rule)
    meet(worker)
    value = client.pull("w")
    for _ in range(steps):
        time.sleep(pause_s)  # here a gradient would be computed
        value = client.push_pull({"w": value - goal}, tick=True)["w"]


def run(
    rule: ps.CustomRule,
    steps: int,
    pause_s: float,
    servers: int,
    engine: str,
    goals: Sequence[float] = (1.0, -1.0),
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values that two workers with these goals reach by a rule."""
    result = ps.run(
        train,
        args=(rule, goals, steps, pause_s),
        workers=2,
        servers=servers,
        consistency=ps.Async(),
        rules=RULES,  # what the servers may run, fixed before they listen
        engine=engine_of(engine),
    )
    return np.asarray(result.state_dict("default")["w"])  # a tensor where torch is imported


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=count, default=40, help="of each worker (default 40)")
    parser.add_argument("--pause-s", type=float, default=0.005, help="between them")
    parser.add_argument("--servers", type=count, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="local")
    options = parser.parse_args(argv)
    common = options.pause_s, options.servers, options.engine
    print("Logs, three steps of each worker:")
    run(Logs(), 3, *common)
    print("Two workers with the goals 1 and -1; with Clips both want 1:")
    print("Weights(1, 1):  ", run(Weights(), options.steps, *common))
    print("Weights(1, 0):  ", run(Weights(weights=(1.0, 0.0)), options.steps, *common))
    print("Clips(norm=0.1):", run(Clips(norm=0.1), options.steps, *common, goals=(1.0, 1.0)))


if __name__ == "__main__":
    main()
