"""A policy of a few lines: no worker waits for a straggler, and its gradient is not used.

Three workers fit a linear model for some seconds. The last one needs much longer for each step.
Under Sync all go at its pace; under the policy below the other two go on at their own.

    python examples/ignore_stragglers.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import paramserve as ps
from arguments import count
from engines import ENGINES, engine_of
from paramserve.consistency import Admit, Apply, Drop, GroupView, Pull, Push, Wait

GOAL = np.arange(8.0)
BATCH = 16
WORKERS = 3


@dataclass(frozen=True)
class IgnoreStragglers(ps.Policy):
    """Workers stay within `bound` clocks of each other, but for the slowest `ignored` of them."""

    bound: int = 2
    ignored: int = 1

    def on_push(self, push: Push, group: GroupView) -> Apply | Drop:
        fastest = max(group.clocks.values(), default=0)
        late = fastest - push.clock > self.bound + 1
        return Drop() if late else Apply(push.factor)

    def on_pull(self, pull: Pull, group: GroupView) -> Admit | Wait:
        needed = pull.clock - self.bound
        behind = tuple(rank for rank, clock in group.clocks.items() if clock < needed)
        return Wait(behind) if len(behind) > self.ignored else Admit()


def train(worker: ps.Worker, seconds: float, pauses_s: Sequence[float]) -> int:
    """Fit y = x * goal by mini-batches for a while; return the steps that were made."""
    client, random = worker.client, np.random.default_rng(worker.rank)
    client.define("w", np.zeros(GOAL.size), rule=ps.SGD(lr=0.1))
    w = client.push_pull({"w": np.zeros(GOAL.size)}, tick=True)["w"]  # in Sync, all meet here
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(pauses_s[worker.rank])  # stands for computing
        x = random.standard_normal((BATCH, GOAL.size))
        gradient = x.T @ (x @ (w - GOAL)) / BATCH
        w = client.push_pull({"w": gradient}, tick=True)["w"]
        steps += 1
    return steps


def show(policy: ps.Policy, options: argparse.Namespace) -> None:
    """Train under a policy, and print the result."""
    result = ps.run(
        train,
        args=(options.seconds, (options.pause_s, options.pause_s, options.straggle_s)),
        workers=WORKERS,
        servers=options.servers,
        consistency=policy,  # its class is registered with it
        engine=engine_of(options.engine),
    )
    w = np.asarray(result.state_dict("default")["w"])
    steps = ", ".join(str(result.returns[rank]) for rank in range(WORKERS))
    dropped = ", ".join(str(result.dropped.get(rank, 0)) for rank in range(WORKERS))
    print(f"{policy}:")
    print(f"  steps {steps}; not used {dropped}; largest error {abs(w - GOAL).max():.2e}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of each worker (default 2)")
    parser.add_argument("--pause-s", type=float, default=0.005, help="of two workers in each step")
    parser.add_argument("--straggle-s", type=float, default=0.05, help="of the third one")
    parser.add_argument("--servers", type=count, default=1)
    parser.add_argument("--engine", choices=ENGINES, default="local")
    options = parser.parse_args(argv)
    print(f"Ranks 0 to {WORKERS - 1}, of which the last one is slow:")
    show(ps.Sync(), options)
    show(IgnoreStragglers(), options)


if __name__ == "__main__":
    main()
