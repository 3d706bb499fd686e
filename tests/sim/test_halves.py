"""Simulated clusters with parameters of 16 bits: masters are exact sums, and are rounded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.sim.policies import TABLE_POLICIES
from tests.sim.workloads.halves import halves, nearest
from tests.suites import each_case

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.block import ShardBlock
from paramserve_testing import Faults, Scenario, SimulatedCluster, Violation, replay

POLICIES: dict[str, Policy] = {**TABLE_POLICIES, "async-drop": Async(drop_after=1)}
LINKS = ("mixed", "tcp", "shared")
FAULTS = Faults(slow=0.1, cut=0.02, lose=0.01, duplicate=0.05, interrupt=0.02, kill=0.01)
FOUND_WITHIN = 5
"""Seeds after which a planted bug has been found; all showed at seed 0."""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_seeds_of_16_bits_keep_every_invariant(policy: str, seed: int) -> None:
    servers, links = 1 + seed % 2, LINKS[seed % 3]
    replay(seed, workload=halves, consistency=POLICIES[policy], servers=servers, links=links)


def test_seeds_of_16_bits_have_what_is_judged() -> None:
    """Deaths, gradients that are dropped and sent again, and sums that 16 bits do not hold."""
    seen: Counter[str] = Counter()
    for seed in range(3):
        policy, links = Async(drop_after=1), LINKS[seed % 3]
        scenario = Scenario(consistency=policy, faults=FAULTS, links=links, workload=halves)
        cluster = SimulatedCluster(seed, scenario)
        history = cluster.run()
        cluster.check()
        seen["killed"] += sum(client.dead for client in cluster.clients)
        seen["dropped"] += sum(call.skipped or bool(call.dropped) for call in history.calls)
        seen["unanswered"] += sum(call.answered is None for call in history.calls)
        for server in cluster.servers:
            for block in server.shard.blocks.values():
                if isinstance(block, ShardBlock) and block.half is not None:
                    rounded = np.empty(block.size, block.half.dtype)
                    block.write_rounded(rounded)
                    widened = block.widened(rounded)
                    seen[f"{block.spec.half} rounded"] += int((widened != block.value).sum())
    assert len(seen) == 5, seen
    assert min(seen.values()) > 0, seen


@each_case(
    ("half", "value", "bits"),
    [
        ("bfloat16", 1.0, 0x3F80),
        ("bfloat16", 1.0 + 2**-8, 0x3F80),  # a tie: to even
        ("bfloat16", 1.0 + 3 * 2**-8, 0x3F82),  # a tie: to even, upwards
        ("bfloat16", 1.0 + 2**-8 + 2**-20, 0x3F81),
        ("bfloat16", -2.5, 0xC020),
        ("float16", 1.0 + 2**-11, 0x3C00),
        ("float16", -2.5, 0xC100),
    ],
)
def test_nearest_of_16_bits_by_hand(half: str, value: float, bits: int) -> None:
    assert nearest(np.array([value]), half).tolist() == [bits]


# --- bugs that parameters of 16 bits could have --------------------------------------------------

real_apply, real_round = ShardBlock.apply, ShardBlock._round


def masters_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard keeps its values as its clients get them."""

    def apply(block: ShardBlock, *given: Any, **more: Any) -> None:
        real_apply(block, *given, **more)
        if block.half is not None:
            rounded = np.empty(block.size, block.half.dtype)
            real_round(block, block.value, rounded)
            block.value[:] = block.widened(rounded)

    monkeypatch.setattr(ShardBlock, "apply", apply)


def values_are_rounded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """To 12 bits of a mantissa first: what comes near a tie of 8 bits then is one."""

    def twice(block: ShardBlock, values: Any, out: Any) -> None:
        fraction, exponent = np.frexp(values)
        real_round(block, np.ldexp(np.rint(fraction * 4096) / 4096, exponent), out)

    monkeypatch.setattr(ShardBlock, "_round", twice)


def values_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last 16 bits of float32 are left out, whatever they are."""

    def cut(block: ShardBlock, values: Any, out: Any) -> None:
        if block.spec.half == "bfloat16":
            out[:] = values.view(np.uint32) >> 16
        else:
            real_round(block, values, out)

    monkeypatch.setattr(ShardBlock, "_round", cut)


def sums_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gradients of a clock's workers are together is rounded to 16 bits."""

    def apply(block: ShardBlock, gradient: Any, *given: Any, **more: Any) -> None:
        if block.half is not None and gradient.dtype == block.dtype:
            rounded = np.empty(block.size, block.half.dtype)
            real_round(block, gradient, rounded)
            gradient = block.widened(rounded)
        real_apply(block, gradient, *given, **more)

    monkeypatch.setattr(ShardBlock, "apply", apply)


@pytest.mark.parametrize(
    ("plant", "policy", "checker"),
    [
        (masters_are_rounded, Async(), "masters_are_exact"),
        (values_are_rounded_twice, Async(), "values_are_rounded_once"),
        (values_are_cut_off, Async(), "values_are_rounded_once"),
        (sums_are_rounded, Sync(reduce="sum"), "masters_are_exact"),
    ],
)
def test_planted_bug_of_16_bits_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    policy: Policy,
    checker: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    for seed in range(FOUND_WITHIN):
        scenario = Scenario(consistency=policy, faults=Faults(), workload=halves)
        cluster = SimulatedCluster(seed, scenario)
        try:
            cluster.run()
            cluster.check()
        except Violation as violation:
            lines = str(violation).splitlines()
            assert f"replay(seed={seed}," in lines[0]
            assert "halves.halves" in lines[0]
            assert checker in {line.split(":")[0].strip() for line in lines[1:]}
            return
    pytest.fail(f"{plant.__name__} was not found in {FOUND_WITHIN} seeds")
