"""Each checker finds what it is for in a history written by hand, and passes its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from tests.suites import each_case

from paramserve.consistency.base import DROP, GroupView, OnPush, Policy, Push
from paramserve.consistency.built_in import (
    Adaptive,
    Async,
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    Inverse,
    Sync,
)
from paramserve_testing import Call, History, Part, Row, checkers
from paramserve_testing.history import (
    Agreed,
    Answered,
    Applied,
    Decided,
    Entered,
    Shared,
    Switched,
    Update,
)

PART = Part(0, 0)
BLOCK = frozenset({0})


def history(policy: Policy, *calls: Call, final: Row | None = None, ranks: int = 2) -> History:
    """Two writers of ranks 0 and 1, whose ranks count on shard 0 from the beginning."""
    found = History(policy.collects, tuple(range(ranks)), [(0, policy)], calls=list(calls))
    found.final[PART] = final if final is not None else row(0, 0)
    for rank in range(ranks):
        found.counted[0, rank] = [(0, True)]
    return found


def row(*pushes: int) -> Row:
    return Row(tuple(each.bit_count() for each in pushes), pushes)


def push(writer: int, number: int, clock: int, order: int, **options: object) -> Call:
    call = Call(writer, number, order, number, BLOCK, rank=writer, clock=clock, tick=True)
    call.answered = order + 1
    for name, value in options.items():
        setattr(call, name, value)
    return call


def read(writer: int, number: int, clock: int, order: int, seen: Row) -> Call:
    call = Call(writer, number, order, rank=writer, clock=clock, answered=order + 2)
    call.reads[PART] = seen
    return call


# --- 1 ------------------------------------------------------------------------------------------


def test_exactly_once_judges_each_shard_by_its_own_answer() -> None:
    call = push(0, 0, 0, 1, dropped=frozenset({1}))
    found = history(Async(drop_after=1), call, final=row(1, 0))
    found.final[Part(0, 1)] = row(0, 0)
    assert checkers.exactly_once(found) == []
    found.final[PART], found.final[Part(0, 1)] = row(0, 0), row(1, 0)
    wrong = " ".join(checkers.exactly_once(found))
    assert "block 0 on shard 0: acknowledged, but lost: push 0" in wrong
    assert "block 0 on shard 1: reported as not applied, but applied: push 0" in wrong


def test_exactly_once_accepts_half_a_push_without_a_clock_only_while_the_policy_changes() -> None:
    call = push(0, 0, 0, 1, error="NotAMember", applied="unknown", rank=-1)
    found = history(Async(), call, final=row(1, 0))
    assert "applied, never acknowledged" in checkers.exactly_once(found)[0]
    found.policies.append((3, Sync()))
    assert checkers.exactly_once(found) == []


def test_half_a_refused_step_is_accepted_of_a_worker_that_was_not_told_of_the_change() -> None:
    before, after = push(0, 0, 2, 1), push(0, 1, 3, 5)
    call = push(0, 2, 4, 3, error="NonFinite", applied="unknown", spoiled=True)
    found = history(Sync(), before, after, call, final=row(0b111, 0))
    found.policies.append((3, Async()))
    for checker in (checkers.exactly_once, checkers.spoiled_gradients_change_nothing):
        call.issued = 3
        assert checker(found) == []
        call.issued = 7  # after the answer to the first step under the new policy
        assert len(checker(found)) == 1


# --- 2 and 4 ------------------------------------------------------------------------------------


def test_all_or_nothing_leaves_out_clocks_of_policies_that_do_not_collect() -> None:
    found = history(Async(), push(0, 0, 0, 1), push(0, 1, 5, 3), final=row(0b01, 0))
    found.final[Part(0, 1)] = row(0, 0)
    found.policies.append((5, Sync()))
    assert checkers.all_or_nothing(found) == []
    found.final[PART] = row(0b11, 0)
    assert "push 1 is only on block 0 on shard 0" in checkers.all_or_nothing(found)[0]


@each_case(("policy", "lacking"), [(Async(), 0), (Buffered(3, damping=None), 2)])
def test_session_may_lack_only_what_waits_in_a_buffer(policy: Policy, lacking: int) -> None:
    pushes = [push(0, n, n, 1 + 2 * n) for n in range(4)]
    for missing in range(4):
        present = (1 << (4 - missing)) - 1
        found = history(policy, *pushes, read(0, 4, 4, 20, row(present, 0)), final=row(15, 0))
        wrong = checkers.sessions_in_order(found)
        assert bool(wrong) is (missing > lacking), wrong


# --- 3 ------------------------------------------------------------------------------------------


def bounded(policy: Policy, clock: int) -> History:
    """Writer 1 reads at `clock` and lacks writer 0's push of clock 2, which comes later."""
    calls = (push(0, 0, 2, 50), read(1, 0, clock, 1, row(0, 0)))
    found = history(policy, *calls, final=row(1, 0))
    found.answers[0, 1, 0] = Answered(2, False, 0, 0)
    return found


@each_case(
    ("policy", "last"),
    [(BoundedStaleness(0), 2), (BoundedStaleness(1), 3), (BoundedStaleness(4), 6), (Sync(), 2)],
)
def test_bounded_staleness_a_read_past_the_bound_needs_the_push(policy: Policy, last: int) -> None:
    assert checkers.bounded_staleness(bounded(policy, last)) == []
    wrong = checkers.bounded_staleness(bounded(policy, last + 1))
    assert "lacks push 0 of writer 0 (rank 0), which is of clock 2" in wrong[0]


def test_bounded_staleness_asks_nothing_of_other_policies() -> None:
    assert checkers.bounded_staleness(bounded(Async(), 100)) == []


def test_bounded_staleness_leaves_out_who_did_not_count_there() -> None:
    found = bounded(BoundedStaleness(0), 9)
    found.counted[0, 0] = [(0, True), (1, False), (3, True)]
    assert checkers.bounded_staleness(found) == []
    found.counted[0, 0] = [(0, True), (3, False)]
    assert checkers.bounded_staleness(found)


@each_case(("clock", "order", "good"), [(3, 1, True), (2, 1, False), (3, 9, False)])
def test_bounded_staleness_leaves_out_what_is_older_than_a_return(
    clock: int, order: int, good: bool
) -> None:
    found = bounded(BoundedStaleness(0), 9)
    found.entered.append(Entered(0, 0, order, clock, 0, False))
    assert (checkers.bounded_staleness(found) == []) is good


def test_bounded_staleness_leaves_out_a_step_that_is_repeated() -> None:
    found = bounded(BoundedStaleness(0), 9)
    older = Call(2, 0, 0, rank=0, clock=2, tick=True)
    found.calls.insert(0, older)
    found.reached[0, 2, 0] = 1
    assert checkers.bounded_staleness(found) == []


# --- 8, Sync with fewer ------------------------------------------------------------------------


def decided(policy: Policy, *ranks: int, waited_s: float = 0.0) -> History:
    found = history(policy, ranks=3)
    contributors = tuple((rank, rank) for rank in ranks)
    found.decided.append(Decided(4, 10, contributors, not ranks, waited_s))
    return found


@each_case(
    ("policy", "ranks", "waited_s", "good"),
    [
        (Sync(), (0, 1, 2), 0.0, True),
        (Sync(), (0, 1), 0.0, False),
        (Sync(backup=1), (0, 1), 0.0, True),
        (Sync(backup=1), (1,), 9.0, False),
        (Sync(timeout_s=0.5), (1,), 0.5, True),
        (Sync(timeout_s=0.5), (1,), 0.49, False),
        (Sync(backup=1, timeout_s=0.5), (0, 2), 0.1, True),
        (Sync(timeout_s=Adaptive(least_s=0.2)), (1,), 0.1, False),
        (Sync(timeout_s=Adaptive(least_s=0.2)), (1,), 0.2, True),
        (Sync(backup=1), (), 0.0, True),
    ],
)
def test_clock_is_decided_without_as_many_as_the_policy_allows(
    policy: Policy, ranks: tuple[int, ...], waited_s: float, good: bool
) -> None:
    wrong = checkers.restarts_keep_the_clocks(decided(policy, *ranks, waited_s=waited_s))
    assert (wrong == []) is good, wrong


@each_case(
    ("step_s", "waited_s", "good"),
    [(None, 0.1, True), (0.0, 9.0, False), (0.2, 0.39, False), (0.2, 0.4, True), (0.01, 0.1, True)],
)
def test_adaptive_deadline_is_its_factor_times_the_median(
    step_s: float | None, waited_s: float, good: bool
) -> None:
    found = decided(Sync(timeout_s=Adaptive(factor=2.0, least_s=0.1)), 1, waited_s=waited_s)
    found.decided[0] = found.decided[0]._replace(step_s=step_s)
    assert (checkers.restarts_keep_the_clocks(found) == []) is good


def test_clock_is_decided_without_a_rank_that_is_suspended_or_has_ended() -> None:
    for states in ("away", "resting"):
        found = decided(Sync(), 0, 1)
        getattr(found, states).append((3, 2, True))
        assert checkers.restarts_keep_the_clocks(found) == []
        getattr(found, states).append((5, 2, False))
        found.decided.append(Decided(5, 12, ((0, 0), (1, 1), (2, 2)), False))
        found.decided.append(Decided(6, 20, ((0, 0), (1, 1)), False))
        assert "without ranks [2]" in checkers.restarts_keep_the_clocks(found)[0]


def test_clock_has_each_rank_once() -> None:
    found = decided(Sync(backup=2), 0)
    found.decided[0] = found.decided[0]._replace(contributors=((0, 0), (0, 3)))
    assert "one rank twice" in checkers.restarts_keep_the_clocks(found)[0]


def test_clock_that_could_be_decided_is_in_time_where_nothing_is_lost() -> None:
    found = decided(Sync(backup=1), 0, 1)
    found.decided[0] = found.decided[0]._replace(late_s=0.01)
    assert checkers.clocks_are_decided_in_time(found) == []
    found.prompt_s = 0.02
    assert checkers.clocks_are_decided_in_time(found) == []
    found.prompt_s = 0.005
    assert "was decided 0.0100 s after" in checkers.clocks_are_decided_in_time(found)[0]


def test_clock_is_decided_within_its_timeout_and_what_the_network_takes() -> None:
    found = decided(Sync(timeout_s=0.5), 0)
    found.prompt_s = 0.02
    found.decided[0] = found.decided[0]._replace(waited_s=0.51)
    assert checkers.clocks_are_decided_in_time(found) == []
    found.decided[0] = found.decided[0]._replace(waited_s=0.53)
    assert "was decided after 0.5300 s" in checkers.clocks_are_decided_in_time(found)[0]


# --- who counts ---------------------------------------------------------------------------------


def test_who_counts_a_live_worker_is_not_forgotten() -> None:
    found = history(Async())
    found.counted[0, 1].append((7, False))
    assert "without rank 1, which had not ended" in checkers.who_counts(found)[0]
    found.away.append((6, 1, True))
    assert checkers.who_counts(found) == []


@each_case(
    ("clock", "slowest", "joins", "good"),
    [
        (5, 5, True, True),
        (6, 5, True, True),
        (7, 5, True, False),
        (4, 5, True, False),
        (9, 5, False, True),
        (4, 5, False, False),
        (0, None, True, True),
    ],
)
def test_who_counts_begins_where_the_slowest_is(
    clock: int, slowest: int | None, joins: bool, good: bool
) -> None:
    found = history(Async())
    found.entered.append(Entered(0, 3, 9, clock, slowest, joins))
    assert (checkers.who_counts(found) == []) is good


# --- 9 ------------------------------------------------------------------------------------------


def test_spoiled_gradient_in_a_read_or_at_the_end_is_found() -> None:
    spoiled = push(0, 1, 1, 3, spoiled=True, error="NonFinite", applied="no")
    good = history(Async(), push(0, 0, 0, 1), spoiled, final=row(0b01, 0))
    assert checkers.spoiled_gradients_change_nothing(good) == []
    good.calls.append(read(1, 0, 0, 9, row(0b11, 0)))
    assert "read of block 0" in checkers.spoiled_gradients_change_nothing(good)[0]
    good.final[PART] = row(0b10, 0)
    assert "final block 0" in checkers.spoiled_gradients_change_nothing(good)[0]


# --- policies -----------------------------------------------------------------------------------


@each_case(
    ("applied_at", "dropped_at", "good"),
    [(5, None, True), (6, None, False), (None, 6, True), (None, 5, False)],
)
def test_drops_by_staleness_counts_again(
    applied_at: int | None, dropped_at: int | None, good: bool
) -> None:
    call = push(0, 0, 0, 1, bases=(3,))
    found = history(Async(drop_after=2), call)
    if applied_at is not None:
        found.updates.append(Update(0, 4, applied_at, applied_at + 1, ((0, 0),)))
        found.answers[0, 0, 0] = Answered(4, False, applied_at, applied_at + 1)
    if dropped_at is not None:
        found.answers[0, 0, 0] = Answered(4, True, dropped_at, dropped_at)
    assert (checkers.drops_by_staleness(found) == []) is good


def test_drops_by_staleness_takes_a_step_of_no_member_for_dropped() -> None:
    call = push(0, 0, 0, 1, bases=(3,))
    found = history(Async(), call)
    found.answers[0, 0, 0] = Answered(4, True, 5, 5)
    assert checkers.drops_by_staleness(found) != []
    found.counted[0, call.rank] = [(1, True), (3, False)]
    assert checkers.drops_by_staleness(found) == []


@each_case(
    ("gradients", "alone", "good"),
    [(3, False, True), (4, False, False), (2, False, False), (2, True, True), (4, True, False)],
)
def test_buffers_are_full_but_for_the_last(gradients: int, alone: bool, good: bool) -> None:
    found = history(Buffered(3))
    pushes = tuple((0, number) for number in range(gradients))
    found.updates.append(Update(0, 4, 7, 8, pushes, alone))
    assert (checkers.buffers_are_full(found) == []) is good


@each_case(
    ("policy", "used", "counted", "good"),
    [
        (Sync(), [(0, 2), (2, 4)], 0, True),
        (Sync(), [(0, 2)], 0, False),
        (Sync(), [(0, 2), (0, 2), (2, 4)], 2, False),
        (Async(), [(0, 2), (0, 2), (2, 4)], 2, True),
        (Async(), [(0, 2), (0, 2), (2, 4)], 1, False),
        (Async(), [(0, 2), (0, 2)], 2, False),
    ],
)
def test_samples_are_used(
    policy: Policy, used: list[tuple[int, int]], counted: int, good: bool
) -> None:
    calls = [push(0, n, n, 1 + 2 * n, samples=each) for n, each in enumerate(used)]
    found = history(policy, *calls, final=row((1 << len(used)) - 1, 0))
    found.shared = Shared(4, over=True, counted=counted)
    assert (checkers.samples_are_used(found) == []) is good
    found.shared.over = False
    assert checkers.samples_are_used(found) == []


@each_case(
    ("second", "good"),
    [
        (Agreed(1, 1, 1, 0b11, False, 1), True),
        (Agreed(1, 1, 1, 0b10, False, 1), False),
        (Agreed(1, 1, 2, 0b11, False, 2), False),
        (Agreed(0, 0, 2, 0b10, False, 2), False),
        (Agreed(0, 0, 2, 0b10, True, 2), True),
        (Agreed(1, 1, 2, 0b11, True, 2), True),
        (Agreed(1, 1, 2, 0b11, True, 1), False),
        (Agreed(1, 1, 1, 0b11, True, 2), True),
    ],
    ids=["same", "other", "skipped", "left-out", "late", "behind", "of-another", "all-left-out"],
)
def test_ranks_agree(second: Agreed, good: bool) -> None:
    found = history(Sync())
    found.agreed = [Agreed(0, 0, 1, 0b11, False, 1), second]
    assert (checkers.ranks_agree(found) == []) is good


@dataclass(frozen=True)
class Drops(Policy):
    """A user's own."""

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return DROP


@each_case(
    ("policy", "spoiled", "good"),
    [
        (Sync(backup=1), False, True),
        (Sync(timeout_s=0.1), False, True),
        (Sync(), False, False),
        (Sync(), True, False),
        (Sync(on_nonfinite="skip"), True, True),
        (Sync(on_nonfinite="skip"), False, False),
        (Async(drop_after=3), False, True),
        (Async(), False, False),
        (Async(on_nonfinite="skip"), True, False),
        (BoundedStaleness(1), False, False),
        (Drops(), False, True),
    ],
)
def test_samples_may_be_lost_only_where_the_policy_leaves_gradients_out(
    policy: Policy, spoiled: bool, good: bool
) -> None:
    call = push(0, 0, 0, 1, samples=(0, 2), skipped=True)
    found = history(policy, call, push(1, 0, 0, 3, spoiled=spoiled))
    found.shared = Shared(2, over=True)
    assert checkers.samples_are_used(found), "no record says that it was left out"
    found.answers[0, 0, 0] = Answered(2, True, 0, 0)
    assert (checkers.samples_are_used(found) == []) is good


def applied(policy: Policy, told: Applied, *, base: int = 3, workers: int = 2) -> History:
    """Writer 0 pushes what it has computed from version `base`; shard 0 applies it at version 5."""
    found = history(policy, push(0, 0, 0, 1, bases=(base,)), final=row(1, 0), ranks=workers)
    found.updates.append(Update(0, 4, 5, 6, ((0, 0),), applied=(told,)))
    return found


@each_case(
    ("policy", "scale", "base", "good"),
    [
        (Async(), 1.0, 3, True),
        (Async(), 0.5, 3, False),
        (Async(damping=Inverse(0.5)), 0.5, 3, True),
        (Async(damping=Inverse(0.5)), 0.4, 3, False),
        (Async(damping=Inverse(0.5)), 1.0, 5, True),
        (BoundedStaleness(1), 0.5, 3, False),
        (Drops(), 0.5, 3, True),
    ],
)
def test_gradient_counts_by_the_damping_of_its_staleness(
    policy: Policy, scale: float, base: int, good: bool
) -> None:
    found = applied(policy, Applied(0, 0, 5, scale, 0.9, 0.9), base=base)
    assert (checkers.gradients_count_as_decided(found) == []) is good


@each_case(
    ("workers", "momentum", "good"),
    [(2, 0.4, True), (2, 0.9, False), (2, 0.9 - 2 / 3, False), (1, 0.9, True), (20, 0.0, True)],
)
def test_gradient_momentum_is_corrected_by_who_counts(
    workers: int, momentum: float, good: bool
) -> None:
    told = Applied(0, 0, 5, 1.0, momentum, 0.9)
    found = applied(Async(momentum="corrected"), told, workers=workers)
    assert (checkers.gradients_count_as_decided(found) == []) is good


@each_case(
    ("rank", "order", "clock", "good"),
    [(2, 1, 9, True), (2, 1, 8, False), (3, 1, 9, False), (2, 3, 9, False)],
)
def test_who_counts_joiner_begins_at_the_slowest_or_where_it_began_elsewhere_before(
    rank: int, order: int, clock: int, good: bool
) -> None:
    """`rank` begins on shard 1 at `clock`, and rank 2 on shard 0 at clock 9."""
    found = history(Async())
    found.entered.append(Entered(0, 2, 2, 9, 5, True))
    assert "the slowest worker was at 5" in checkers.who_counts(found)[0]
    found.entered.append(Entered(1, rank, order, clock, clock, True))
    assert (checkers.who_counts(found) == []) is good


@each_case(("change", "good"), [(0.5, True), (0.0, False), (0.25, False)])
def test_gradient_is_compensated_from_the_read_that_it_came_from(change: float, good: bool) -> None:
    """Push 1 comes from a read without push 0; another one with it is answered later."""
    calls = [push(0, 0, 0, 1), read(0, 1, 0, 2, row(0, 0)), push(0, 2, 1, 9, bases=(4,))]
    calls[2].push = 1
    found = history(DelayCompensated(lam=0.5), *calls, final=row(0b11, 0))
    found.calls.append(read(0, 3, 1, 20, row(1, 0)))
    found.updates.append(Update(0, 3, 4, 5, ((0, 0),)))
    told = Applied(0, 1, 5, 1.0, 0.9, 0.9, change)
    found.updates.append(Update(0, 12, 5, 6, ((0, 1),), applied=(told,)))
    assert (checkers.gradients_count_as_decided(found) == []) is good


def test_later_incarnation_begins_at_the_clock_that_its_rank_had_reached() -> None:
    calls = [push(0, 0, 7, 1), push(2, 0, 7, 9, rank=0)]
    found = history(Async(), *calls, final=Row((1, 0, 1), (1, 0, 1)))
    assert "began at clock 7, it had ended 8 steps" in checkers.restarts_keep_the_clocks(found)[0]
    found.resting += [(4, 0, True), (8, 0, False)]
    assert checkers.restarts_keep_the_clocks(found), "a suspension sets no clock back"
    calls[1].clock = 8
    assert checkers.restarts_keep_the_clocks(found) == []


def test_changes_agree_on_one_clock_for_all_shards() -> None:
    found = history(Async())
    found.switched = dict.fromkeys([Switched(0, 1, 8, "Sync"), Switched(1, 1, 8, "Sync")])
    assert checkers.changes_agree(found) == []
    found.switched[Switched(1, 2, 9, "Async")] = None
    found.switched[Switched(0, 2, 10, "Async")] = None
    assert "from clock 9 on shard 1, and to Async from clock 10" in checkers.changes_agree(found)[0]


@each_case(
    ("clock", "together", "good"),
    [(4, False, True), (4, True, False), (5, True, True), (5, False, False)],
)
def test_changes_agree_steps_go_by_the_policy_of_their_clock(
    clock: int, together: bool, good: bool
) -> None:
    found = history(Async(), push(0, 0, clock, 1), final=row(1, 0))
    found.policies.append((5, Sync()))
    found.decided.append(Decided(clock, 2, ((0 if together else 1, 0 if together else 1),), False))
    assert (checkers.changes_agree(found) == []) is good
