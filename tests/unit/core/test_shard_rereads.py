"""A request that is repeated because its answer was lost: what it changed stays, and what was
written for it still lies in its client's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.rig import PULLED, PUSHED, Rig, block_spec, done, gathered, payload

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.events import Requested
from paramserve.core.request_memory import Memory
from paramserve.messages import (
    Assign,
    Done,
    Fetch,
    Gradient,
    ReadTarget,
    Step,
    TakeSnapshot,
    Watch,
)

WORKER, OTHER, READER = 1, 2, 9
ONES = {PUSHED: gathered([np.ones(4)])}


def rig(**options: Any) -> Rig:
    """One shard with block 0 of four elements, two workers and a reader."""
    one = Rig(**options)
    one.join(WORKER, 0)
    one.join(OTHER, 1)
    one.join(READER)
    one.define(WORKER, block_spec((4,)))
    return one


def step(seq: int, clock: int = 0) -> Step:
    push, pull = (Gradient(0, PUSHED, 0),), (ReadTarget(0, PULLED, 0),)
    return Step(seq, 0, clock, True, push, pull)


@each_case("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_repeated_pull_has_the_values_that_were_written(policy: Policy) -> None:
    one = rig(policy=policy)
    for seq, clock in ((2, 0), (3, 1)):  # the next step is sent before the answer is read
        one.again(WORKER, step(seq, clock), memory=ONES)
        one.step(OTHER, {0: [1] * 4}, clock=clock)
    assert one.value() == [4.0] * 4, "each push is applied once"
    answers = {message.seq: message for _, to, (message, _) in one.replies if to == WORKER}
    for seq, clock in ((2, 0), (3, 1)):
        again = one.again(WORKER, step(seq, clock), memory=ONES)
        first = 2.0 * (clock + 1) if isinstance(policy, Sync) else 2.0 * clock + 1.0
        assert payload(again) == [first] * 4 + [0.0] * 4
        assert done(again) == answers[seq]
    assert one.value() == [4.0] * 4


def test_repeated_pull_of_a_client_that_has_given_up_the_memory_has_no_values() -> None:
    one = rig()
    first = one.again(WORKER, step(2), memory=ONES)
    session = one.shards[0].sessions.by_client[WORKER]
    for arenas in ({}, {PULLED: np.zeros(8, np.uint8)}):
        session.mirror = memory = Memory(arenas, mirrored=True)
        ((_, answer),) = one.shards[0].step(Requested(WORKER, step(2), memory), one.now).replies
        assert (answer.message, answer.written) == (done(first), ())


def test_values_in_mapped_memory_are_not_sent_by_whatever_link_they_are_asked_for_again() -> None:
    one, arenas = rig(), {PULLED: np.zeros(64, np.uint8), **ONES}
    mapped, mirror = (
        Memory(arenas, mirrored=False),
        Memory({PULLED: arenas[PULLED] * 0}, mirrored=True),
    )
    one.shards[0].sessions.by_client[WORKER].mirror = mirror
    for memory in (mapped, mirror):  # unix, then TCP
        ((_, answer),) = one.shards[0].step(Requested(WORKER, step(2), memory), one.now).replies
        assert answer.written == ()
    assert arenas[PULLED].view(np.float64)[:4].tolist() == [1.0] * 4


def test_values_in_the_mirror_are_sent_by_whatever_link_they_are_asked_for_again() -> None:
    one, arenas = rig(), {PULLED: np.zeros(64, np.uint8), **ONES}
    mirror = Memory(arenas, mirrored=True)
    one.shards[0].sessions.by_client[WORKER].mirror = mirror
    for memory in (mirror, Memory({PULLED: arenas[PULLED] * 0}, mirrored=False)):  # TCP, then unix
        ((_, answer),) = one.shards[0].step(Requested(WORKER, step(2), memory), one.now).replies
        assert (answer.written, answer.mirror) == (((PULLED, 0, 32),), mirror)


def test_clock_of_a_client_that_names_other_arenas_meanwhile_is_decided_for_all() -> None:
    one = rig(policy=Sync(reduce="sum"))
    assert one.again(WORKER, step(2), memory=ONES).replies == []
    one.shards[0].sessions.by_client[WORKER].mirror = Memory({}, mirrored=True)
    one.step(OTHER, {0: [1] * 4})
    written = [each.payload for _, client, each in one.replies if client == WORKER][-1]
    assert written.view(np.float64)[:4].tolist() == one.value() == [2.0] * 4


def test_runs_of_an_outcome_are_forgotten_with_it() -> None:
    one = rig()
    session = one.shards[0].sessions.by_client[WORKER]
    for seq in range(2, 30):
        one.again(WORKER, step(seq, seq), memory=ONES)
    assert session._written.keys() == session._outcomes.keys()
    assert len(session._written) == session.requests


def test_repeated_fetch_has_what_was_written() -> None:
    one = rig()
    fetch = Fetch(1, 0, 0, PULLED, 0)
    assert payload(one.again(READER, fetch))[:4] == [0.0] * 4
    one.step(WORKER, {0: [1] * 4})
    again = one.again(READER, fetch)
    assert (payload(again)[:4], done(again).version, done(again).counts) == ([0.0] * 4, 0, (0,))


def test_repeated_snapshot_is_the_same_when_it_is_no_longer_kept() -> None:
    one = rig()
    one.again(READER, Watch(1, 0, 1, 2))
    one.step(WORKER, {0: [1] * 4})
    take = TakeSnapshot(2, 0, 0, (ReadTarget(0, PULLED, 0),))
    for clock in range(1, 4):
        answer = one.again(READER, take)
        assert (done(answer).snapshot, payload(answer)[0]) == (1, 1.0)
        one.step(WORKER, {0: [1] * 4}, clock=clock)


def test_number_repeated_with_another_request_changes_nothing() -> None:
    one = rig()
    one.again(READER, Fetch(1, 0, 0, PULLED, 0))
    answer = one.again(READER, Assign(1, 0, 0, PUSHED, 0), memory=ONES)
    assert done(answer) == Done(1, counts=(0,))
    assert one.value() == [0.0] * 4
    bad = structs.replace(step(1), pull=(ReadTarget(5, PULLED, 0),))
    assert done(one.again(READER, bad, memory=ONES)) == Done(1, counts=(0,))
