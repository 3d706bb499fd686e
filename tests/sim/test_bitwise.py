"""Sync over two shards and a broken network equals one process, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from paramserve.consistency.built_in import Sync
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError
from paramserve.messages import BlockSpec, Piece
from paramserve.rules import SGD, Adam, Array, PushInfo, Rule, Run
from paramserve.rules.compiled import compiled
from paramserve_testing import (
    Call,
    Counting,
    Faults,
    Parameters,
    Pushed,
    Scenario,
    Setting,
    SimulatedCluster,
    Workload,
)
from paramserve_testing.counting import wide_shape
from paramserve_testing.scripts import ReaderScript, WorkerScript

WORKERS, STEPS = 3, 8
LOSSY = Faults(slow=0.1, cut=0.02, lose=0.02, duplicate=0.08, peer_lose=0.3, peer_duplicate=0.3)
"""No worker dies: the gradients of a clock are known in advance."""


def gradient(block: Block, rank: int, clock: int) -> Array:
    """Contribution of a rank to a clock: any float32 numbers, of very different sizes."""
    random = np.random.default_rng([block.id, rank, clock])
    scale = 10.0 ** random.integers(-6, 3, block.size)
    return (random.standard_normal(block.size) * scale).astype(np.float32)


class RandomGradients(Parameters):
    """Tensors as those of `Counting`, one of them on all shards."""

    every, add = Counting.every, Counting.add

    def __init__(self, writers: int, rule: Rule) -> None:
        split = {"wide": (Piece("wide", wide_shape(writers, self.dtype)),)}
        self.blocks = {**Counting(writers).blocks, **split}
        self.rule = rule

    def prepare(self) -> None:
        compiled().prepare(self.dtype)
        self.rule.prepare(self.dtype)

    def start(self, slot: Array, block: Block) -> None:
        slot[:] = np.random.default_rng(block.id).standard_normal(block.size)

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        slot[:] = gradient(block, push.rank, push.clock)


class Steady(WorkerScript):
    """It suspends its membership never: that leaves gradients of clocks out."""

    def next(self) -> bool:
        if self.client.left > 0:
            self.client.left -= 1
            self._step_of(self.cluster.random.random())
            return True
        return False

    def _step_of(self, kind: float) -> None:
        def then(call: Call, error: ParamServeError | None) -> None:
            assert error is None
            self.client.answered(call, error)

        self.step(self.every, self.every if kind < 0.5 else (), tick=True, then=then)


class Quiet(ReaderScript):
    def next(self) -> bool:
        self.client.left = 0
        return False


def simulated(seed: int, rule: Rule, policy: Sync, servers: int) -> dict[int, Array]:
    """Final values of each block, after a run on a cluster."""

    def workload(setting: Setting) -> Workload:
        return Workload(RandomGradients(setting.writers, rule))

    parts = {"worker_script": Steady, "reader_script": Quiet}
    kind: type[SimulatedCluster] = type("Steadily", (SimulatedCluster,), parts)
    scenario = Scenario(
        servers=servers,
        workers=WORKERS,
        steps=STEPS,
        consistency=policy,
        faults=LOSSY,
        workload=workload,
    )
    cluster = kind(seed, scenario)
    cluster.run()
    assert not cluster.history.unfinished
    whole: dict[int, Array] = {}
    for number, block in cluster.blocks.items():
        parts_of = [server.shard.blocks[number].value for server in cluster.servers]
        whole[number] = np.concatenate(parts_of)
        assert whole[number].size == block.size
    return whole


def one_process(block: Block, rule: Rule, mean: bool) -> Array:
    """The loop that a user would write without servers."""
    value = np.random.default_rng(block.id).standard_normal(block.size).astype(np.float32)
    state = rule.init_state(block.size, value.dtype)
    for clock in range(STEPS):
        total = gradient(block, 0, clock)
        for rank in range(1, WORKERS):
            total = total + gradient(block, rank, clock)
        push = PushInfo(-1, clock, clock, 0, 1.0, 1.0 / WORKERS if mean else 1.0)
        rule.apply(value, total, state, rule.hyper(), [Run(0, block.size, clock)], push)
    return value


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "policy"),
    [
        (SGD(lr=0.1, momentum=0.9, weight_decay=0.01), Sync(reduce="sum")),
        (Adam(lr=0.1), Sync(reduce="mean")),
    ],
)
def test_sync_run_equals_one_process_bit_for_bit(
    seed: int, servers: int, rule: Rule, policy: Sync
) -> None:
    values = simulated(seed, rule, policy, servers)
    assert len(values) == len(Counting(WORKERS).blocks)
    for number, value in values.items():
        block = simulated_block(number, value.size)
        expected = one_process(block, rule, policy.reduce == "mean")
        np.testing.assert_array_equal(value.view(np.uint32), expected.view(np.uint32))


def simulated_block(number: int, size: int) -> Block:
    """As much of a block as the loop needs."""
    spec = BlockSpec(number, 0, "", "float32", None, (Piece("all", (size,)),), (0, size))
    return Block(spec)
