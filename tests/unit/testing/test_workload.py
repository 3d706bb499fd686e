"""What the clients of a simulated cluster train is composed, and judges itself in the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.sim.workloads.tables import table_beside_tensors

from paramserve.client.step_parts import StepParts
from paramserve.consistency.built_in import Async
from paramserve.core.block import ShardBlock
from paramserve.messages import Piece
from paramserve.rules import PushInfo
from paramserve.rules.custom import CustomRule
from paramserve_testing import (
    Counting,
    Parameters,
    Scenario,
    Setting,
    SimulatedCluster,
    Violation,
    Workload,
    replay,
)
from paramserve_testing.history import Part
from paramserve_testing.workload import GroupStep


@dataclass(frozen=True)
class Tripled(CustomRule):
    """A rule of a user's own."""

    def update(self, value: Any, gradient: Any, state: Any, push: PushInfo) -> None:
        value += 3.0 * gradient


class Own(Parameters):
    """A tensor with a rule of a user's own, beside the widest that counts."""

    blocks: Mapping[str, tuple[Piece, ...]] = {"own": (Piece("own", (5,)),)}
    rule = Tripled()
    factor = 3.0

    def fill(self, slot: Any, block: Any, push: Any) -> None:
        slot.fill(1.0)

    def add(self, client: Any, step: GroupStep, parts: StepParts) -> StepParts:
        if step.which is None or client.blocks["wide"] not in step.push:
            return parts
        own = self.capture(client, client.blocks["own"], step.which)
        return structs.replace(parts, pushes=[own, *parts.pushes])

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        named = {each.pieces[0].name: each for each in cluster.blocks.values()}
        wrong = []
        for server in cluster.servers:
            held = server.shard.blocks[named["own"].id]
            assert isinstance(held, ShardBlock)
            pushes = cluster.history.final[Part(named["wide"].id, server.number)].each()
            wanted = np.full(held.size, self.factor * len(pushes))
            if (held.value != wanted).any():
                wrong.append(f"shard {server.number}: {held.value}, not {wanted}")
        return {"each_push_counts_three": wrong}


class Wrong(Own):
    factor = 2.0


def own(setting: Setting) -> Workload:
    return Workload(Counting(setting.writers), Own())


def wrong(setting: Setting) -> Workload:
    return Workload(Counting(setting.writers), Wrong())


def test_block_with_a_rule_of_ones_own_is_defined_pushed_to_and_judged() -> None:
    for seed in range(3):
        cluster = replay(seed, workload=own, consistency=Async(), others=())
        (wide,) = (each for each in cluster.blocks.values() if each.pieces[0].name == "wide")
        pushes = [
            row.each() for part, row in cluster.history.final.items() if part.block == wide.id
        ]
        assert len(pushes) == 2
        assert all(pushes), "else this tests nothing"


def test_violation_of_a_workload_names_the_invariant_and_how_to_run_it_again() -> None:
    with pytest.raises(Violation) as violation:
        replay(0, workload=wrong, consistency=Async(), others=())
    first, *lines = str(violation.value).splitlines()
    assert first.startswith("paramserve_testing.replay(seed=0, ")
    assert f"workload={wrong.__module__}.wrong" in first
    assert lines[0].strip().startswith("each_push_counts_three: shard ")


def test_tables_come_first_in_a_call() -> None:
    scenario = Scenario(second=Async(), others=())
    workload = table_beside_tensors(Setting(0, scenario, 3))
    assert workload.groups == ("default", "users")
    assert workload.in_order == ["users", "default"]
    assert [*workload.blocks] == ["left", "right", "wide", "users"]
