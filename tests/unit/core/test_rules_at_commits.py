"""Rules that fail where a clock is decided already: the error says which shards have applied it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tests.suites import each_case
from tests.unit.core.group_rig import A, B, change, last
from tests.unit.core.rig import Rig, block_spec

from paramserve.config import NO_RANK
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Buffered, LocalSteps, Sync
from paramserve.consistency.registry import spec
from paramserve.core.client_session import Operation
from paramserve.core.events import CutWanted
from paramserve.core.restoring import restore
from paramserve.errors import ParamServeError, RuleFailed
from paramserve.messages import Done, Refused, SetPolicy
from paramserve.rules.custom import CustomRule

NAN = float("nan")


@dataclass(frozen=True)
class Odd(CustomRule):
    """Adds, and fails where a gradient has 13 or more."""

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        if (gradient >= 13).any():
            raise KeyError("thirteen")
        value += gradient


def two_shards(policy: Policy) -> Rig:
    one = Rig(policy, shards=2, workers=2, rules={Odd.name: Odd})
    for rank, client in enumerate((A, B)):
        one.join(client, rank)
    one.define(A, block_spec((1,), (1,), cuts=range(3), rule=Odd()))
    return one


def outcome(one: Rig, client: int) -> ParamServeError | None:
    """What the client makes of the last answers of both shards."""
    operation = Operation(2)
    for shard in range(2):
        answer = last(one, client, shard)
        assert isinstance(answer, Done | Refused)
        operation.answered(shard, answer)
    return operation.error


def both(one: Rig, client: int, first: float, second: float, **options: Any) -> None:
    for shard, gradient in enumerate((first, second)):
        one.step(client, {0: [gradient]}, shard=shard, **options)


UNKNOWN = (
    r"KeyError: 'thirteen' .*; shards \[0\] have applied their parts, shards \[1\] have not\. "
    r"Applied: unknown\. To fix: .*; the values are of two versions now: .*go back to a checkpoint"
)


def test_clipped_clock_that_a_rule_fails_says_which_shards_have_applied_it() -> None:
    one = two_shards(Sync(reduce="sum"))
    both(one, A, 1.0, 6.0, clip_norm=1e9)
    both(one, B, 1.0, 7.0, clip_norm=1e9)
    one.deliver()
    for client in (A, B):
        error = outcome(one, client)
        assert isinstance(error, RuleFailed)
        with pytest.raises(RuleFailed, match=UNKNOWN):
            raise error
    assert [one.value(shard=shard) for shard in range(2)] == [[2.0], [0.0]]
    for client in (A, B):
        both(one, client, 1.0, 1.0, clock=1)
    one.deliver()
    assert [outcome(one, client) for client in (A, B)] == [None, None], "no client hangs"


def test_local_steps_without_a_rank_whose_nan_one_shard_saw_say_which_shards_have_applied() -> None:
    one = two_shards(LocalSteps(every=1, on_nonfinite="skip"))
    both(one, A, NAN, 1.0)  # shard 1 has prepared the mean of both
    both(one, B, 1.0, 13.0)
    one.deliver()
    assert outcome(one, A) is None
    error = outcome(one, B)
    assert isinstance(error, RuleFailed)
    with pytest.raises(RuleFailed, match=UNKNOWN):
        raise error


@each_case(("policy", "clients"), [(Async(), [B]), (Sync(reduce="sum"), [A, B])])
def test_flush_that_a_rule_fails_is_told_once_to_a_step(policy: Policy, clients: list[int]) -> None:
    """What a policy has collected is applied with the first step of the next one, which ends clock
    4 here; the second one, or its whole synchronous clock, is refused."""
    one = two_shards(Buffered(3, damping=None))
    change(one, policy)
    told: list[tuple[int, int]] = []
    text = r"a shard has lost 2 gradients of group .*: rule 'Odd' failed .*thirteen.*checkpoint"
    for clock in range(7):
        for client in (A, B):
            both(one, client, 1.0, 13.0 if clock == 3 else 1.0, clock=clock)
        one.deliver()
        if clock == 3:
            assert [shard.report()[0].buffered for shard in one.shards] == [2, 2]
        for client in (A, B):
            error = outcome(one, client)
            if error is not None:
                told.append((clock, client))
                with pytest.raises(RuleFailed, match=text):
                    raise error
    assert told == [(4, client) for client in clients]


def behind_lost_flush(policy: Policy) -> Rig:
    """Shard 1 has failed to flush with the first step of clock 4, the first of this policy."""
    one = two_shards(Buffered(3, damping=None))
    change(one, policy)
    for clock in range(4):
        for client in (A, B):
            both(one, client, 1.0, 13.0 if clock == 3 else 1.0, clock=clock)
        one.deliver()
    both(one, A, 1.0, 1.0, clock=4)
    return one


def test_lost_flush_is_told_to_a_step_that_a_change_of_policy_holds_meanwhile() -> None:
    one = behind_lost_flush(Async())
    one.join(8)
    for shard in range(2):
        one.send(8, SetPolicy(0, 0, spec(Sync())), shard)
    one.deliver_one()
    assert one.shards[1].groups[0].state.changes.paused is not None
    for shard in range(2):
        assert one.step(A, {0: [1.0]}, clock=5, shard=shard).replies == []
    one.deliver()
    assert isinstance(outcome(one, A), RuleFailed)


def test_lost_flush_is_told_to_its_clock_though_a_step_of_the_next_one_is_held_first() -> None:
    one = behind_lost_flush(Sync(reduce="sum"))
    one.join(3, 0, incarnation=2)  # all shards have the step of clock 4 of the one before
    both(one, 3, 1.0, 1.0, clock=5)
    assert one.shards[1].waiting == 2
    both(one, B, 1.0, 1.0, clock=4)
    one.deliver()
    assert isinstance(outcome(one, B), RuleFailed)


# --- a lost flush that no step was told of --------------------------------------------------------


def test_lost_flush_is_told_to_the_operator_once_and_counted() -> None:
    one = two_shards(Buffered(3, damping=None))
    change(one, Async())
    losses: list[tuple[int, str]] = []
    for clock in range(6):
        for client in (A, B):
            for shard in range(2):
                value = 13.0 if (clock, shard) == (3, 1) else 1.0
                effects = one.step(client, {0: [value]}, shard=shard, clock=clock)
                losses += [(shard, str(error)) for error in effects.losses]
        one.deliver()
    ((shard, text),) = losses
    assert shard == 1
    assert "lost 2 gradients of group" in text
    assert "thirteen" in text
    assert dict(one.shards[1].report()[0].dropped) == {NO_RANK: 2}


def restored(one: Rig) -> Rig:
    """New shards that go on from a cut of now, as from files; both ranks come again."""
    one.happen(CutWanted())
    one.deliver()
    new = Rig(shards=2, workers=2, rules={Odd.name: Odd})
    for shard, old in zip(new.shards, one.shards, strict=True):
        part = old.cuts.parts_here[max(old.cuts.parts_here)]
        part.members = ()
        restore(shard, part, 0.0)
    for rank, client in enumerate((A, B)):
        new.join(client + 10, rank, incarnation=2)
    return new


@each_case("policy", [Async(), Sync(reduce="sum")])
def test_lost_flush_is_told_behind_a_resume(policy: Policy) -> None:
    """Under Sync the step that is refused waits for its clock at the cut: it is in none."""
    one = behind_lost_flush(policy)
    if isinstance(policy, Sync):
        one.step(B, {0: [1.0]}, clock=4, shard=1)
        assert one.shards[1].groups[0].state.collect.pending[1].refusal
    new = restored(one)
    told: list[int] = []
    for clock in (4, 5, 6):
        for client in (A + 10, B + 10):
            if (policy, clock, client) != (Async(), 4, A + 10):
                both(new, client, 1.0, 1.0, clock=clock)
        new.deliver()
        for client in (A + 10, B + 10):
            if new.answers(client) and outcome(new, client) is not None:
                told.append(clock)
                assert isinstance(outcome(new, client), RuleFailed)
    assert told == ([4, 4] if isinstance(policy, Sync) else [4])
