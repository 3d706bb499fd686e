"""The model: classic figures, what policies do in it, and their standing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.suites import each_case

from paramserve.consistency.base import DROP, GroupView, OnPush, Policy, Pull, Push, Wait
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, LocalSteps, Sync
from paramserve_plan.model import Model, ShardGroupView, bundles_of, clocks_of
from paramserve_plan.prediction import Prediction, staleness_figures
from paramserve_plan.setting import MB, Compute, Costs, Network, Setting

CLASSIC = Setting(100, 1, 100 * MB, compute=Compute(0.0))
"""100 workers, 100 MB, 10 Gb/s."""
EVEN = Setting(4, 2, 1 * MB, compute=Compute(0.02))


def play(setting: Setting, policy: Policy, clocks: int = 60, seed: int = 0) -> Prediction:
    return Model(setting, policy, clocks=clocks, seed=seed).play()


@each_case(("shards", "expected_s"), [(1, 8.0), (100, 0.08)])
def test_classic_question_by_hand_and_played(shards: int, expected_s: float) -> None:
    setting = replace(CLASSIC, shards=shards)
    assert setting.one_way_s == pytest.approx(expected_s)
    assert play(setting, Async(), clocks=3).step_s == pytest.approx(expected_s, rel=0.1)
    free = replace(setting, costs=Costs(0.0, 0.0))
    assert play(free, Sync(), clocks=3).step_s == pytest.approx(2 * expected_s, rel=0.1)


def test_bundled_shards_give_what_single_ones_give() -> None:
    setting = Setting(20, 40, 100 * MB, compute=Compute(0.1, spread=0.2))
    for policy in (Sync(), Async()):
        steps = [
            Model(setting, policy, clocks=3, bundles=bundles).play().step_s for bundles in (4, 40)
        ]
        assert steps[0] == pytest.approx(steps[1], rel=0.1)


def test_play_of_ten_thousand_workers_is_short() -> None:
    setting = Setting(10_000, 1_000, 100 * MB)
    assert bundles_of(setting) == 2
    assert clocks_of(setting) * bundles_of(setting) * setting.workers <= 200_000


def test_same_seed_same_prediction_and_another_seed_another() -> None:
    setting = replace(EVEN, compute=Compute(0.02, jitter=0.3))
    first = play(setting, BoundedStaleness(1))
    assert play(setting, BoundedStaleness(1)) == first
    assert play(setting, BoundedStaleness(1), seed=1) != first


def test_slow_worker_holds_sync_and_bounded_but_not_async_nor_backup() -> None:
    setting = replace(EVEN, compute=Compute(0.02, slow=1, slow_factor=5.0))
    sync, bounded = play(setting, Sync()), play(setting, BoundedStaleness(4))
    assert sync.step_s == pytest.approx(0.103, rel=0.03)
    assert bounded.step_s == pytest.approx(sync.step_s, rel=0.05)
    assert sync.waiting_share == pytest.approx(0.75 * 80 / 103, rel=0.05)
    free, backup = play(setting, Async()), play(setting, Sync(backup=1))
    assert free.steps_per_s == pytest.approx(3 / 0.0215 + 1 / 0.1015, rel=0.05)
    assert backup.steps_per_s > 3 * sync.steps_per_s
    assert free.waiting_share == 0.0
    assert backup.dropped_share > 0.05
    assert sync.dropped_share == 0.0


def test_transient_stragglers_cost_bounded_staleness_less_than_sync() -> None:
    setting = replace(EVEN, compute=Compute(0.02, straggler_p=0.1, straggler_factor=5.0))
    sync, bounded = (play(setting, each, 200) for each in (Sync(), BoundedStaleness(4)))
    assert bounded.steps_per_s > 1.4 * sync.steps_per_s


def test_deadline_of_sync_ends_a_clock() -> None:
    setting = replace(EVEN, compute=Compute(0.02, slow=1, slow_factor=50.0))
    found = play(setting, Sync(timeout_s=0.03))
    assert found.step_s < 0.08
    assert found.dropped_share > 0.0


def test_staleness_is_what_the_others_did_meanwhile() -> None:
    assert play(EVEN, Async()).staleness.mean == pytest.approx(3.0, abs=0.05)
    assert play(EVEN, Sync()).staleness == (0.0, 0, 0)
    assert play(EVEN, Buffered(4)).staleness.mean < 1.01
    dropping = play(EVEN, Async(drop_after=2))
    assert dropping.dropped_share > 0.2


def test_local_steps_exchange_once_for_many() -> None:
    found = play(EVEN, LocalSteps(every=8))
    assert found.worker_bytes == pytest.approx(MB / 8)
    assert found.step_s == pytest.approx(0.0202, rel=0.02)


def test_codecs_make_links_faster_and_not_passes_over_memory() -> None:
    slow = Network(worker_gbps=0.1, server_gbps=0.1, latency_s=0.0)
    plain = Setting(4, 1, 10 * MB, slow, Compute(0.0), Costs(0.0, 0.0))
    for push, pull in ((0.25, 0.25), (0.25, 1.0), (1.0, 0.5)):
        coded = replace(plain, push_share=push, pull_share=pull)
        assert coded.link_bytes == 10 * MB * max(push, pull)
        # In Sync both ways add up: all gradients go in, then all values out.
        wanted = play(plain, Sync(), clocks=4).step_s * (push + pull) / 2
        assert play(coded, Sync(), clocks=4).step_s == pytest.approx(wanted, rel=0.01)
    costly = replace(plain, costs=Costs(0.0, 1e-6), push_share=0.01, pull_share=0.01)
    assert play(costly, Sync(), clocks=4).step_s > 10.0, "the server adds whole values up"


def test_fragments_exchange_as_many_bytes_in_smaller_parts() -> None:
    whole = play(EVEN, LocalSteps(every=8))
    parts = play(EVEN, LocalSteps(every=8, fragments=4))
    assert parts.worker_bytes == pytest.approx(whole.worker_bytes)
    assert parts.step_s == pytest.approx(whole.step_s, rel=0.05)


def test_shared_cores_make_servers_and_workers_wait_for_each_other() -> None:
    costs = Costs(1e-3, 0.0)
    setting = Setting(4, 2, MB, Network(latency_s=0.0), Compute(0.0), costs)
    own, one = (
        play(replace(setting, costs=replace(costs, cores=cores)), Async()) for cores in (None, 1)
    )
    # Each step is a message out and in for 2 shards at the worker, and one at each server.
    assert one.step_s == pytest.approx(4 * 6e-3, rel=0.02)
    assert own.step_s < 0.5 * one.step_s


class NeverReads(Policy):
    def on_pull(self, pull: Pull, group: GroupView) -> Wait:
        return Wait(())


class DropsAll(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return DROP


def test_policy_that_never_admits_is_named() -> None:
    with pytest.raises(ValueError, match=r"NeverReads.*holds all 4 workers for ever"):
        play(EVEN, NeverReads())


def test_policy_of_ones_own_is_played() -> None:
    found = play(EVEN, DropsAll())
    assert (found.dropped_share, found.staleness.largest) == (1.0, 0)


def test_policy_that_does_not_go_with_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="backup"):
        play(EVEN, Sync(backup=4))


def test_standing_knows_the_slowest() -> None:
    standing = ShardGroupView(3)
    risen = [standing.tick(rank) for rank in (0, 0, 1, 2, 2, 1)]
    assert risen == [False, False, False, True, False, True]
    assert standing.slowest == min(standing.clocks.values()) == 2


def test_staleness_figures_are_over_pushes() -> None:
    assert staleness_figures({0: 90, 1: 5, 7: 5}) == (0.4, 1, 7)
    assert staleness_figures({}) == (0.0, 0, 0)


@each_case("spread", [0.0, 0.2, 1.0])
def test_spread_keeps_the_mean(spread: float) -> None:
    import random

    source, compute = random.Random(3), Compute(0.1, spread)
    drawn = [compute.mean_of(1, source) for _ in range(4000)]
    assert math.fsum(drawn) / len(drawn) == pytest.approx(0.1, rel=0.08)


@each_case(
    "wrong",
    [
        lambda: Setting(0, 1, 1.0),
        lambda: Setting(1, 0, 1.0),
        lambda: Network(latency_s=-1.0),
        lambda: Network(server_gbps=0.0),
        lambda: Compute(straggler_p=1.5),
        lambda: Compute(float("nan")),
        lambda: Costs(cores=0),
    ],
)
def test_setting_refuses_what_makes_no_sense(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        wrong()
