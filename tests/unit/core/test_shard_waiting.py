"""A waiting rule of one's own: pulls are held until the slowest worker is near enough."""

from __future__ import annotations

import numpy as np
from tests.suites import each_case
from tests.unit.core.rig import Rig, block_spec, done, payload

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.events import Inquired
from paramserve.messages import Done, Gradient, Inquire, ReadTarget, Step, Waiting

FAST, SLOW, READER = 1, 2, 9


def rig(bound: int) -> Rig:
    one = Rig(BoundedStaleness(bound))
    one.join(FAST, 0)
    one.join(SLOW, 1)
    one.join(READER)
    one.define(FAST, block_spec((1,)))
    return one


def test_bounded_is_a_policy() -> None:
    assert isinstance(BoundedStaleness(1), Policy)


@each_case("bound", [0, 1, 3])
def test_bound_fast_worker_reads_so_many_clocks_ahead_and_no_more(bound: int) -> None:
    one = rig(bound)
    for clock in range(bound):
        done(one.step(FAST, {0: [1.0]}, [0], clock=clock))
    assert one.step(FAST, {0: [1.0]}, [0], clock=bound).replies == []
    assert one.value() == [bound + 1.0], "the push is applied, only the read waits"


def test_bound_held_read_is_released_by_the_slowest_and_has_its_update() -> None:
    one = rig(0)
    one.step(FAST, {0: [1.0]}, [0])
    effects = one.step(SLOW, {0: [10.0]}, [0])
    assert sorted(client for client, _ in effects.replies) == [FAST, SLOW]
    for client, answer in effects.replies:
        assert answer.payload is not None
        assert answer.payload.view(np.float64)[0] == 11.0, client
    replies = {client: answer.message for client, answer in effects.replies}
    released = replies[FAST]
    assert isinstance(released, Done)
    assert (released.version, released.clock) == (2, 1)


def test_bound_held_read_in_shared_memory_is_written_at_its_release() -> None:
    one = rig(0)
    arena = np.zeros(128, np.uint8)
    arena.view(np.float64)[0] = 1.0
    step = Step(0, 0, 0, True, (Gradient(0, 1, 0),), (ReadTarget(0, 1, 64),))
    assert one.send(FAST, step, memory={1: arena}).replies == []
    one.step(SLOW, {0: [10.0]})
    assert arena.view(np.float64)[8] == 11.0


def test_bound_slowest_worker_is_never_held() -> None:
    one = rig(0)
    for clock in range(3):
        one.step(FAST, {0: [1.0]}, clock=clock)
    for clock in range(3):
        assert payload(one.step(SLOW, {0: [1.0]}, [0], clock=clock))[0] == 4.0 + clock


def test_bound_requests_behind_a_held_one_follow_in_order() -> None:
    one = rig(0)
    one.step(FAST, {0: [1.0]}, [0])
    assert one.step(FAST, {0: [2.0]}, [0], clock=1).replies == []
    assert one.value() == [1.0]
    one.step(SLOW, {0: [10.0]})
    assert one.value() == [13.0]
    assert len(one.answers(FAST)) == 2, "the define, and the first of the two steps"
    one.step(SLOW, {0: [10.0]}, clock=1)
    assert [reply.seq for reply in one.answers(FAST)] == [1, 2, 3]


def test_bound_release_may_not_be_enough() -> None:
    one = rig(0)
    for clock in range(2):
        one.step(FAST, clock=clock)
    assert one.step(FAST, pull=[0], clock=2, tick=False).replies == []
    one.step(SLOW)
    assert len(one.answers(FAST)) == 3
    one.step(SLOW, clock=1)
    assert len(one.answers(FAST)) == 4


def test_bound_release_that_is_not_enough_keeps_what_the_push_has_done() -> None:
    one = rig(0)
    one.step(FAST)
    one.step(FAST, {0: [1.0]}, [0], clock=1, base=0)
    one.step(SLOW, {0: [1.0]})
    assert len(one.answers(FAST)) == 2
    one.step(SLOW, clock=1)
    assert one.answers(FAST)[-1] == Done(3, version=2, clock=2)


def test_bound_does_not_hold_readers_without_a_rank() -> None:
    one = rig(0)
    for clock in range(3):
        one.step(FAST, {0: [1.0]}, clock=clock)
    assert payload(one.step(READER, pull=[0], clock=99, tick=False))[0] == 3.0


def test_bound_held_read_of_another_group_stays_held() -> None:
    one = rig(0)
    one.define(SLOW, block_spec((1,), number=1, group=1))
    assert one.step(FAST, {0: [1.0]}, [0]).replies == []
    one.step(SLOW, {1: [1.0]}, group=1)
    assert len(one.answers(FAST)) == 1


def test_bound_death_of_the_slowest_releases_the_read() -> None:
    one = rig(0)
    one.step(FAST, {0: [1.0]}, [0])
    one.tell(one.members((FAST, 1, "live"), (SLOW, 1, "dead")))
    assert isinstance(one.answers(FAST)[-1], Done)


def test_bound_read_of_the_slowest_has_what_those_push_whom_it_releases() -> None:
    one = rig(0)
    assert one.step(FAST, {0: [1.0]}, [0]).replies == []
    assert one.step(FAST, {0: [1.0]}, clock=1).replies == [], "behind the read that is held"
    effects = one.step(SLOW, {0: [10.0]}, [0])
    (answer,) = (answer for client, answer in effects.replies if client == SLOW)
    assert isinstance(answer.message, Done)
    assert answer.payload is not None
    assert (answer.message.version, answer.payload.view(np.float64)[0]) == (3, 12.0)


@each_case(
    ("policy", "held"),
    [
        (BoundedStaleness(0), True),
        (Sync(), True),
        (Sync(timeout_s=60.0), False),
        (Async(), False),
    ],
    ids=repr,
)
def test_inquiry_says_whether_only_a_step_of_the_missing_ends_the_wait(
    policy: Policy, held: bool
) -> None:
    """Not where the policy may do without them, nor where nothing is held."""
    one = Rig(policy)
    for client, rank in ((FAST, 0), (SLOW, 1)):
        one.join(client, rank)
    one.define(FAST, block_spec((1,)))
    one.step(FAST, {0: [1.0]}, [0])
    (asked,) = one.happen(Inquired(FAST, Inquire(0))).replies
    assert isinstance(asked[1].message, Waiting)
    assert asked[1].message.held is held
    if held:
        assert [rank for rank, _ in asked[1].message.missing] == [1]
