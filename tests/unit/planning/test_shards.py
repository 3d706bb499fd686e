"""How many shards are needed."""

from __future__ import annotations

from paramserve.consistency.built_in import Async, Sync
from paramserve_plan.setting import MB, Compute, Costs, Setting
from paramserve_plan.shards import NEAR, sweep


def test_needed_is_the_smallest_number_near_the_floor() -> None:
    # 10 workers send 1 GB in each 0.2 s and a bit: 10 Gb/s is 1.25 GB a second.
    setting = Setting(10, 1, 100 * MB, compute=Compute(0.2))
    found = sweep(setting, Async())
    assert found.needed == found.best
    assert found.needed in (3, 4)
    for each in found.points:
        assert (each.step_s <= NEAR * found.floor_s) == (each.shards >= found.needed)


def test_needed_is_one_where_links_do_not_matter() -> None:
    assert sweep(Setting(4, 7, 1 * MB, compute=Compute(0.1)), Sync()).needed == 1


def test_needed_is_none_where_messages_cost_more() -> None:
    setting = Setting(16, 1, 100 * MB, compute=Compute(0.0), costs=Costs(message_s=20e-3))
    found = sweep(setting, Sync())
    assert found.needed is None
    assert found.best == min(found.points, key=lambda each: each.step_s).shards
