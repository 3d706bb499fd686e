"""What a shard does under each kind of policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.group_rig import SUM, A, B, C, change, last, push, rig
from tests.unit.core.rig import Rig, block_spec, done, refused

from paramserve.config import RuleSpec
from paramserve.consistency.base import (
    Admission,
    Apply,
    GroupView,
    OnPush,
    Policy,
    Pull,
    Push,
    Wait,
)
from paramserve.consistency.built_in import (
    Adaptive,
    Async,
    BoundedStaleness,
    DelayCompensated,
    Sync,
)
from paramserve.consistency.registry import spec
from paramserve.core.events import ClientBye, ClientHere, DeadlineReached, FromShard, Inquired
from paramserve.core.group_state import READS_MAX
from paramserve.core.policy_epochs import CHANGES_MAX
from paramserve.core.stepping import adapted
from paramserve.errors import ProtocolError
from paramserve.messages import (
    Done,
    GroupPolicy,
    Inquire,
    JoinGroup,
    LogEntry,
    Paused,
    Refused,
    SetPolicy,
    SuspendMembership,
    Switch,
    Waiting,
)
from paramserve.rules.base import PushInfo
from paramserve.rules.torch_rule import TorchRule

# --- backup workers and deadlines


def test_backup_decides_without_the_last_worker_which_goes_on_with_the_present_clock() -> None:
    one = rig(Sync(reduce="sum", backup=1))
    push(one, A)
    assert one.value() == [0.0]
    push(one, B)
    assert one.value() == [2.0]
    push(one, A, 1)
    push(one, B, 1)
    push(one, C)
    late = last(one, C)
    assert (late.skipped, late.at) == (True, 2)
    assert one.value() == [4.0]
    push(one, C, 2)
    push(one, A, 2)
    assert one.value() == [6.0], "it takes part again"
    assert one.shards[0].report()[0].dropped == ((2, 1),)


def test_backup_late_on_one_shard_and_in_time_on_the_other_is_in_no_clock() -> None:
    one = rig(Sync(reduce="sum", backup=1), shards=2)
    push(one, A)
    push(one, B)
    push(one, C, 0, 1)
    one.deliver()
    push(one, C, 0, 0)
    assert [one.value(shard=shard) for shard in (0, 1)] == [[2.0], [2.0]]
    assert [last(one, C, shard).skipped for shard in (0, 1)] == [True, True]


def test_backup_shards_that_hold_different_pairs_agree_on_enough_of_them() -> None:
    one = rig(Sync(reduce="sum", backup=1), shards=2)
    push(one, A, 0, 0)
    push(one, B, 0, 0)
    push(one, B, 0, 1)
    push(one, C, 0, 1)
    one.deliver()
    assert [one.value(shard=shard) for shard in (0, 1)] == [[0.0], [0.0]], "only B is on both"
    push(one, A, 0, 1)
    one.deliver()
    assert [one.value(shard=shard) for shard in (0, 1)] == [[2.0], [2.0]]
    push(one, C, 0, 0)
    assert last(one, C, 0).skipped
    assert last(one, C, 1).skipped


def test_backup_never_decides_without_a_gradient() -> None:
    one = rig(Sync(backup=1), workers=2)
    one.tell(one.members((A, 1, "live"), (B, 1, "dead")))
    assert one.shards[0].groups[0].state.committed == 0
    push(one, A)
    assert one.value() == [1.0]


@each_case("shards", [1, 2])
def test_timeout_decides_with_those_who_came(shards: int) -> None:
    one = rig(Sync(reduce="sum", timeout_s=1.0), shards=shards)
    one.now = 5.0
    push(one, A)
    one.now = 5.5
    push(one, B)
    one.deliver()
    assert one.value() == [0.0]
    one.now = 6.0
    for shard in range(shards):
        effects = one.happen(DeadlineReached(), shard)
        assert effects.deadline is None or effects.deadline > 6.0
    one.deliver()
    assert [one.value(shard=shard) for shard in range(shards)] == [[2.0]] * shards


def test_adaptive_timeout_follows_the_median_of_late_steps() -> None:
    one = rig(Sync(reduce="sum", timeout_s=Adaptive(factor=2.0, least_s=0.01)))
    for clock in range(4):
        for client in (A, B, C):
            one.now += 0.1
            push(one, client, clock)
    # After a commit they came 0.1, 0.2 and 0.3 s later: the median is 0.2.
    one.now += 0.1
    began = one.now
    assert one.step(A, {0: [1.0]}, clock=4).deadline == pytest.approx(began + 0.4)


# --- each by itself


def test_drop_after_applies_up_to_it_and_drops_beyond() -> None:
    one = rig(Async(drop_after=1))
    push(one, A)
    push(one, A, 1, base=1)
    assert done(one.step(B, {0: [1.0]}, base=1)).staleness == 1
    assert one.value() == [3.0]
    stale = done(one.step(C, {0: [1.0]}, base=1))
    assert (stale.skipped, stale.staleness) == (True, 2)
    assert one.value() == [3.0]
    (group,) = one.shards[0].report()
    assert group.dropped == ((2, 1),)
    assert group.staleness == ((0, 2, 0, 0), (1, 1, 1, 1)), "of what was applied"


def test_factor_of_a_worker_scales_its_gradients() -> None:
    one = rig(Async())
    push(one, A, factor=0.5)
    push(one, B, factor=2.0)
    assert one.value() == [2.5]
    assert "factor" in str(refused(one.step(C, {0: [1.0]}, factor=float("nan"))))


# --- a policy of a user's


@dataclass(frozen=True)
class Moody(Policy):
    """Answers what it is told to, or raises."""

    answer: str = "nan"

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        if self.answer == "raise":
            raise KeyError("no rank")
        if self.answer == "none":
            return None  # the very mistake
        return Apply(float(self.answer))

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        return Wait(tuple(group.clocks))


@each_case("answer", ["nan", "-1", "inf", "none", "raise"])
def test_policy_with_a_wrong_answer_refuses_the_push_and_applies_nothing(answer: str) -> None:
    one = rig(Moody(answer))
    error = refused(one.step(A, {0: [1.0]}))
    assert type(error).__name__ == "PolicyFailed"
    assert error.applied == "no"
    assert "Moody" in str(error)
    assert one.value() == [0.0]


def test_policy_that_never_admits_leaves_the_pull_waiting_and_says_for_whom() -> None:
    one = rig(Moody("1"))
    assert one.step(A, {0: [1.0]}, [0]).replies == []
    effects = one.happen(Inquired(A, Inquire(0)))
    waiting = effects.replies[0][1].message
    assert isinstance(waiting, Waiting)
    assert waiting.missing == ((0, 1), (1, 0), (2, 0))
    assert "Moody does not let worker 0 read at clock 1" in waiting.reason


# --- marks, sizes


def test_marks_tell_what_is_in_the_values() -> None:
    one = rig(Async())
    push(one, A, mark=(7, 32))
    push(one, A, 1, mark=(7, 64))
    push(one, B, mark=(8, 10))
    assert one.shards[0].report()[0].marks == ((A, 7, 64), (B, 8, 10))


def test_marks_in_sync_wait_for_the_commit() -> None:
    one = rig(SUM, workers=2)
    push(one, A, mark=(7, 32))
    assert one.shards[0].report()[0].marks == ()
    push(one, B, mark=(8, 32))
    assert one.shards[0].report()[0].marks == ((A, 7, 32), (B, 8, 32))


def test_slowest_clock_is_kept_up_to_date_without_looking_at_all() -> None:
    one = rig(Async(), workers=3)
    group = one.shards[0].groups[0].state
    random = np.random.default_rng(1)
    clocks = [0, 0, 0]
    for _ in range(300):
        rank = int(random.integers(3))
        push(one, rank + 1, clocks[rank])
        clocks[rank] += 1
        assert group.slowest == min(clocks)


def test_older_incarnation_is_refused_after_its_policy_made_it_wait() -> None:
    one = rig(BoundedStaleness(0), workers=2)
    assert one.step(A, {0: [1.0]}, [0]).replies == []
    one.happen(ClientHere(8, 2, 0, 4))
    answer = one.answers(A)[-1]
    assert isinstance(answer, Refused)
    assert answer.applied == "yes"


def test_refused_step_ends_its_clock_all_the_same() -> None:
    one = rig(BoundedStaleness(0), workers=2)
    assert one.step(B, {0: [1.0]}, [0]).replies == []
    effects = one.step(A, {0: [float("nan")]})
    kinds = {client: type(answer.message) for client, answer in effects.replies}
    assert kinds == {A: Refused, B: Done}, "B waited for A's clock only"
    done(one.step(A, pull=[0], clock=1, tick=False))


def test_change_that_a_straggler_was_asleep_for_is_told_with_the_next_one() -> None:
    one = rig(Sync(reduce="sum", backup=1))
    for changed, client in ((Sync(reduce="mean", backup=1), 8), (Async(), 9)):
        change(one, changed, client)
        for _ in range(5):
            clock = one.shards[0].groups[0].state.committed
            push(one, A, clock)
            push(one, B, clock)
    push(one, C)
    assert [each.number for each in last(one, C).news] == [1, 2]


def test_compensation_of_a_block_that_was_read_with_an_older_version() -> None:
    one = Rig(DelayCompensated(lam=0.5), workers=2)
    one.join(A, 0)
    one.join(B, 1)
    for number in (0, 1):
        one.define(A, block_spec((1,), number=number))
    done(one.step(A, pull=[0, 1], tick=False))
    done(one.step(B, {0: [1.0]}, [0]))
    done(one.step(A, {0: [1.0]}, [0], base=0))  # 1 + 0.5 * (1 - 0): A reads block 0 only
    done(one.step(B, {0: [1.0]}, clock=1, base=2))
    done(one.step(A, {1: [2.0]}, clock=1, base=2))
    assert one.value(1) == [2.0], "no push had changed it since A read it"


def test_copies_are_few_and_end_with_the_policy() -> None:
    one = rig(DelayCompensated(), workers=2)
    for clock in range(20):
        done(one.step(A, {0: [1.0]}, clock=clock))
        done(one.step(B, pull=[0], tick=False))
    assert 0 < one.shards[0].report()[0].kept_bytes <= 8 * (READS_MAX + 1)
    change(one, Async())
    for clock in range(30):
        push(one, B, clock)
        one.step(B, pull=[0], tick=False, clock=clock + 1)
    assert one.shards[0].report()[0].kept_bytes == 0


@dataclass(frozen=True)
class Fussy(Policy):
    """Its check fails, and it fails when it is asked why a rank waits."""

    def check(self, workers: int) -> None:
        raise ZeroDivisionError("no workers")


def test_policy_whose_check_fails_refuses_the_change() -> None:
    one = Rig(Async(), workers=1, policies={"Fussy": Fussy})
    one.join(A, 0)
    one.define(A, block_spec((1,)))
    error = refused(one.send(A, SetPolicy(0, 0, spec(Fussy()))))
    assert type(error).__name__ == "PolicyFailed"
    assert "no workers" in str(error)


def test_rank_that_was_given_up_before_it_came_is_pending_until_it_joins() -> None:
    one = Rig(BoundedStaleness(0), workers=2)
    one.join(A, 0)
    one.define(A, block_spec((1,)))
    one.tell(one.members((A, 1, "live"), (0, 0, "left")))
    for clock in range(3):
        done(one.step(A, {0: [1.0]}, [0], clock=clock))
    one.join(B, 1)
    one.tell(one.members((A, 1, "live"), (B, 1, "live")))
    done(one.step(A, {0: [1.0]}, [0], clock=3))
    assert done(one.step(B, {0: [1.0]})).pending
    assert one.value() == [4.0]
    done(one.step(A, {0: [1.0]}, [0], clock=4))
    assert done(one.send(B, JoinGroup(0, 0))).at == 5
    assert one.step(A, {0: [1.0]}, [0], clock=5).replies == [], "now it is waited for"


def test_changes_that_are_remembered_are_bounded() -> None:
    one = rig(Async(), workers=1)
    clock = 0
    for number in range(40):
        change(one, SUM if number % 2 else Async(), client=9 + number)
        for _ in range(6):
            push(one, A, clock)
            clock += 1
    report = one.shards[0].report()[0]
    assert len(report.changes) == len(one.shards[0].groups[0].state.changes.later) == CHANGES_MAX
    assert report.changes[-1].number == 40
    assert one.value() == [float(clock)]


def test_answer_to_a_pause_from_a_shard_that_there_is_not_is_ignored() -> None:
    one = rig(Async(), shards=2, workers=1)
    one.happen(FromShard(Paused(0, 7, 9, 0, 1)))
    assert one.wire == []


def test_switch_to_a_policy_that_cannot_be_built_is_a_protocol_error() -> None:
    one = rig(Async(), shards=2, workers=1)
    wrong = GroupPolicy(0, 1, 5, RuleSpec("BoundedStaleness", {"bound": -3}))
    with pytest.raises(ProtocolError, match="a switch of group 'group 0' to BoundedStaleness was"):
        one.happen(FromShard(LogEntry(1, Switch(wrong))), 1)
    push(one, A)
    assert one.value(shard=1) == [1.0]


def test_mark_of_a_step_is_kept_when_its_worker_has_left_before_the_clock_is_decided() -> None:
    one = rig(SUM, workers=2)
    push(one, B, mark=(1, 8))
    one.happen(ClientBye(B))
    push(one, A)
    assert one.value() == [2.0]
    assert (B, 1, 8) in one.shards[0].report()[0].marks


@dataclass(frozen=True)
class Garbled(Policy):
    """Waits for what no shard can wait for."""

    collects: ClassVar[bool] = True
    until_s: float = float("nan")

    def on_clock(self, group: GroupView) -> Admission:
        return Wait((), self.until_s)


@each_case("until_s", [float("nan"), -1.0, "x"])
def test_policy_that_waits_until_no_time_refuses_the_clock(until_s: Any) -> None:
    one = rig(Garbled(until_s=until_s), workers=2)
    effects = one.step(A, {0: [1.0]})
    assert type(refused(effects)).__name__ == "PolicyFailed"
    assert effects.deadline is None
    assert one.value() == [0.0]


def test_compensation_that_overflows_is_refused_and_applies_nothing() -> None:
    one = rig(DelayCompensated(lam=1e300), workers=2)
    done(one.step(A, pull=[0], tick=False))
    done(one.step(B, {0: [1.0]}))
    error = refused(one.step(A, {0: [1e10]}))
    assert type(error).__name__ == "NonFinite"
    assert one.value() == [1.0]


def test_suspended_rank_reads_at_once_and_joins_at_its_own_clock_with_all_others_behind() -> None:
    one = rig(BoundedStaleness(0), shards=2, workers=2)
    for clock in range(5):
        push(one, A, clock)
    for shard in (0, 1):
        one.send(A, SuspendMembership(0, 0), shard)
    one.deliver()
    for shard in (0, 1):
        done(one.step(A, pull=[0], shard=shard, clock=5, tick=False))
    one.send(A, JoinGroup(0, 0), 1)
    one.send(A, JoinGroup(0, 0), 0)
    one.deliver()
    assert [last(one, A, shard).at for shard in (0, 1)] == [5, 5]
    for shard in (0, 1):
        assert one.step(A, pull=[0], shard=shard, clock=5, tick=False).replies == []


def pending(one: Rig, client: int, rank: int) -> None:
    """A worker that comes late: it is a member of no group before it joins."""
    one.join(client, rank)
    one.tell(one.members((A, 1, "live"), (B, 1, "live"), (client, 1, "live")))


def test_join_starts_no_deadline_and_decides_no_clock() -> None:
    one = rig(Sync(reduce="sum", timeout_s=1.0), workers=2)
    pending(one, C, 2)
    joining = one.send(C, JoinGroup(0, 0))
    assert done(joining).at == 0
    assert joining.deadline is None
    one.now += 0.9
    push(one, A)
    one.now += 0.9
    one.happen(DeadlineReached())
    assert one.value() == [0.0], "0.9 s since the first gradient"
    push(one, B)
    assert one.value() == [0.0], "it waits for the joiner, too"
    push(one, C)
    assert one.value() == [3.0]
    assert not last(one, C).skipped
    assert one.shards[0].groups[0].state.clocks == {0: 1, 1: 1, 2: 1}


def test_step_of_a_pending_rank_is_no_time_of_a_step() -> None:
    one = rig(Sync(reduce="sum", timeout_s=Adaptive()), workers=2)
    push(one, A)
    push(one, B)
    pending(one, C, 2)
    assert done(one.step(C, {0: [1.0]}, clock=1)).pending
    one.now += 1.0
    push(one, A, 1)
    one.now += 1.0
    push(one, B, 1)
    assert one.shards[0].groups[0].state.step_s == 1.5, "A took 1 s, B 2 s"


def test_compensation_that_overflows_is_skipped_where_the_policy_says_so() -> None:
    one = rig(DelayCompensated(lam=1e300, on_nonfinite="skip"), workers=2)
    done(one.step(A, pull=[0], tick=False))
    done(one.step(B, {0: [1.0]}))
    answer = done(one.step(A, {0: [1e10]}, mark=(1, 8)))
    assert answer.skipped
    assert one.value() == [1.0]
    report = one.shards[0].report()[0]
    assert (report.skipped, report.marks, report.version) == (1, ((A, 1, 8),), 1)


def test_corrected_momentum_knows_the_name_that_torchs_rules_give_it() -> None:
    rule = TorchRule.of("NAdam", lr=0.1, betas=(0.9, 0.99))
    one = rig(Async(), workers=2, rule=rule)
    block = one.shards[0].blocks[0]
    push = PushInfo(0, 0, 0, 0, 1.0, 1.0)
    hyper, same = adapted(block, None, push, Apply(momentum_reduction=0.5, lr_scale=0.5))
    assert hyper is not None
    asked = dict(zip(rule.hyper_names, hyper, strict=True))
    assert asked["betas.0"] == pytest.approx(0.4)
    assert asked["betas.1"] == 0.99
    assert asked["lr"] == 0.05
    assert same is push
