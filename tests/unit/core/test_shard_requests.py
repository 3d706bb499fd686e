"""What one shard does with numbered requests: once, in order, and bad ones not at all."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.rig import PULLED, Rig, block_spec, done, gathered, payload, refused

from paramserve.config import Limits, RuleSpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.core import shard as shard_module
from paramserve.core.events import ClientBye, ClientGone, ClientHere, DeadlineReached
from paramserve.core.shard_sessions import SESSION_KEEP_S
from paramserve.messages import (
    Assign,
    Define,
    Done,
    Fetch,
    Gradient,
    ReadTarget,
    ShardRequest,
    Step,
    TakeSnapshot,
    Watch,
)
from paramserve.rules import SGD

WORKER, OTHER, READER = 1, 2, 9


def rig(**options: Any) -> Rig:
    """One shard with block 0 of four elements, two workers and a reader."""
    one = Rig(**options)
    one.join(WORKER, 0)
    one.join(OTHER, 1)
    one.join(READER)
    one.define(WORKER, block_spec((3,), (1,)))
    return one


def step(seq: int, clock: int = 0) -> Step:
    return Step(seq, 0, clock, True, (Gradient(0, 0, 0),), ())


ONES = {0: gathered([np.ones(4)])}


# --- exactly once


def test_repeated_push_is_answered_again_and_applied_once() -> None:
    one = rig()
    first = one.again(WORKER, step(2), memory=ONES)
    again = one.again(WORKER, step(2), memory=ONES)
    assert done(first) == done(again)
    assert one.value() == [1.0] * 4


def test_gap_drops_the_connection_and_uses_up_no_number() -> None:
    one = rig()
    assert one.again(WORKER, step(3), memory=ONES).drops == [WORKER]
    assert one.value() == [0.0] * 4
    done(one.again(WORKER, step(2), memory=ONES))


def test_request_of_an_unknown_client_drops_the_connection() -> None:
    assert rig().again(77, step(1), memory=ONES).drops == [77]


def test_number_older_than_the_outcomes_is_unknown() -> None:
    one = rig()
    for clock in range(4):
        one.again(WORKER, step(clock + 2, clock), memory=ONES)
    error = refused(one.again(WORKER, step(1), memory=ONES))
    assert error.applied == "unknown"
    assert one.value() == [4.0] * 4


def test_refusal_uses_up_its_number() -> None:
    one = rig()
    bad = structs.replace(step(2), group=5)
    assert refused(one.again(WORKER, bad)).failed == refused(one.again(WORKER, bad)).failed
    done(one.again(WORKER, step(3), memory=ONES))


def test_session_outlives_its_connection() -> None:
    one = rig()
    done(one.again(WORKER, step(2), memory=ONES))
    one.happen(ClientGone(WORKER))
    one.happen(ClientGone(77))
    one.join(WORKER, 0)
    done(one.again(WORKER, step(2), memory=ONES))
    assert one.value() == [1.0] * 4


def test_goodbye_forgets_the_session() -> None:
    one = rig()
    one.send(READER, Watch(0, 0, 1, 5))
    one.happen(ClientBye(READER))
    one.happen(ClientBye(READER))
    one.happen(ClientBye(WORKER))
    assert set(one.shards[0].sessions.by_client) == {OTHER}
    assert set(one.shards[0].sessions.workers) == {1}
    assert one.again(READER, step(2)).drops == [READER]


def test_reader_that_is_gone_for_long_is_forgotten() -> None:
    one = rig()
    one.happen(ClientGone(READER))
    one.happen(ClientGone(WORKER))
    one.now = SESSION_KEEP_S - 0.1
    one.happen(DeadlineReached())
    assert READER in one.shards[0].sessions.by_client
    one.now = SESSION_KEEP_S
    one.happen(DeadlineReached())
    assert set(one.shards[0].sessions.by_client) == {WORKER, OTHER}, (
        "a live worker may still come back"
    )


@each_case("window", [0, Limits().outstanding_max + 1])
def test_window_out_of_bounds_is_not_admitted(window: int) -> None:
    effects = rig().happen(ClientHere(5, 0, -1, window))
    assert effects.refused is not None
    assert "outstanding_max" in str(effects.refused)


def test_clients_max_is_kept() -> None:
    one = rig(limits=Limits(clients_max=3))
    effects = one.happen(ClientHere(5, 0, -1, 4))
    assert effects.refused is not None
    assert "clients_max" in str(effects.refused)
    one.join(READER)


# --- values


def test_push_pull_writes_the_values() -> None:
    one = rig()
    one.define(READER, block_spec((2,), number=1), [5.0, 6.0])
    effects = one.step(WORKER, {0: [1, 2, 3, 4]}, [1, 0])
    assert payload(effects) == [5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0]
    reply = done(effects)
    assert (reply.version, reply.clock, reply.staleness) == (1, 0, 0)


@each_case("active", [None, (1,)])
def test_push_pull_writes_at_its_places(active: Any) -> None:
    one = rig()
    one.define(READER, block_spec((2,), number=1), [5.0, 6.0])
    arenas = {1: np.zeros(256, np.uint8), 3: np.zeros(256, np.uint8)}
    arenas[3].view(np.float64)[8:12] = 2.0
    message = Step(
        0,
        0,
        0,
        True,
        (Gradient(0, 3, 64, active),),
        (ReadTarget(0, 1, 64), ReadTarget(1, 3, 128)),
    )
    done(one.send(WORKER, message, memory=arenas))
    expected = [2.0] * 4 if active is None else [0.0, 0.0, 0.0, 2.0]
    assert arenas[1].view(np.float64)[8:12].tolist() == expected
    assert arenas[3].view(np.float64)[16:18].tolist() == [5.0, 6.0]
    assert one.value() == expected


def test_parts_lie_where_their_offsets_say() -> None:
    one = rig()
    one.define(READER, block_spec((2,), number=1), [5.0, 6.0])
    push = (Gradient(0, 0, 64), Gradient(1, 0, 0))
    pull = (ReadTarget(0, PULLED, 64), ReadTarget(1, PULLED, 0))
    memory = {0: gathered([np.array([1.0, 2.0]), np.arange(4.0)])}
    effects = one.send(WORKER, Step(0, 0, 0, True, push, pull), memory=memory)
    assert payload(effects) == [6, 8, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 0, 0]


def test_skipped_push_still_reads() -> None:
    one = rig(policy=Async(on_nonfinite="skip"))
    effects = one.step(WORKER, {0: [math.inf, 0, 0, 0]}, [0])
    reply = done(effects)
    assert (reply.skipped, reply.version) == (True, 0)
    assert payload(effects)[:4] == [0.0] * 4
    assert done(one.step(WORKER, skip=True, clock=1)).skipped
    assert one.shards[0].report()[0].skipped == 2


def test_tick_alone_moves_the_clock() -> None:
    one = rig()
    one.step(WORKER)
    assert one.shards[0].report()[0].clocks == ((0, 1), (1, 0))
    one.step(READER, {0: [1] * 4})
    assert one.shards[0].report()[0].clocks == ((0, 1), (1, 0)), "a reader holds up no worker"


def test_staleness_is_counted_by_rank() -> None:
    one = rig()
    one.step(WORKER, {0: [1] * 4}, base=0)
    one.step(OTHER, {0: [1] * 4}, base=0)
    reply = done(one.step(OTHER, {0: [1] * 4}, base=0, clock=1))
    assert reply.staleness == 2
    assert one.shards[0].report()[0].staleness == ((0, 1, 0, 0), (1, 2, 3, 2))


# --- define, assign, fetch, snapshots


def test_define_of_the_higher_attempt_stands() -> None:
    one = rig()
    one.define(READER, block_spec((2,), number=1), [1.0, 1.0], attempt=2)
    one.define(OTHER, block_spec((2,), number=1), [7.0, 7.0], attempt=1)
    assert one.value(1) == [1.0, 1.0]
    one.define(OTHER, block_spec((2,), number=1), [7.0, 7.0], attempt=3)
    assert one.value(1) == [7.0, 7.0]


@each_case(
    ("spec", "kind"),
    [
        (block_spec((4,)), "DefineMismatch"),
        (block_spec((4,), number=1, group=8, cuts=(0, 3)), "ShapeMismatch"),
        (block_spec((4,), number=1, group=8, dtype="int64"), "DtypeMismatch"),
        (structs.replace(block_spec((4,), number=1), rule=RuleSpec("Magic")), "UnknownRule"),
        (
            structs.replace(block_spec((4,), number=1), rule=RuleSpec("SGD", {"lr": -1.0})),
            "ParamServeError",
        ),
        (block_spec((9,), number=1, group=8), "ShapeMismatch"),
    ],
)
def test_define_that_cannot_be_is_refused_whole(spec: Any, kind: str) -> None:
    one = rig()
    effects = one.send(WORKER, Define(0, spec, 1, 1, 0), memory={1: ONES[0]})
    assert type(refused(effects)).__name__ == kind
    assert set(one.shards[0].blocks) == {0}
    assert set(one.shards[0].groups) == {0}


def test_define_without_memory_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    one = rig()
    monkeypatch.setattr(shard_module, "ShardBlock", no_memory)
    error = refused(one.send(WORKER, Define(0, block_spec((4,), number=1), 1, 0, 0), memory=ONES))
    assert type(error).__name__ == "Overloaded"


def test_assign_and_fetch_carry_values_state_and_counts() -> None:
    one = rig()
    one.define(WORKER, block_spec((3,), (1,), number=1, rule=SGD(lr=1.0, momentum=0.9)))
    part = {0: gathered([np.arange(4.0)])}
    done(one.send(READER, Assign(0, 1, 1, 0, 0, (1,), (5, 6)), memory=part))
    effects = one.send(READER, Fetch(0, 1, 1, 0, 0))
    assert payload(effects)[:4] == [0.0, 0.0, 0.0, 3.0]
    assert done(effects).counts == (5, 6)
    arena = np.zeros(128, np.uint8)
    done(one.send(READER, Assign(0, 1, 0, 0, 0), memory=part))
    done(one.send(READER, Fetch(0, 1, 0, 2, 64), memory={2: arena}))
    assert arena.view(np.float64)[8:12].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_fetch_state_that_is_not_there_is_refused() -> None:
    assert "0 state arrays" in str(refused(rig().send(READER, Fetch(0, 0, 1, 0, 0))))


def test_snapshots_are_kept_at_every_nth_version_and_dropped_when_not_taken() -> None:
    one = rig()
    done(one.send(READER, Watch(0, 0, 2, 2)))
    take = TakeSnapshot(0, 0, 0, (ReadTarget(0, 0, 0),))
    nothing = one.send(READER, take)
    assert (done(nothing).snapshot, nothing.replies[0][1].payload) == (-1, None)
    for clock in range(7):
        one.step(WORKER, {0: [1] * 4}, clock=clock)
    first = one.send(READER, take)
    assert (done(first).snapshot, done(first).dropped, payload(first)[0]) == (4, 1, 4.0)
    arena = np.zeros(64, np.uint8)
    second = structs.replace(take, after=4, pull=(ReadTarget(0, 1, 0),))
    assert done(one.send(READER, second, memory={1: arena})).snapshot == 6
    assert arena.view(np.float64)[:4].tolist() == [6.0] * 4
    assert done(one.send(READER, structs.replace(take, after=6))).snapshot == -1


@each_case("policy", [Async(), Sync(reduce="sum")])
def test_snapshot_that_finds_no_memory_is_dropped_and_the_update_stays(
    monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    one = rig(policy=policy)
    done(one.send(READER, Watch(0, 0, 1, 5)))
    with monkeypatch.context() as patch:
        patch.setattr(np, "copy", no_memory)
        for client in (WORKER, OTHER):
            one.step(client, {0: [1] * 4})
    assert all(isinstance(one.answers(client)[-1], Done) for client in (WORKER, OTHER))
    assert one.value() == [2.0] * 4
    taken = done(one.send(READER, TakeSnapshot(0, 0, 0, ())))
    assert (taken.snapshot, taken.dropped) == (-1, one.shards[0].groups[0].state.version)


def test_snapshot_keep_is_bounded_and_zero_ends_watching() -> None:
    one = rig(limits=Limits(snapshots_max=3))
    done(one.send(READER, Watch(0, 0, 1, 1000)))
    assert one.shards[0].groups[0].state.watching[READER].keep == 3
    done(one.send(READER, Watch(0, 0, 0, 0)))
    assert "watch() first" in str(refused(one.send(READER, TakeSnapshot(0, 0, 0, ()))))


def test_snapshot_of_a_block_defined_later_is_refused() -> None:
    one = rig()
    one.send(READER, Watch(0, 0, 1, 5))
    one.step(WORKER, {0: [1] * 4})
    one.define(WORKER, block_spec((2,), number=1))
    error = refused(one.send(READER, TakeSnapshot(0, 0, 0, (ReadTarget(1, 0, 0),))))
    assert type(error).__name__ == "UnknownName"


# --- bad input is refused whole


def push(*headers: Gradient, pull: tuple[ReadTarget, ...] = (), **changes: Any) -> Step:
    return structs.replace(Step(0, 0, 0, True, headers, pull), **changes)


ARENA = np.zeros(256, np.uint8)
GOOD = Gradient(0, 1, 0)
BAD: list[tuple[ShardRequest, dict[int, Any], str]] = [
    (push(GOOD, group=3), {1: ARENA}, "UnknownName"),
    (push(Gradient(7, 1, 0)), {1: ARENA}, "UnknownName"),
    (push(GOOD, Gradient(2, 1, 0)), {1: ARENA}, "UnknownName"),
    (push(GOOD, GOOD), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, Gradient(1, 1, 0)), {1: ARENA}, "ParamServeError"),
    (push(Gradient(0, 1, 8)), {1: ARENA}, "ShapeMismatch"),
    (push(Gradient(0, 1, 256)), {1: ARENA}, "ShapeMismatch"),
    (push(Gradient(0, 1, -64)), {1: ARENA}, "ShapeMismatch"),
    (push(Gradient(0, 2, 0)), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, pull=(ReadTarget(0, 1, 256),)), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, pull=(ReadTarget(0, 1, -64),)), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, pull=(ReadTarget(0, 2, 0),)), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, pull=(ReadTarget(0, 1, 0, room=64),)), {1: ARENA}, "ShapeMismatch"),
    (push(Gradient(0, 1, 0, (0, 5))), {1: ARENA}, "ShapeMismatch"),
    (push(Gradient(0, 1, 0, None, (0.5,))), {1: ARENA}, "ParamServeError"),
    (push(GOOD, pull=(ReadTarget(7, 1, 0),)), {1: ARENA}, "UnknownName"),
    (push(GOOD, pull=(ReadTarget(0, 1, 250),)), {1: ARENA}, "ShapeMismatch"),
    (push(GOOD, weight=0.0), {1: ARENA}, "ParamServeError"),
    (push(GOOD, weight=math.nan), {1: ARENA}, "ParamServeError"),
    (push(GOOD, clip_norm=-1.0), {1: ARENA}, "ParamServeError"),
    (Assign(0, 0, 0, 2, 0), {}, "ShapeMismatch"),
    (Assign(0, 0, 1, 1, 0), {1: ARENA}, "ParamServeError"),
    (Assign(0, 7, 0, 1, 0), {1: ARENA}, "UnknownName"),
    (Fetch(0, 7, 0, 1, 0), {1: ARENA}, "UnknownName"),
    (Fetch(0, 0, 0, 1, 300), {1: ARENA}, "ShapeMismatch"),
    (Fetch(0, 0, 0, 2, 64), {}, "ShapeMismatch"),
    (Watch(0, 5, 1, 1), {}, "UnknownName"),
    (TakeSnapshot(0, 5, 0, ()), {}, "UnknownName"),
]


@each_case("policy", [Async(), Sync()], ids=["async", "sync"])
@each_case(("message", "memory", "kind"), BAD)
def test_bad_request_is_refused_and_nothing_changes(
    message: ShardRequest, memory: dict[int, Any], kind: str, policy: Any
) -> None:
    one = rig(policy=policy)
    one.define(WORKER, block_spec((4,), number=1, rule=None))
    one.define(WORKER, block_spec((4,), number=2, group=1))
    for arena in memory.values():
        arena.view(np.float64)[:] = 1.0
    effects = one.send(WORKER, message, memory=memory)
    if isinstance(policy, Sync) and isinstance(message, Step) and message.group == 0:
        assert effects.replies == [], "it ends its clock with the other worker's step"
        effects = one.step(OTHER, {0: [1.0] * 4})
        told = [(client, answer.message.failed) for client, answer in effects.replies]
        assert [client for client, _ in told] == [WORKER, OTHER]
        assert told[0][1] == told[1][1]
        assert "the step of rank 0 for clock 0" in told[0][1]
        del effects.replies[1]
    error = refused(effects)
    assert type(error).__name__ == kind
    assert error.applied == "no"
    assert one.value() == [0.0] * 4
    assert one.shards[0].groups[0].state.version == 0
    assert not one.shards[0].groups[0].state.collect.pending


@each_case("bad", [math.nan, math.inf, -math.inf])
def test_push_that_is_not_finite_is_refused_whole(bad: float) -> None:
    one = rig()
    one.define(WORKER, block_spec((1,), number=1))
    error = refused(one.step(WORKER, {1: [1.0], 0: [0.0, bad, 0.0, 0.0]}))
    assert type(error).__name__ == "NonFinite"
    assert "worker 0" in str(error)
    assert (one.value(0), one.value(1)) == ([0.0] * 4, [0.0])


def test_push_inactive_pieces_may_hold_anything() -> None:
    one = rig()
    done(one.step(WORKER, {0: [1.0, 1.0, 1.0, math.nan]}, active=[0]))
    assert one.value() == [1.0, 1.0, 1.0, 0.0]
    refused(one.step(WORKER, {0: [1.0, 1.0, 1.0, math.nan]}, active=[1]))


def test_memory_of_a_request_without_parts_is_ignored() -> None:
    reply = done(rig().send(WORKER, push(), memory={0: np.zeros(64, np.uint8)}))
    assert reply == Done(2, clock=0)
