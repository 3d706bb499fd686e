"""Shards with one group whose ranks are clients 1, 2, 3, and steps of one number each."""

from __future__ import annotations

from typing import Any

from tests.unit.core.rig import Rig, block_spec, done

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Sync
from paramserve.consistency.registry import spec
from paramserve.messages import SetPolicy

A, B, C = 1, 2, 3
SUM = Sync(reduce="sum")


def rig(policy: Policy, *, shards: int = 1, workers: int = 3, **block: Any) -> Rig:
    """`workers` clients 1, 2, ... as ranks 0, 1, ...; a block with one element on each shard."""
    one = Rig(policy, shards=shards, workers=workers)
    for rank in range(workers):
        one.join(rank + 1, rank)
    one.define(A, block_spec(*[(1,)] * shards, cuts=range(shards + 1), **block))
    return one


def push(one: Rig, client: int, clock: int = 0, *shards: int, **options: Any) -> None:
    """A gradient of 1.0 to these shards, or to all; the clock ends."""
    for shard in shards or range(len(one.shards)):
        one.step(client, {0: [1.0]}, shard=shard, clock=clock, **options)


def last(one: Rig, client: int, shard: int = 0) -> Any:
    return one.answers(client, shard)[-1]


def change(one: Rig, policy: Policy, client: int = 9) -> None:
    one.join(client)
    for shard in range(len(one.shards)):
        done(one.send(client, SetPolicy(0, 0, spec(policy)), shard))
    one.deliver()


def switched(one: Rig) -> list[int]:
    """The clock of the newest change, by shard."""
    reports = [shard.report()[0].change for shard in one.shards]
    return [-1 if change is None else change.clock for change in reports]
