"""How many shards a setting needs: the model, asked about one, two, four and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from paramserve.consistency.base import Policy
from paramserve_plan.model import EVENTS_EACH, Model, bundles_of
from paramserve_plan.prediction import Prediction
from paramserve_plan.setting import Setting

NEAR = 1.1
"""Enough shards: a step takes at most so many times what it takes with servers of endless links."""
FINE = 1.1
"""Two numbers of shards this close are not told apart."""
ENDLESS_GBPS = 1e9
TINY_S = 1e-9
BUNDLES_MAX = 8
EVENTS = 60_000
"""The search makes do with shorter plays than a prediction."""
CLOCKS_MIN, CLOCKS_MAX = 3, 50
SPREAD = 16
"""Shards of the floor, or one: with many a pull overlaps with its push, with one the messages are
few."""
GIVE_UP = 4
"""Most times more shards than workers: each worker has a message for each."""


@dataclass(frozen=True)
class Sweep:
    """What different numbers of shards give.

    Attributes:
        floor_s: a step where servers cost no time: compute, the worker's own link, and waiting.
        points: by rising number of shards.
        needed: the smallest number that is near the floor; None: no number is, because each more
            costs more messages than it spares.
    """

    floor_s: float
    points: Sequence[Prediction]
    needed: int | None

    @property
    def best(self) -> int:
        """`needed`, or else the number with the shortest step."""
        if self.needed is not None:
            return self.needed
        return min(self.points, key=lambda each: each.step_s).shards


def sweep(setting: Setting, policy: Policy, *, seed: int = 0) -> Sweep:
    """Play with 1, 2, 4, ... shards until there are enough, and close in on how many.

    Args:
        setting: its `shards` does not matter.
    Raises:
        ValueError: the policy does not work with this many workers.
    """
    endless = replace(setting.network, server_gbps=ENDLESS_GBPS)
    free = replace(setting.costs, byte_s=0.0)
    floor_s = min(
        _ask(replace(setting, shards=count, network=endless, costs=free), policy, seed).step_s
        for count in (1, SPREAD)
    )
    # With fewer, one direction of the servers' links takes longer already.
    least = max(1, ceil(replace(setting, shards=1).server_link_s / max(NEAR * floor_s, TINY_S)))
    points: dict[int, Prediction] = {}
    for count in {1, max(1, least // 16), max(1, least // 4)}:
        points[count] = _ask(replace(setting, shards=count), policy, seed)
    low, count = least - 1, least
    while count <= max(least, GIVE_UP * setting.workers):
        points[count] = _ask(replace(setting, shards=count), policy, seed)
        if points[count].step_s <= NEAR * floor_s:
            break
        if low in points and points[count].step_s > points[low].step_s:
            return Sweep(floor_s, _sorted(points), None)  # more messages than they spare
        low, count = count, 2 * count
    else:
        return Sweep(floor_s, _sorted(points), None)
    high = count
    while high - low > 1 and high > FINE * low:
        middle = min(max(round((low * high) ** 0.5), low + 1), high - 1)
        points[middle] = _ask(replace(setting, shards=middle), policy, seed)
        if points[middle].step_s <= NEAR * floor_s:
            high = middle
        else:
            low = middle
    return Sweep(floor_s, _sorted(points), high)


def _ask(setting: Setting, policy: Policy, seed: int) -> Prediction:
    bundles = min(bundles_of(setting), BUNDLES_MAX)
    clocks = EVENTS // (EVENTS_EACH * setting.workers * bundles)
    clocks = max(CLOCKS_MIN, min(CLOCKS_MAX, clocks))
    return Model(setting, policy, seed=seed, clocks=clocks, bundles=bundles).play()


def _sorted(points: dict[int, Prediction]) -> list[Prediction]:
    return [points[count] for count in sorted(points)]
