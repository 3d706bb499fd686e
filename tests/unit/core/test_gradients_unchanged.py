"""What a worker has pushed stays as it is in its own memory: the same step may be executed again.

A replica, or a server that is started again, executes it from the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.suites import each_case
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Buffered, DelayCompensated, Sync
from paramserve.messages import Gradient, ReadTarget, Step
from paramserve.rules import Add

ARENA = 3
SIZE = 8
"""Elements of float64: 64 bytes, the alignment of a slot."""


class Worker:
    """A worker whose gradients lie in an arena of its own."""

    def __init__(self, rig: Rig, rank: int) -> None:
        self._rig, self._client = rig, rank + 1
        self.arena = np.full(2 * SIZE, 10.0**rank)
        rig.join(self._client, rank)
        self._clock = 0

    def steps(self, blocks: Sequence[int] = (0,), **options: float) -> None:
        push = tuple(Gradient(block, ARENA, 64 * block) for block in blocks)
        pull = tuple(ReadTarget(block, 0, 64 * at) for at, block in enumerate(blocks))
        known = [each.version for each in self._rig.answers(self._client) if each.seq > 2]
        step = Step(0, 0, self._clock, True, push, pull, *known[-1:], **options)
        self._rig.send(self._client, step, 0, {ARENA: self.arena.view(np.uint8)})
        self._clock += 1


def rig(policy: Policy, workers: int) -> tuple[Rig, list[Worker]]:
    one = Rig(policy, workers=workers)
    every = [Worker(one, rank) for rank in range(workers)]
    for number in (0, 1):
        one.define(1, block_spec((SIZE,), number=number, cuts=(0, SIZE), rule=Add()))
    return one, every


@each_case("options", [{}, {"weight": 3.0}, {"clip_norm": 0.5}, {"factor": 2.0}])
@each_case("workers", [1, 2, 3])
def test_sync_writes_to_no_gradient(workers: int, options: dict[str, float]) -> None:
    one, every = rig(Sync(), workers)
    before = [worker.arena.copy() for worker in every]
    for _ in range(2):
        for worker in every:
            worker.steps((0, 1), **options)
    assert all((a == worker.arena).all() for a, worker in zip(before, every, strict=True))
    assert one.shards[0].groups[0].state.version == 2


@each_case("policy", [DelayCompensated(lam=0.5), Buffered(size=2)], ids=["dc", "buf"])
def test_policies_that_change_gradients_write_to_none(policy: Policy) -> None:
    one, every = rig(policy, 2)
    before = [worker.arena.copy() for worker in every]
    for _ in range(3):
        for worker in every:
            worker.steps((0, 1))
    assert all((a == worker.arena).all() for a, worker in zip(before, every, strict=True))
    assert one.value() != [0.0] * SIZE


def test_the_same_steps_from_the_same_memory_have_the_same_result_on_another_shard() -> None:
    values = []
    arenas = [np.full(2 * SIZE, float(rank + 1)) for rank in range(2)]
    for _ in range(2):
        one, every = rig(Sync(reduce="sum"), 2)
        for worker, arena in zip(every, arenas, strict=True):
            worker.arena = arena
            worker.steps((0,))
        values.append(one.value())
    assert values == [[3.0] * SIZE] * 2
