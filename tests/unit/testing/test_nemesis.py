"""Scripted faults: what they refuse, how they are written, and which step injects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Inverse, Sync
from paramserve_testing import cut, join, kill, leave, set_policy, slow, stop
from paramserve_testing.counting import AddWhole, leaves_whole
from paramserve_testing.nemesis import ScriptedFault

WRITTEN = [
    "kill(worker=3, clock=7)",
    "stop(worker=0, clock=2, seconds=0.5)",
    "stop(clock=2, shard=1, seconds=0.5)",
    "stop(clock=2, coordinator=True, seconds=0.5)",
    "leave(worker=1, clock=0)",
    "join(clock=4)",
    "cut(worker=1, shard=0, seconds=5)",
    "cut(worker=1, clock=3, coordinator=True, seconds=5, both=False)",
    "cut(clock=3, shards=(0, 1), seconds=5)",
    "slow(worker=2, factor=10)",
    "slow(worker=2, clock=1, shard=1, factor=2.5, seconds=0.1)",
    "set_policy(BoundedStaleness(bound=2, on_nonfinite='refuse'), clock=3)",
]


@each_case("text", WRITTEN)
def test_scripted_fault_is_shown_as_it_is_written(text: str) -> None:
    assert repr(eval(text)) == text


@each_case(
    ("call", "options"),
    [
        (kill, {"worker": -1, "clock": 0}),
        (kill, {"worker": True, "clock": 0}),
        (kill, {"worker": 0, "clock": 1.5}),
        (join, {"clock": -1}),
        (leave, {"worker": None, "clock": 1}),
        (stop, {"worker": 0, "clock": 1, "seconds": 0.0}),
        (stop, {"worker": 0, "clock": 1, "seconds": float("inf")}),
        (stop, {"clock": 1, "seconds": 1.0}),
        (stop, {"worker": 0, "shard": 0, "clock": 1, "seconds": 1.0}),
        (slow, {"worker": 0, "factor": 0}),
        (cut, {"worker": 1, "seconds": 5}),
        (cut, {"shard": 1, "seconds": 5}),
        (cut, {"worker": 1, "shard": 0, "coordinator": True, "seconds": 5}),
        (cut, {"worker": 1, "shards": (0, 1), "seconds": 5}),
        (cut, {"worker": 1, "shard": 0, "seconds": -1}),
    ],
)
def test_scripted_fault_bad_input_is_refused(
    call: Callable[..., ScriptedFault], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        call(**options)


def test_set_policy_takes_a_policy_object() -> None:
    with pytest.raises(TypeError, match=r"such as Async\(\)"):
        set_policy("Async", clock=1)  # what is tested


class Sends:
    """A client in the middle of a step."""

    def __init__(self, rank: int, stepping: int | None) -> None:
        self.rank = rank
        self.stepping = stepping


@each_case(
    ("fault", "rank", "clock", "due"),
    [
        (kill(worker=1, clock=7), 1, 7, True),
        (kill(worker=1, clock=7), 1, 6, False),
        (kill(worker=1, clock=7), 1, None, False),
        (kill(worker=1, clock=7), 0, 7, False),
        (join(clock=3), 2, 3, True),
        (join(clock=3), -1, 3, False),
    ],
)
def test_scripted_fault_is_due_in_the_named_step(
    fault: ScriptedFault, rank: int, clock: int | None, due: bool
) -> None:
    client: Any = Sends(rank, clock)
    assert fault.is_due(client) is due


def test_add_whole_leaves_pushes_whole_under_every_scale() -> None:
    import numpy as np

    from paramserve.rules import PushInfo, Run

    rule, value = AddWhole(), np.zeros(4)
    rule.prepare(value.dtype)
    push = PushInfo(0, 0, 0, 0, 1.0, 0.25)
    rule.apply(value, np.array([0.0, 1.0, 2.0, 4.0]), (), rule.hyper(), [Run(0, 4, 0)], push)
    np.testing.assert_array_equal(value, [0.0, 1.0, 2.0, 4.0])


def test_leaves_whole_names_the_policies_that_scale_nothing() -> None:
    assert all(map(leaves_whole, (Sync(reduce="sum", backup=1), Async(), BoundedStaleness(2))))
    assert not any(
        map(
            leaves_whole,
            (Sync(), Async(damping=Inverse()), Async(momentum="corrected"), Buffered(3)),
        )
    )
