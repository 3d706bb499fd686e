"""Synchronous clocks over several shards: collected on each, decided by one, applied on all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import RESEND_S, Rig, block_spec, gathered, payload, refused

from paramserve.consistency.built_in import Sync
from paramserve.core import collecting, stepping
from paramserve.core.events import ClientBye, ClientHere, DeadlineReached, FromShard, Inquired
from paramserve.messages import (
    Acknowledge,
    Assign,
    Commit,
    Done,
    Gradient,
    GroupMembership,
    Inquire,
    JoinGroup,
    LogEntry,
    Prepare,
    Refused,
    Step,
    Vote,
    Waiting,
)
from paramserve.rules import SGD
from paramserve.rules.custom import CustomRule

A, B = 1, 2
"""Clients of ranks 0 and 1."""


@dataclass(frozen=True)
class Plus(CustomRule):
    """A user's rule: its update is prepared before the clock is decided."""

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value += gradient
        if (value >= 10).any():
            raise ArithmeticError("too large")


def rig(policy: Sync | None = None, shards: int = 2, **spec: Any) -> Rig:
    """Block 0 of two elements, one on each of the first two shards."""
    rules = {Plus.name: Plus}
    one = Rig(policy if policy is not None else Sync(reduce="sum"), shards=shards, rules=rules)
    one.join(A, 0)
    one.join(B, 1)
    cuts = {1: (0, 2), 2: (0, 1, 2), 3: (0, 1, 2, 2)}[shards]
    one.define(A, block_spec((1,), (1,), cuts=cuts, **spec))
    return one


def both(one: Rig, client: int, gradient: float, clock: int = 0, **options: Any) -> None:
    """A step to two shards, the same on each."""
    for shard in (0, 1):
        one.step(client, {0: [gradient]}, [0], shard=shard, clock=clock, **options)


def values(one: Rig) -> tuple[list[float], list[float]]:
    return one.value(0, 0), one.value(0, 1)


def committed(one: Rig) -> list[int]:
    return [shard.groups[0].state.committed for shard in one.shards]


# --- a clock


def no_memory(*args: object, **options: object) -> None:
    raise MemoryError


@each_case(
    ("module", "name", "applied", "value"),
    [(None, "write_rounded", "yes", 3.0), (collecting, "reduced", "unknown", 0.0)],
)
def test_clock_that_finds_no_memory_is_answered_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, applied: str, value: float
) -> None:
    """For the values that are read, after the update; or for the update itself."""
    one = rig(shards=1)
    with monkeypatch.context() as patch:
        block = one.shards[0].blocks[0]
        patch.setattr(block if module is None else module, name, no_memory)
        patch.setattr(block, "rounds", module is None)
        for client, gradient in ((A, 1.0), (B, 2.0)):
            one.step(client, {0: [gradient] * 2}, [0])
    told = [answer.message for _, _, answer in one.replies[-2:]]
    assert all(isinstance(message, Refused) for message in told)
    assert {(message.kind, message.applied) for message in told} == {("Overloaded", applied)}
    assert one.value(0, 0)[0] == value
    for client in (A, B):
        one.step(client, {0: [1.0] * 2}, [0], clock=1)
    assert (one.value(0, 0)[0], committed(one)) == (value + 2.0, [2])


def test_step_that_finds_no_memory_on_one_shard_is_refused_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = rig()
    with monkeypatch.context() as patch:
        patch.setattr(stepping, "gradients", no_memory)
        one.step(A, {0: [1.0]}, shard=1)
    one.step(A, {0: [1.0]}, shard=0)
    both(one, B, 2.0)
    one.deliver()
    told = [one.answers(client, shard)[-1] for client in (A, B) for shard in (0, 1)]
    assert all(isinstance(message, Refused) for message in told), told
    assert {(each.kind, each.applied) for each in told} == {("Overloaded", "no")}
    assert (committed(one), values(one)) == ([1, 1], ([0.0], [0.0]))


@each_case("active", [None, (0, 1)])
def test_clock_that_was_reported_needs_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, active: tuple[int, ...] | None
) -> None:
    one = rig()
    for client in (A, B):
        for shard in (0, 1):
            one.step(client, {0: [1.0]}, shard=shard, active=active)
    with monkeypatch.context() as patch:
        for name in ("empty", "zeros"):
            patch.setattr(np, name, no_memory)
        while one.wire:
            shard, message = one.wire.pop(0)
            one.wire += one.shards[shard].step(FromShard(message), one.now).peers
    assert (committed(one), values(one)) == ([1, 1], ([2.0], [2.0]))


def test_values_assigned_while_a_clock_is_under_vote_are_behind_it_and_no_rule_runs_again() -> None:
    one = rig(rule=Plus())
    one.join(9)
    both(one, A, 1.0)
    both(one, B, 2.0)
    assert [type(message) for _, message in one.wire] == [Vote], "shard 0 waits for it"
    for shard in (0, 1):
        one.send(9, Assign(0, 0, 0, 0, 0), shard, {0: gathered([np.array([10.0])])})
    one.deliver()
    assert values(one) == ([10.0], [10.0])
    assert committed(one) == [1, 1]
    assert all(isinstance(answer.message, Done) for _, _, answer in one.replies[-4:])


def test_shard_that_is_asked_for_its_vote_again_keeps_the_update_that_it_has_prepared() -> None:
    one = rig(rule=Plus())
    one.join(9)
    both(one, A, 1.0)
    both(one, B, 2.0)
    for shard in (0, 1):
        one.send(9, Assign(0, 0, 0, 0, 0), shard, {0: gathered([np.array([10.0])])})
    one.happen(FromShard(Prepare(0, 0, (A, B))), 1)
    one.deliver()
    assert values(one) == ([10.0], [10.0])
    assert all(isinstance(answer.message, Done) for _, _, answer in one.replies[-4:])


def test_values_assigned_while_a_clock_is_under_vote_are_what_a_rule_of_ours_updates() -> None:
    one = rig()
    one.join(9)
    both(one, A, 1.0)
    both(one, B, 2.0)
    for shard in (0, 1):
        one.send(9, Assign(0, 0, 0, 0, 0), shard, {0: gathered([np.array([10.0])])})
    one.deliver()
    assert values(one) == ([13.0], [13.0])


def test_clock_is_applied_when_all_workers_and_shards_have_it() -> None:
    one = rig()
    both(one, A, 1.0)
    assert one.wire == []
    one.step(B, {0: [2.0]}, [0], shard=1)
    assert [(to, type(message)) for to, message in one.wire] == [(0, Vote)]
    one.deliver()
    assert values(one) == ([0.0], [0.0]), "the lead has not seen B yet"
    one.step(B, {0: [2.0]}, [0], shard=0)
    assert values(one) == ([3.0], [0.0])
    one.deliver()
    assert values(one) == ([3.0], [3.0])
    assert committed(one) == [1, 1]
    for _, _, answer in one.replies[-2:]:
        assert answer.payload is not None
        assert answer.payload.view(np.float64)[0] == 3.0


def test_clock_of_one_shard_needs_no_message() -> None:
    one = rig(shards=1)
    assert one.step(A, {0: [1.0, 1.0]}).replies == []
    effects = one.step(B, {0: [1.0, 2.0]})
    assert len(effects.replies) == 2
    assert (effects.peers, effects.deadline) == ([], None)
    assert one.value() == [2.0, 3.0]


def test_pipelined_steps_follow_clock_by_clock() -> None:
    one = rig(shards=1)
    for clock in range(3):
        one.step(A, {0: [1.0, 0.0]}, clock=clock)
    for clock in range(3):
        one.step(B, {0: [0.0, 1.0]}, clock=clock)
    assert one.value() == [3.0, 3.0]
    assert [reply.clock for reply in one.answers(A)[1:]] == [1, 2, 3]


def test_mean_weighs_the_workers() -> None:
    one = rig(Sync(reduce="mean"), shards=1)
    one.step(A, {0: [1.0, 1.0]}, weight=1.0)
    one.step(B, {0: [5.0, 5.0]}, weight=3.0)
    assert one.value() == [4.0, 4.0]


def test_worker_without_a_gradient_ticks_along() -> None:
    one = rig(shards=1)
    one.step(A, {0: [1.0, 1.0]})
    one.step(B)
    assert one.value() == [1.0, 1.0]
    one.step(A, clock=1)
    one.step(B, clock=1)
    report = one.shards[0].report()[0]
    assert (report.version, report.clocks) == (1, ((0, 2), (1, 2)))


def test_workers_may_push_different_blocks() -> None:
    one = rig(shards=1)
    one.define(B, block_spec((1,), number=1))
    one.step(A, {0: [1.0, 1.0]})
    one.step(B, {1: [2.0]})
    assert (one.value(0), one.value(1)) == ([1.0, 1.0], [2.0])


def test_different_pieces_are_summed_where_they_are() -> None:
    one = rig(shards=1, rule=SGD(lr=1.0))
    one.step(A, {0: [1.0, 9.0]}, active=[0])
    one.step(B, {0: [1.0, 2.0]})
    assert one.value() == [-2.0, -2.0]
    assert one.shards[0].blocks[0].counts == [1, 1]


# --- what is decided for all


@each_case("on_nonfinite", ["refuse", "skip"])
def test_nan_on_one_shard_counts_on_all(on_nonfinite: Any) -> None:
    one = rig(Sync(reduce="sum", on_nonfinite=on_nonfinite))
    both(one, A, 1.0)
    one.step(B, {0: [math.nan]}, shard=0)
    one.step(B, {0: [1.0]}, shard=1)
    one.deliver()
    assert values(one) == ([0.0], [0.0])
    assert committed(one) == [1, 1]
    for reply in one.answers(A)[2:]:
        if on_nonfinite == "skip":
            assert isinstance(reply, Done)
            assert reply.skipped
        else:
            assert isinstance(reply, Refused)
            assert (reply.kind, reply.applied) == ("NonFinite", "no")
    both(one, A, 1.0, clock=1)
    both(one, B, 1.0, clock=1)
    one.deliver()
    assert values(one) == ([2.0], [2.0])


def test_clipping_goes_by_the_norm_over_all_shards() -> None:
    one = rig()
    one.define(A, block_spec((1,), number=1, cuts=(0, 1, 1)))
    one.step(A, {0: [3.0]}, shard=0, clip_norm=1.0)
    one.step(A, {0: [4.0]}, shard=1, clip_norm=1.0)
    one.step(B, shard=0)
    one.step(B, shard=1)
    one.deliver()
    assert one.value(0, 0) == pytest.approx([0.6], rel=1e-6)
    assert one.value(0, 1) == pytest.approx([0.8], rel=1e-6)


# --- lost, repeated and late messages


def test_lost_ready_is_repeated_after_its_deadline() -> None:
    one = rig()
    both(one, A, 1.0)
    both(one, B, 1.0)
    one.wire.clear()
    assert values(one) == ([0.0], [0.0])
    effects = one.happen(DeadlineReached(), 1)
    assert effects.deadline == RESEND_S
    assert one.wire == []
    one.now = RESEND_S
    assert one.happen(DeadlineReached(), 1).deadline == 2 * RESEND_S
    one.deliver()
    assert values(one) == ([2.0], [2.0])


def test_lost_commit_is_sent_again() -> None:
    one = rig()
    both(one, A, 1.0)
    both(one, B, 1.0)
    (ready,) = one.wire
    one.wire.clear()
    one.happen(FromShard(ready[1]), 0)
    one.wire.clear()
    assert values(one) == ([2.0], [0.0])
    one.now += RESEND_S
    one.happen(DeadlineReached(), 0)
    one.deliver()
    assert values(one) == ([2.0], [2.0])


def test_repeated_commit_is_applied_once() -> None:
    one = rig()
    both(one, A, 1.0)
    both(one, B, 1.0)
    one.deliver()
    one.happen(FromShard(LogEntry(1, Commit(0, 0, (A, B), 1.0))), 1)
    assert values(one) == ([2.0], [2.0])
    assert one.wire == [(0, Acknowledge(1, 1))], "the lead may not know it"


def test_messages_for_an_unknown_group_or_of_another_clock_are_ignored() -> None:
    one = rig()
    both(one, A, 1.0)
    for message in (
        Vote(7, 0, 1, (A,), True, False, 1.0, 0),
        LogEntry(9, Commit(0, 5, (A,), 1.0)),
        Acknowledge(7, 5),
        Prepare(0, 5, (A,)),
        Prepare(0, 0, (A,)),
    ):
        for shard in (0, 1):
            effects = one.happen(FromShard(message), shard)
            assert (effects.replies, effects.peers) == ([], [])
    one.happen(FromShard(Vote(0, 0, 0, (A,), True, False, 1.0, 0)), 1)
    assert one.wire == [], "only the lead takes what is ready"


def test_worker_that_died_between_two_shards_is_left_out() -> None:
    one = rig()
    both(one, A, 1.0)
    one.step(B, {0: [5.0]}, shard=1)
    one.deliver()
    one.tell(one.members((A, 1, "live"), (B, 1, "dead")))
    one.deliver()
    assert values(one) == ([1.0], [1.0])
    assert committed(one) == [1, 1]
    told = one.answers(B)[-1]
    assert isinstance(told, Refused)
    assert (told.kind, told.applied) == ("WorkerFenced", "no")


def test_last_worker_that_died_between_two_shards_leaves_nothing_waiting() -> None:
    one = rig()
    one.tell(one.members((A, 1, "left"), (B, 1, "live")))
    one.step(B, {0: [5.0]}, shard=1)
    one.deliver()
    one.tell(one.members((A, 1, "left"), (B, 1, "dead")))
    one.deliver()
    one.now = RESEND_S
    one.happen(DeadlineReached(), 1)
    one.deliver()
    assert committed(one) == [1, 1]
    assert values(one) == ([0.0], [0.0])
    assert isinstance(one.answers(B)[-1], Refused)


def test_two_incarnations_on_two_shards_are_not_one_contribution() -> None:
    newer = 3
    one = rig()
    one.step(B, {0: [5.0]}, shard=0)
    one.tell(one.members((A, 1, "live"), (B, 1, "dead")))
    one.join(newer, 1, incarnation=2)
    for shard in (0, 1):
        one.send(newer, JoinGroup(0, 0), shard)
        one.step(newer, {0: [7.0]}, shard=shard)
    assert one.answers(B, 0)[-1].kind == "WorkerFenced"
    both(one, A, 1.0)
    one.deliver()
    assert values(one) == ([8.0], [8.0])
    assert [one.answers(newer, shard)[1].skipped for shard in (0, 1)] == [False, False]


def test_worker_that_joins_before_the_clock_is_decided_belongs_to_it() -> None:
    newer = 3
    one = rig()
    one.tell(one.members((A, 1, "live"), (B, 1, "dead")))
    one.deliver()
    one.step(A, {0: [1.0]}, shard=1)
    (vote,) = one.wire
    assert vote[1].contributors == (A,)
    one.join(newer, 1, incarnation=2)
    for shard in (0, 1):
        one.send(newer, JoinGroup(0, 0), shard)
        one.step(newer, {0: [7.0]}, shard=shard)
    one.step(A, {0: [1.0]}, shard=0)
    one.deliver()
    assert values(one) == ([8.0], [8.0])
    assert [one.answers(newer, shard)[0].at for shard in (0, 1)] == [0, 0]
    assert [one.answers(newer, shard)[1].skipped for shard in (0, 1)] == [False, False]


def test_vote_by_an_older_decision_about_the_members_is_not_counted() -> None:
    joiner = 3
    one = rig(Sync(reduce="sum", timeout_s=1.0))
    both(one, A, 1.0)
    one.now = 1.0
    one.happen(DeadlineReached(), 1)
    ((_, vote),) = one.wire
    one.join(joiner, 2)
    one.send(joiner, JoinGroup(0, 0))
    one.happen(DeadlineReached(), 0)
    one.wire = []
    one.happen(FromShard(vote), 0)
    assert (one.wire, committed(one)) == ([], [0, 0])
    one.now += RESEND_S
    one.happen(DeadlineReached(), 0)
    sent = [message for shard, message in one.wire if shard == 1 and isinstance(message, LogEntry)]
    (decision,) = [message.decision for message in sent]
    assert isinstance(decision, GroupMembership)
    assert decision.members[-1] == (2, joiner, 1, 0), "it was lost"
    one.deliver()
    assert values(one) == ([1.0], [1.0])
    clocks = dict.fromkeys(range(3), 1)
    assert [each.groups[0].state.clocks for each in one.shards] == [clocks, clocks]


def test_client_that_said_goodbye_in_between_gets_no_answer() -> None:
    one = rig(shards=1)
    one.step(A, {0: [1.0, 1.0]})
    one.happen(ClientBye(A))
    effects = one.step(B, {0: [1.0, 1.0]})
    assert [client for client, _ in effects.replies] == [B]
    assert one.value() == [2.0, 2.0]


def test_held_step_that_is_sent_again_on_a_new_connection_is_answered_once() -> None:
    one = rig(shards=1)
    one.step(A, {0: [1.0, 1.0]})
    one.happen(ClientHere(A, 1, 0, 4))
    again = Step(2, 0, 0, True, (Gradient(0, 0, 0),), ())
    effects = one.again(A, again, memory={0: np.zeros(64, np.uint8)})
    assert (effects.replies, effects.drops) == ([], [])
    one.step(B, {0: [1.0, 1.0]})
    assert len(one.answers(A)) == 2
    assert one.value() == [2.0, 2.0]


# --- what no clock takes


def test_push_of_a_reader_is_refused() -> None:
    one = rig(shards=1)
    one.join(9)
    error = refused(one.step(9, {0: [1.0, 1.0]}))
    assert type(error).__name__ == "NotAMember"
    assert payload(one.step(9, pull=[0], tick=False))[:2] == [0.0, 0.0]


@each_case("options", [{"tick": False}, {"clock": 1}])
def test_push_without_a_tick_or_out_of_turn_is_refused(options: dict[str, Any]) -> None:
    error = refused(rig(shards=1).step(A, {0: [1.0, 1.0]}, **options))
    assert type(error).__name__ == "ProtocolError"


def test_pull_waits_for_the_clock_that_it_names() -> None:
    one = rig(shards=1)
    one.step(A, {0: [1.0, 1.0]})
    assert one.step(A, pull=[0], clock=1, tick=False).replies == []
    one.step(B, {0: [1.0, 1.0]})
    assert len(one.answers(A)) == 3


# --- why does it wait


def ask(one: Rig, group: int = 0, shard: int = 0) -> Waiting:
    effects = one.happen(Inquired(A, Inquire(group)), shard)
    (answer,) = (answer.message for _, answer in effects.replies)
    assert isinstance(answer, Waiting)
    return answer


def test_inquiry_names_who_is_missing() -> None:
    one = rig()
    assert ask(one).reason == "nothing is held here"
    both(one, A, 1.0)
    assert ask(one).missing == ((1, 0),)
    both(one, B, 1.0)
    assert "decision of shard 0" in ask(one, shard=1).reason
    assert "not defined" in ask(one, group=5).reason


def test_inquiry_at_rest_names_the_slowest() -> None:
    one = rig(shards=3)
    assert ask(one, shard=2).missing == ((0, 0), (1, 0))


def test_steps_that_wait_behind_each_other_in_many_groups_are_done_without_deep_recursion() -> None:
    """Two workers have sent a step of every group when the third one leaves, and each commit lets
    the next group's steps go on."""
    groups = 100
    one = Rig(Sync(reduce="sum"), workers=3)
    for client in (1, 2, 3):
        one.join(client, client - 1, window=groups)
    numbers = [*range(1, groups), 0]  # the last group that is told of the change is the first one
    for number in numbers:
        one.define(1, block_spec((1,), number=number, group=number))
    for client in (1, 2):
        for number in range(groups):
            one.step(client, {number: [1.0]}, group=number)
    one.happen(ClientBye(3))
    assert [one.value(number) for number in range(groups)] == [[2.0]] * groups
