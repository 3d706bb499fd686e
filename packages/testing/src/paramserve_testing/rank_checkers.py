"""What must hold of ranks: who counts, who comes back, and each in a clock once.

A rank is a worker's place in the cluster, whichever of its incarnations has it. These are in
`checkers.ALL` with the others.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Adaptive, Sync
from paramserve_testing.history import Call, Decided, History, mask
from paramserve_testing.wording import call_name, part_name, push_numbers


def older_incarnations_change_nothing(history: History) -> list[str]:
    """8. A push that reaches a shard after it knows the writer as ended is not applied there."""
    wrong = []
    for (shard, writer), fence in history.fences.items():
        late = mask(
            push
            for (at, by, push), order in history.arrivals.items()
            if (at, by) == (shard, writer) and order > fence
        )
        for part, row in history.final.items():
            if part.shard == shard:
                who = f"writer {writer} on {part_name(part)}"
                wrong += push_numbers(late & row.pushes[writer], f"{who}: applied after its end")
    return wrong


def restarts_keep_the_clocks(history: History) -> list[str]:
    """8, for ranks that come back. Under Sync a rank is in each clock exactly once, whichever of
    its incarnations pushed it, unless it had ended for good. A new incarnation goes on at the
    clock that its rank had reached, and no clock goes back.

    A policy may do without some: `Sync(backup=...)` without so many, `timeout_s` without all that
    are late, `LocalSteps(on_nonfinite="skip")` without those whose gradients hold NaN.
    """
    wrong = list(history.backwards)
    last: dict[int, int] = {}
    for each in history.decided:
        ranks = [rank for rank, _ in each.contributors]
        if len(set(ranks)) < len(ranks):
            wrong.append(f"clock {each.clock} has {each.contributors}: one rank twice")
        missing = []
        policy = history.policy_at(each.clock)
        bad = {call.rank for call in history.calls if call.clock == each.clock and call.spoiled}
        for rank in sorted({*history.ranks, *last}):
            if rank in bad and _skips_alone(policy):
                last[rank] = each.order
            elif rank not in ranks and not each.empty:
                if not history.was_away(rank, last.get(rank, 0), each.order):
                    missing.append(rank)
            else:
                last[rank] = each.order
        for rank in ranks:
            last[rank] = each.order
        wrong += _done_without(missing, each, policy)
    return wrong + _resumed_wrongly(history) + _brought_twice(history) + _left_out(history)


def calls_count_whole(histories: Collection[History]) -> list[str]:
    """8, for calls of several groups. A rank that ends, and not for good, is in all synchronous
    clocks of its last call or in none, if that call was on all shards by then.

    Args:
        histories: of all groups of a run.
    """
    wrong, calls = [], dict[tuple[int, int], tuple[History, Call]]()
    for history in histories:
        calls |= {(call.writer, call.number): (history, call) for call in history.calls}
    for (writer, number), (history, call) in calls.items():
        then = calls.get((writer, number + 1))
        if not call.more or writer not in history.ended or then is None:
            continue
        first, second = _clock_of(history, call), _clock_of(*then)
        if first is None or second is None:
            continue
        if history.has_ended(call.rank, call.issued, second.order):
            continue
        here, there = ([rank for rank, _ in each.contributors] for each in (first, second))
        if call.rank in here and call.rank not in there:
            wrong.append(
                f"{call_name(call)} counts in clock {call.clock}, and the step of the same call "
                f"that clock {second.clock} of the other group was decided without"
            )
    return wrong


def _clock_of(history: History, call: Call) -> Decided | None:
    """The clock that a call was to count in; None: it need not."""
    policy = history.policy_of(call)
    shards = {part.shard for part in history.final}
    if not isinstance(policy, Sync) or policy.partial or call.pending or call.spoiled:
        return None
    if len(history.policies) > 1:  # while one changes, a step may wait for the next policy
        return None
    if not call.tick or not history.came_before_its_end(call, shards):
        return None
    return next((e for e in history.decided if e.clock == call.clock and not e.empty), None)


def _skips_alone(policy: Policy | None) -> bool:
    return policy is not None and policy.skips_alone and policy.on_nonfinite == "skip"


def _done_without(missing: list[int], each: Decided, policy: Policy | None) -> list[str]:
    backup = policy.backup if isinstance(policy, Sync) else 0
    if len(missing) <= backup or (policy is not None and not isinstance(policy, Sync)):
        return []
    limit = policy.timeout_s if isinstance(policy, Sync) else None
    if isinstance(limit, Adaptive):
        limit = _adapted(limit, each.step_s)
    if limit is not None and each.waited_s >= limit - 1e-9:
        return []
    late = "" if limit is None else f", {each.waited_s:.3f} s after its first gradients"
    return [f"clock {each.clock} was decided without ranks {missing}{late} ({policy!r})"]


def _adapted(deadline: Adaptive, step_s: float | None) -> float:
    """Seconds of an adaptive deadline; as little as it may be where the median of then is not
    recorded, and never where there was none."""
    if step_s is None:
        return deadline.least_s
    return max(deadline.least_s, deadline.factor * step_s) if step_s > 0.0 else inf


def _resumed_wrongly(history: History) -> list[str]:
    """A later incarnation that began before what its rank had been told to be done."""
    wrong = []
    reached: dict[int, int] = {}
    # One that stood still may begin after its rank's later incarnations, in vain.
    of = history.incarnations
    for _, calls in sorted(history.by_writer().items(), key=lambda each: of.get(each[0], 0)):
        steps = [call for call in calls if call.tick and call.clock >= 0]
        rank = calls[0].rank
        if rank < 0 or not steps:
            continue
        if steps[0].clock < reached.get(rank, 0):
            wrong.append(
                f"{call_name(steps[0])} rank {rank} began at clock {steps[0].clock}, "
                f"it had ended {reached[rank]} steps"
            )
        done = [call.clock + 1 for call in steps if call.answered is not None and not call.error]
        reached[rank] = max([reached.get(rank, 0), *done])
    return wrong


def _left_out(history: History) -> list[str]:
    """Gradients of a worker that takes itself to be waited for, which their clock was decided
    without although its policy waits for all; or which were skipped for the NaN of others although
    it leaves out only those."""
    decided = {each.clock: each for each in history.decided}
    wrong = []
    for call in history.calls:
        policy, clock = history.policy_of(call), decided.get(call.clock)
        rejected = call.push is not None and (call.skipped or call.dropped)
        if not rejected or not isinstance(policy, Sync) or policy.partial:
            continue
        judged = clock is not None and not clock.empty
        if _skips_alone(policy):
            judged = clock is not None and not call.spoiled
        if clock is not None and judged:
            wrong.append(
                f"{call_name(call)} was left out of clock {call.clock}, which was decided with "
                f"{clock.contributors} ({policy!r})"
            )
    return wrong


def _brought_twice(history: History) -> list[str]:
    """Pushes of two incarnations to one synchronous clock that are both in a part's value."""
    wrong = []
    for part, row in history.final.items():
        found: dict[tuple[int, int], int] = {}
        for call in history.calls:
            if call.push is None or part.block not in call.blocks or call.rank < 0:
                continue
            if not history.collects_at(call.clock):
                continue
            if row.pushes[call.writer] >> call.push & 1:
                other = found.setdefault((call.rank, call.clock), call.writer)
                if other != call.writer:
                    wrong.append(
                        f"{part_name(part)} has the gradients of writers {other} and {call.writer} "
                        f"(rank {call.rank}) for clock {call.clock}"
                    )
    return wrong


def who_counts(history: History) -> list[str]:
    """Workers that are live count, and who comes begins where the others are.

    A rank that the cluster began with stops counting on a shard only after it has ended or rests. A
    rank that becomes a member is not behind the slowest, or begins where the shard that decided has
    let it; one that joins a running cluster begins there exactly, or so.
    """
    wrong = []
    for (shard, rank), changes in history.counted.items():
        for order, whether in changes:
            if not whether and not history.was_away(rank, 0, order):
                wrong.append(f"shard {shard} went on without rank {rank}, which had not ended")
    for each in history.entered:
        if each.slowest is None:
            continue
        latest = max(each.slowest, each.then if each.then is not None else 0) + 1
        others = (e for e in history.entered if e.rank == each.rank and e.order < each.order)
        latest = max([latest, *(other.clock for other in others)])
        least = each.slowest if each.told is None else min(each.slowest, each.told)
        if each.clock < least or (each.joins and each.clock > latest):
            wrong.append(
                f"shard {each.shard}: rank {each.rank} became a member at clock {each.clock}, the "
                f"slowest worker was at {each.slowest}"
            )
    return wrong
