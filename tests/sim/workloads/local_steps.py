"""Own steps and outer rules in a simulated cluster: `LocalSteps` and `AsyncLocalSteps`.

Each fragment has a counting block, whose values tell which exchanges are in it, and beside it a
block with the policy's outer rule, momentum included. The outer rules are written here a second
time, in float64, and run over the exchanges in the order in which each shard has applied them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tests.sim.workloads.beside import Beside
from tests.sim.workloads.own_steps import OwnSteps

from paramserve.consistency.built_in import AsyncLocalSteps, LocalSteps
from paramserve.core.partition import Block
from paramserve.messages import Piece
from paramserve.rules import Rule
from paramserve.rules.delayed_nesterov import DelayedNesterov
from paramserve.rules.sgd import SGD
from paramserve_testing.counting import SPLIT_BYTES, Counting, counting_rule, wide_shape
from paramserve_testing.history import Call, History, Part, Row, Update
from paramserve_testing.wording import call_name
from paramserve_testing.workload import Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]
Exact = npt.NDArray[np.float64]

STEP_S = 0.0004
"""One own step takes up to this, of a worker that is not slow."""
OFF_MAX = 1e-4
"""How far float32 may be off from float64 after all exchanges of a run."""


class LocalScript(OwnSteps):
    """Makes own steps, and exchanges fragments that it and others have changed."""

    @property
    def step_s(self) -> float:
        random, slowness = self.cluster.random.random(), self.cluster.slowness(self.client.rank)
        return STEP_S * random * slowness

    def fragment(self, number: int) -> list[Any]:
        return [self.client.blocks[f"part{number}"]]


class Outer(Beside):
    """A tensor with the policy's outer rule beside the counting one of each fragment."""

    def __init__(self, rule: Rule, fragments: int) -> None:
        elements = SPLIT_BYTES // 4
        blocks = {f"outer{n}": (Piece(f"outer{n}", (elements,)),) for n in range(fragments)}
        super().__init__(blocks, {f"outer{n}": f"part{n}" for n in range(fragments)})
        self.rule = rule

    def drawn(self, block: Block, writer: int, number: int) -> Array:
        """What the own steps before one push have changed in a block, float32 [size]."""
        draw = np.random.default_rng((block.id, writer, number))
        return draw.standard_normal(block.size, np.float32)

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        slot[:] = self.drawn(block, push.writer, push.number)

    def was_read(self, block: Block, shard: int, values: Array, row: Row) -> list[str]:
        return []

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        return {
            "outer_steps_are_those_of_the_exchanges": self._wrong_steps(cluster),
            "exchanges_are_of_what_was_read": exchanges_are_of_what_was_read(cluster.history),
        }

    def _wrong_steps(self, cluster: SimulatedCluster) -> list[str]:
        """A shard's values are those of the outer rule over the exchanges that it has applied:
        under `LocalSteps` one update with the mean over a clock's contributors, under
        `AsyncLocalSteps` one with each."""
        wrong = []
        for name, block, companion, shard, values in self.held(cluster):
            low, high = block.range(shard)
            reference = _reference(self.rule, values.size)
            count = 0
            for pushes, share in _updates(cluster.history, shard, companion):
                changes = [self.drawn(block, *push)[low:high].astype(float) for push in pushes]
                reference.apply(share * np.sum(changes, axis=0))
                count += 1
            off = np.abs(values - reference.value)
            if (off > OFF_MAX * np.maximum(1.0, np.abs(reference.value))).any():
                at = int(off.argmax())
                wrong.append(
                    f"{name} on shard {shard}: element {low + at} is {values[at]}, and after "
                    f"{count} outer steps it is {reference.value[at]}"
                )
        return wrong


def own_steps(setting: Setting) -> Workload:
    """Workers that make own steps, under `LocalSteps` or `AsyncLocalSteps` without `damping`, whose
    outer rule is `SGD` or `DelayedNesterov`. The policy does not change."""
    scenario, policy = setting.scenario, setting.scenario.consistency
    assert isinstance(policy, LocalSteps | AsyncLocalSteps)
    assert not scenario.others, "give others=(): its policy does not change"
    fragments = policy.fragments if isinstance(policy, LocalSteps) else 1
    shape = wide_shape(setting.writers)
    blocks = {f"part{n}": (Piece(f"part{n}", shape),) for n in range(fragments)}
    parts = Counting(setting.writers, counting_rule(scenario.policies), blocks=blocks)
    return Workload(parts, Outer(policy.outer, fragments), script=LocalScript)


# --- the outer rules, a second time --------------------------------------------------------------


class Nesterov:
    """torch.optim.SGD(lr, momentum, nesterov=True), without weight decay."""

    def __init__(self, rule: SGD, size: int) -> None:
        self._rule = rule
        self._buffer: Exact | None = None
        self.value = np.zeros(size)

    def apply(self, change: Exact) -> None:
        lr, momentum = self._rule.lr, self._rule.momentum
        self._buffer = change if self._buffer is None else momentum * self._buffer + change
        moved = change + momentum * self._buffer if self._rule.nesterov else self._buffer
        self.value = self.value - lr * moved


class Delayed:
    """Algorithm 3 of Liu et al. (2401.09135)."""

    def __init__(self, rule: DelayedNesterov, size: int) -> None:
        self._rule = rule
        self._momentum, self._sum, self._count = np.zeros(size), np.zeros(size), 0
        self.value = np.zeros(size)

    def apply(self, change: Exact) -> None:
        rule, n = self._rule, int(self._rule.pushes)
        self._sum, self._count = self._sum + change, self._count + 1
        through = rule.activation
        if self._count % n == 0:
            self._momentum = rule.momentum * self._momentum + self._sum / n
            through = 1.0 - rule.activation * (n - 1)
            self._sum = np.zeros_like(self._sum)
        self.value = self.value - rule.lr * (through * rule.momentum * self._momentum + change / n)


def _reference(rule: Rule, size: int) -> Nesterov | Delayed:
    if isinstance(rule, DelayedNesterov):
        return Delayed(rule, size)
    assert isinstance(rule, SGD), rule
    return Nesterov(rule, size)


# --- what must hold ------------------------------------------------------------------------------


Pushes = list[tuple[int, int]]
"""(writer, push)."""


def _updates(history: History, shard: int, block: Block) -> Iterator[tuple[Pushes, float]]:
    """The outer steps of one block on a shard, in order: whose exchanges each has, and by what
    their sum is multiplied."""
    calls = {(call.writer, call.push): call for call in history.calls if call.push is not None}
    final = history.final[Part(block.id, shard)]
    sizes = {each.clock: len(each.contributors) for each in history.decided}
    for update in history.updates:
        if update.shard != shard:
            continue
        here = [
            each
            for each in update.pushes
            if block.id in calls[each].blocks and final.pushes[each[0]] >> each[1] & 1
        ]
        if history.collects:
            by_clock: dict[int, Pushes] = {}
            for push in here:
                by_clock.setdefault(calls[push].clock, []).append(push)
            for clock, pushes in sorted(by_clock.items()):
                # Where one shard decides several clocks in one event, only the last is recorded.
                yield pushes, 1.0 / sizes.get(clock, len(pushes))
        else:
            here.sort(key=lambda push: _came(history, shard, calls[push]))
            for push in here:
                yield [push], 1.0


def _came(history: History, shard: int, call: Call) -> int:
    return history.reached.get((shard, call.writer, call.number), call.issued)


def exchanges_are_of_what_was_read(history: History) -> list[str]:
    """A worker's exchange is based on the version whose values it has read last, on each shard; and
    what it has read there is what the shard had applied up to that version."""
    wrong = []
    updates: dict[int, list[Update]] = {}
    for update in history.updates:
        updates.setdefault(update.shard, []).append(update)
    for calls in history.by_writer().values():
        read: dict[int, Call] = {}
        for call in calls:
            for shard, base in enumerate(call.bases):
                last = read.get(shard)
                if call.push is None or call.rank < 0 or last is None:
                    continue
                who = f"{call_name(call)} on shard {shard}, based on version {base},"
                wrong += _judge_base(history, updates.get(shard, ()), shard, base, last, who)
            for part in call.reads:
                read[part.shard] = call
    return wrong


def _judge_base(
    history: History, updates: Sequence[Update], shard: int, base: int, last: Call, who: str
) -> list[str]:
    answer = history.answers[shard, last.writer, last.number]
    again = shard in last.reread
    if base != answer.after and not (again and base >= answer.after):
        return [f"{who} has read version {answer.after} last"]
    if again or not any(each.after == base for each in updates):
        return []
    there: set[tuple[int, int]] = set()
    for each in updates:
        if each.after <= base:
            there.update(each.pushes)
    for part, row in last.reads.items():
        if part.shard == shard and not set(row.each()) <= there:
            return [f"{who} has read what was applied later"]
    return []
