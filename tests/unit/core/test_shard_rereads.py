"""A request that is repeated because its answer was lost: what it changed stays, what it read is
read again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.rig import Rig, block_spec, done, payload

from paramserve.consistency.built_in import Async, Sync
from paramserve.core.events import DeadlineReached, Effects
from paramserve.core.replies import gathered
from paramserve.messages import (
    Assign,
    Done,
    Fetch,
    Gradient,
    ReadTarget,
    ShardRequest,
    Step,
    TakeSnapshot,
    Watch,
)

WORKER, OTHER, READER = 1, 2, 9
ONES = {0: gathered([np.ones(4)])}


def rig(**options: Any) -> Rig:
    """One shard with block 0 of four elements, two workers and a reader."""
    one = Rig(**options)
    one.join(WORKER, 0)
    one.join(OTHER, 1)
    one.join(READER)
    one.define(WORKER, block_spec((4,)))
    return one


def step(seq: int, clock: int = 0, oldest: int = 0, arena: int = 0) -> Step:
    push, pull = (Gradient(0, arena, 0),), (ReadTarget(0, arena, 0),)
    return Step(seq, 0, clock, True, push, pull, oldest=oldest)


def test_repeated_pull_has_the_values_of_now_and_their_version() -> None:
    one = rig()
    first = one.again(WORKER, step(2), memory=ONES)
    assert (payload(first), done(first).version) == ([1.0] * 4 + [0.0] * 4, 1)
    one.step(OTHER, {0: [1] * 4})
    again = one.again(WORKER, step(2), memory=ONES)
    assert (payload(again), done(again).version) == ([2.0] * 4 + [0.0] * 4, 2)
    assert done(again).staleness == done(first).staleness
    assert one.value() == [2.0] * 4, "the push is applied once"


def test_repeated_pull_into_shared_memory_leaves_what_was_written_there() -> None:
    one = rig()
    arena = np.zeros(64, np.uint8)
    arena.view(np.float64)[:4] = 1.0
    first = one.again(WORKER, step(2, arena=1), memory={1: arena})
    one.step(OTHER, {0: [1] * 4})
    arena.fill(7)  # the answer may have been read, and the slot used again
    again = one.again(WORKER, step(2, arena=1), memory={1: arena})
    assert again.replies == first.replies
    assert (arena == 7).all()


def test_repeated_sync_pull_has_the_values_of_its_own_clock() -> None:
    one = rig(policy=Sync(reduce="sum"))
    for seq, clock in ((2, 0), (3, 1)):  # the next step is sent before the answer is read
        one.again(WORKER, step(seq, clock, oldest=2), memory=ONES)
        one.step(OTHER, {0: [1] * 4}, clock=clock)
    assert one.value() == [4.0] * 4
    again = one.again(WORKER, step(2, oldest=2), memory=ONES)
    assert (payload(again)[:4], done(again).version) == ([2.0] * 4, 1)
    again = one.again(WORKER, step(3, 1, oldest=2), memory=ONES)
    assert (payload(again)[:4], done(again).version) == ([4.0] * 4, 2)


def values_of(effects: Effects, client: int) -> weakref.ref[Any]:
    """The values that went out to a client."""
    (found,) = (answer.payload for to, answer in effects.replies if to == client)
    assert found is not None
    return weakref.ref(found)


def settle(one: Rig) -> None:
    """All that was to be sent is sent."""
    one.replies.clear()
    one.happen(DeadlineReached())
    gc.collect()


@each_case("request_", [Fetch(0, 0, 0, 0, 0), step(0)])
def test_values_that_went_out_are_kept_by_no_shard(request_: ShardRequest) -> None:
    one = rig(policy=Async())
    values = values_of(one.send(READER, request_, memory=ONES), READER)
    settle(one)
    assert values() is None


def test_values_of_a_sync_step_are_kept_until_a_step_says_that_they_were_read() -> None:
    one = rig(policy=Sync(reduce="sum"))
    one.again(WORKER, step(2), memory=ONES)
    values = values_of(one.step(OTHER, {0: [1] * 4}), WORKER)
    settle(one)
    assert values() is not None
    one.again(WORKER, step(3, 1, oldest=3), memory=ONES)
    settle(one)
    assert values() is None


def test_repeated_fetch_reads_again() -> None:
    one = rig()
    fetch = Fetch(1, 0, 0, 0, 0)
    assert payload(one.again(READER, fetch))[:4] == [0.0] * 4
    one.step(WORKER, {0: [1] * 4})
    again = one.again(READER, fetch)
    assert (payload(again)[:4], done(again).version, done(again).counts) == ([1.0] * 4, 1, (1,))


def test_repeated_snapshot_is_the_same_as_long_as_it_is_kept() -> None:
    one = rig()
    one.again(READER, Watch(1, 0, 1, 2))
    one.step(WORKER, {0: [1] * 4})
    take = TakeSnapshot(2, 0, 0, (ReadTarget(0, 0, 0),))
    for clock in (1, 2):
        answer = one.again(READER, take)
        assert (done(answer).taken, payload(answer)[0]) == (1, 1.0)
        one.step(WORKER, {0: [1] * 4}, clock=clock)
    answer = one.again(READER, take)
    assert (done(answer).taken, payload(answer)[0]) == (2, 2.0), "its memory was needed"


def test_number_repeated_with_another_request_changes_nothing() -> None:
    one = rig()
    one.again(READER, Fetch(1, 0, 0, 0, 0))
    answer = one.again(READER, Assign(1, 0, 0, 0, 0), memory=ONES)
    assert done(answer) == Done(1, counts=(0,))
    assert one.value() == [0.0] * 4


def test_repeated_read_that_names_what_is_not_there_is_refused_and_the_next_one_is_good() -> None:
    one = rig()
    one.again(WORKER, step(2), memory=ONES)
    bad = structs.replace(step(2), pull=(ReadTarget(5, 0, 0),))
    message = one.again(WORKER, bad, memory=ONES).replies[0][1].message
    assert (message.kind, message.applied) == ("UnknownName", "unknown")
    assert done(one.again(WORKER, step(2), memory=ONES)).version == 1
