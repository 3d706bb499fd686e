"""What must hold of the answers to single gradients: how much each counts, and what it is corrected
by. It is in `checkers.ALL` with the others.

What a rule was asked for is recorded (`Applied`); what its policy should have answered is worked
out again from the versions and reads of the `History`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import (
    Async,
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    ElasticAverage,
)
from paramserve_testing.history import Applied, Call, History, Part, Update
from paramserve_testing.wording import call_name

JUDGED = (Async, BoundedStaleness, DelayCompensated, ElasticAverage)
"""The policies whose answers are computed again; those of a user's policy are not known."""


def gradients_count_as_decided(history: History) -> list[str]:
    """A gradient is multiplied by the damping of its staleness, its rule's momentum is lowered by
    1 - 1 / workers where that is to be corrected, and a delay is compensated by what the values
    have changed since the read that the gradient came from.

    Staleness, workers and changes are counted again from the updates of the shard, from who counted
    there, and from what the client had read.
    """
    kinds = [type(policy) for _, policy in history.policies]
    if Buffered in kinds or not any(kind in JUDGED for kind in kinds):
        return []  # what is left in a buffer at a change adds updates
    wrong = []
    for update, call, applied in _applied(history):
        policy = history.policy_of(call)
        who = f"shard {update.shard}: {call_name(call)} push {call.push}"
        if not update.before <= applied.version < update.after:
            wrong.append(f"{who} was applied at version {applied.version}, not {update.before}")
        staleness = max(0, applied.version - call.bases[update.shard])
        scale = 1.0
        if isinstance(policy, Async) and policy.damping is not None:
            scale = policy.damping(staleness)
        if not isclose(applied.scale, scale, rel_tol=1e-9):
            wrong.append(
                f"{who} of staleness {staleness} was multiplied by {applied.scale}, not by {scale} "
                f"({policy!r})"
            )
        momenta = _momenta(history, update, applied, policy)
        if not any(isclose(applied.momentum, each, abs_tol=1e-9) for each in momenta):
            wrong.append(f"{who} had momentum {applied.momentum}, not {momenta} ({policy!r})")
    return wrong + _compensated_wrongly(history)


def _applied(history: History) -> Iterator[tuple[Update, Call, Applied]]:
    """Gradients of workers that were applied one by one, and what was asked for."""
    calls = {(call.writer, call.push): call for call in history.calls if call.push is not None}
    for update in history.updates:
        for push in update.pushes if update.applied else ():
            call = calls.get(push)
            if call is None or call.rank < 0 or type(history.policy_of(call)) not in JUDGED:
                continue
            same = [each for each in update.applied if each[:2] == (call.rank, call.clock)]
            if len(same) == 1:  # else one event carried two of one clock
                yield update, call, same[0]


def _momenta(
    history: History, update: Update, applied: Applied, policy: Policy | None
) -> list[float]:
    """What may be left of the momentum, with as many workers as counted before and after."""
    if not (isinstance(policy, Async) and policy.momentum == "corrected"):
        return [applied.given]
    ranks = [rank for shard, rank in history.counted if shard == update.shard]
    counts = [
        sum(history.counts(update.shard, rank, order) for rank in ranks)
        for order in (update.order - 1, update.order)
    ]
    workers = range(max(1, min(counts)), max(1, *counts) + 1)
    return [max(0.0, applied.given - (1.0 - 1.0 / each)) for each in workers]


def _compensated_wrongly(history: History) -> list[str]:
    """Corrections by lambda * change of the writer's own counter, which each of its pushes adds 1
    to: it shows from which of its reads a gradient was corrected."""
    if not any(isinstance(policy, DelayCompensated) for _, policy in history.policies):
        return []
    wrong = []
    reads = _Reads(history)
    present: dict[tuple[Part, int], int] = {}
    calls = {(call.writer, call.push): call for call in history.calls if call.push is not None}
    judged = {(update.order, *_key(call)): applied for update, call, applied in _applied(history)}
    for update in history.updates:
        for writer, number in update.pushes:
            call = calls.get((writer, number))
            if call is None:
                continue
            parts = [p for p in history.final if p.shard == update.shard and p.block in call.blocks]
            applied = judged.get((update.order, writer, number))
            policy = history.policy_of(call)
            if applied is not None and isinstance(policy, DelayCompensated):
                changes = [
                    present.get((part, writer), 0) - own
                    for part in parts
                    if (own := reads.own(call, part)) is not None
                ]
                once = sum(by == writer for by, _ in update.pushes) == 1
                # A version does not say which parts were read: judged where all of them were.
                whole = len(changes) == len(parts) > 0
                expected = policy.lam * max(changes, default=0)
                good = isclose(applied.change, expected, abs_tol=1e-15)
                if once and whole and not good:
                    wrong.append(
                        f"shard {update.shard}: {call_name(call)} push {number} was corrected by "
                        f"{applied.change}, not by {expected} ({policy!r})"
                    )
            for part in parts:
                present[part, writer] = present.get((part, writer), 0) + 1
    return wrong


def _key(call: Call) -> tuple[int, int]:
    assert call.push is not None
    return call.writer, call.push


class _Reads:
    """What each writer had read of its own pushes, and by when."""

    def __init__(self, history: History) -> None:
        self._calls: dict[int, list[Call]] = {}
        for call in history.calls:
            if call.reads and call.answered is not None:
                self._calls.setdefault(call.writer, []).append(call)

    def own(self, call: Call, part: Part) -> int | None:
        """Own pushes in what it had read last when it began a call; None: nothing of the part,
        though it may have read it before, or as no member, of whose reads no copies are kept."""
        # A later call may be answered first: a shard answers in order, but a call waits for all.
        known = [
            (each.number, each)
            for each in self._calls.get(call.writer, ())
            if each.answered is not None and each.answered < call.issued
        ]
        last = max(known)[1] if known else None
        alone = (each for _, each in known if each.push is None and not each.tick)
        if any(part.shard in each.reread for each in alone):
            return None  # a read that was answered later than in its order may be the newest
        row = None if last is None or last.pending else last.reads.get(part)
        return None if row is None else row.counts[call.writer]
