"""What must hold of every run: one function for each invariant, over a recorded `History`.

Each returns what it found wrong, one text for each, and nothing if the invariant held. Numbers are
those of the project's list of invariants. The pushes that they speak of add one to a counter and
their own power of two to a mask, so that a value tells which pushes are in it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from paramserve.consistency.built_in import Buffered
from paramserve_testing.decision_checkers import gradients_count_as_decided
from paramserve_testing.history import Call, Deleted, History, Part, Row, mask
from paramserve_testing.policy_checkers import (
    bounded_staleness,
    buffers_are_full,
    changes_agree,
    clocks_are_decided_in_time,
    drops_by_staleness,
    may_leave_out,
)
from paramserve_testing.rank_checkers import (
    older_incarnations_change_nothing,
    restarts_keep_the_clocks,
    who_counts,
)
from paramserve_testing.wording import call_name, part_name, push_numbers, row_text

__all__ = [
    "check",
    "Violation",
    "Checker",
    "ALL",
    "SHOWN_MAX",
    "exactly_once",
    "counters_agree",
    "all_or_nothing",
    "sessions_in_order",
    "older_incarnations_change_nothing",
    "restarts_keep_the_clocks",
    "clocks_are_decided_in_time",
    "bounded_staleness",
    "who_counts",
    "spoiled_gradients_change_nothing",
    "drops_by_staleness",
    "gradients_count_as_decided",
    "buffers_are_full",
    "changes_agree",
    "samples_are_used",
    "ranks_agree",
    "everyone_finishes",
    "processes_raise_nothing",
]

Checker = Callable[[History], list[str]]

SHOWN_MAX = 8
"""Findings in the text of a `Violation`; a broken run has thousands."""


class Violation(AssertionError):
    """An invariant did not hold; the text says which, where, and how to run it again."""


def exactly_once(history: History) -> list[str]:
    """1. Acknowledged pushes are in the final values, once; refused and skipped ones are not.

    For a writer that ran to its end, exactly the acknowledged pushes are there. For one that was
    killed, also pushes that it had no answer to may be. A policy that drops what is too stale does
    so on each shard by itself, and each says so. While the policy changes, one shard may refuse
    what another one has applied of a client that has no clock, or does not know of the change: it
    is told that this is not known.

    Of what was deleted, nothing is there that had reached the part before.
    """
    wrong = []
    gone = _Gone(history)
    for writer, calls in history.by_writer().items():
        for part, row in history.final.items():
            pushes = [c for c in calls if c.push is not None and part.block in c.blocks]
            present = row.pushes[writer]
            acknowledged = mask(c.push for c in pushes if c.acknowledged_on(part.shard))
            rejected = mask(c.push for c in pushes if c.rejected_on(part.shard))
            issued = mask(c.push for c in pushes)
            half = (c for c in pushes if c.applied == "unknown" and not history.knew_policy(c))
            unknown = mask(c.push for c in half)
            who = f"writer {writer} on {part_name(part)}"
            lost = acknowledged & ~present & ~gone.at_most(part, writer)
            wrong += push_numbers(lost, f"{who}: acknowledged, but lost")
            wrong += push_numbers(
                present & gone.by(part, writer), f"{who}: deleted, but still there"
            )
            wrong += push_numbers(
                present & rejected, f"{who}: reported as not applied, but applied"
            )
            wrong += push_numbers(present & ~issued, f"{who}: applied, but never issued")
            if writer not in history.ended:
                untold = present & ~acknowledged & ~rejected & ~unknown
                wrong += push_numbers(untold, f"{who}: applied, never acknowledged")
    return wrong


def counters_agree(history: History) -> list[str]:
    """2, first half. A counter equals the number of distinct pushes in the value, at all times.

    Also finds values that are no sum of whole pushes, as after a slot was used again too early.
    """
    wrong = []
    for part, row in history.final.items():
        wrong += _miscounted(row, f"final {part_name(part)}")
    for call, part, row in history.reads():
        wrong += _miscounted(row, f"{call_name(call)} read of {part_name(part)}")
    return wrong


def all_or_nothing(history: History) -> list[str]:
    """2, second half. A synchronous clock is in all parts or in none, for every reader alike."""
    wrong = []
    gone = _Gone(history)
    for call in history.calls:
        if not (history.collects_at(call.clock) and history.has_clock(call)):
            continue
        held = [
            (history.final[part].pushes[call.writer] >> call.push & 1, part)
            for part in history.final
            if call.push is not None
            and part.block in call.blocks
            and not gone.at_most(part, call.writer) >> call.push & 1
        ]
        if held and len({bit for bit, _ in held}) > 1:
            where = ", ".join(part_name(part) for bit, part in held if bit)
            wrong.append(f"{call_name(call)} push {call.push} is only on {where}")
    states: dict[int, tuple[str, Part, Row]] = {}
    pushed = _pushed(history)
    for call, part, row in history.reads():
        if call.state is None:
            continue
        seen = f"{call_name(call)} read of {part_name(part)}"
        first, at, expected = states.setdefault(call.state, (seen, part, row))
        for writer, (ours, theirs) in enumerate(zip(row.pushes, expected.pushes, strict=True)):
            both = pushed.get((writer, part.block), 0) & pushed.get((writer, at.block), 0)
            both &= ~(gone.at_most(part, writer) | gone.at_most(at, writer))
            if (ours ^ theirs) & both:
                wrong.append(
                    f"after {call.state} clocks {seen} has {row_text(row)}, "
                    f"{first} has {row_text(expected)}"
                )
                break
    return wrong


def sessions_in_order(history: History) -> list[str]:
    """4. What a client reads of a part never goes back, and contains its own pushes before it.

    It also contains nothing that was issued after the answer, and nothing that came later in the
    client's own order; unless it was read again, because an answer was lost: then it may contain
    what the client had sent by then. What was deleted before it reached the shard is not in it.
    """
    wrong = []
    gone = _Gone(history)
    timeline = _Timeline(history)
    sizes = [policy.size for _, policy in history.policies if isinstance(policy, Buffered)]
    spare = max(sizes, default=1) - 1
    """Gradients that wait for their buffer to be full, and are acknowledged."""
    for writer, calls in history.by_writer().items():
        seen: dict[Part, Row] = {}
        acknowledged: dict[Part, int] = {}
        parts = list(history.final)
        issued = 0
        for call in calls:
            if call.push is not None:
                issued |= 1 << call.push
                for part in parts:
                    if part.block in call.blocks and call.acknowledged_on(part.shard):
                        acknowledged[part] = acknowledged.get(part, 0) | 1 << call.push
            for part, row in call.reads.items():
                who = f"{call_name(call)} read of {part_name(part)}"
                own = row.pushes[writer]
                lacking = acknowledged.get(part, 0) & ~own & ~gone.at_most(part, writer)
                if lacking.bit_count() > spare:
                    wrong += push_numbers(lacking, f"{who} lacks its own")
                again = part.shard in call.reread
                if not again:
                    wrong += push_numbers(own & ~issued, f"{who} has its own later")
                before = seen.get(part, row)
                for other, (old, new) in enumerate(zip(before.pushes, row.pushes, strict=True)):
                    text = f"{who} lacks what it had read before of writer {other}"
                    missing = old & ~new
                    if missing:
                        wrong += push_numbers(missing & ~gone.at_most(part, other), text)
                since = history.reached.get((part.shard, writer, call.number), 0)
                for other, pushes in enumerate(row.pushes):
                    old = pushes & gone.by(part, other, since)
                    wrong += push_numbers(old, f"{who} has what was deleted of writer {other}")
                wrong += timeline.not_yet_issued(call, row, who)
                if not again:  # a later call may have been answered before this one was repeated
                    seen[part] = row
    return wrong


def spoiled_gradients_change_nothing(history: History) -> list[str]:
    """9. A gradient with NaN, or of a step that a shard refuses, is in no value, on no shard, at no
    time. Not judged where the client took it for a step of a clock that is all or nothing, was
    wrong in that, and is told that it is not known what was applied."""
    wrong = []
    spoiled: dict[int, int] = {}
    for call in history.calls:
        half = call.applied == "unknown" and not history.knew_policy(call)
        if call.spoiled and call.push is not None and not half:
            spoiled[call.writer] = spoiled.get(call.writer, 0) | 1 << call.push
    if not spoiled:
        return []
    seen = [(f"final {part_name(part)}", row) for part, row in history.final.items()]
    seen += [(f"{call_name(c)} read of {part_name(part)}", row) for c, part, row in history.reads()]
    for where, row in seen:
        for writer, pushes in spoiled.items():
            if row.pushes[writer] & pushes:
                text = f"{where} has what writer {writer} had spoiled"
                wrong += push_numbers(row.pushes[writer] & pushes, text)
    return wrong


def samples_are_used(history: History) -> list[str]:
    """14. Of samples that are shared by lease, each is used exactly once an epoch in Sync; else at
    least once on each shard, and what is used again is counted.

    Samples may be lost with a gradient that its policy leaves out, as with one that comes too late
    for `Sync(backup=...)`. That a shard says so does not suffice where the policy leaves out none.

    Judged only where some worker was told that nothing is left.
    """
    shared = history.shared
    if shared is None or not shared.over:
        return []
    wrong = []
    again = [0] * shared.size
    for part, row in history.final.items():
        uses, dropped = [0] * shared.size, [False] * shared.size
        for call in history.calls:
            if call.samples is None or call.push is None or part.block not in call.blocks:
                continue
            left_out = may_leave_out(history, call, part.shard)
            for position in range(*call.samples):
                uses[position] += row.pushes[call.writer] >> call.push & 1
                dropped[position] |= left_out
        unused = [at for at in range(shared.size) if not (uses[at] or dropped[at])]
        if unused:
            wrong.append(f"{part_name(part)} lacks the samples {_ranges(unused)}")
        again = [max(most, count - 1) for most, count in zip(again, uses, strict=True)]
    repeated = [position for position, count in enumerate(again) if count > 0]
    if repeated and history.collects:
        wrong.append(f"used more than once in Sync: samples {_ranges(repeated)}")
    elif sum(max(0, each) for each in again) > shared.counted:
        wrong.append(
            f"samples {_ranges(repeated)} were used again, and {shared.counted} repeats counted"
        )
    return wrong


def ranks_agree(history: History) -> list[str]:
    """15. All workers get the same of one collective, and each gets all of them in order: also one
    that comes later, as its program makes the same calls, from the first one or from where its rank
    was. The value of a worker that was there from the beginning is in all that it gets. It gets
    none where the others have returned without it, and is refused only there."""
    wrong, results, last = list[str](), dict[int, int](), dict[int, int]()
    numbers = dict[int, int]()
    for each in history.agreed:
        who = f"writer {each.writer} (rank {each.rank}) of collective {each.number}"
        if results.setdefault(each.number, each.ranks) != each.ranks:
            wrong.append(f"{who} got {each.ranks:b}, another one {results[each.number]:b}")
        number = numbers.setdefault(each.nth, each.number)
        if number != each.number:
            wrong.append(f"{who} got it as number {each.nth} of its program, another one {number}")
        first = each.again and each.writer not in last
        if not first and each.number != last.get(each.writer, 0) + 1:
            wrong.append(f"{who} got it after collective {last.get(each.writer, 0)}")
        if not (each.again or each.ranks >> each.rank & 1):
            wrong.append(f"{who} is not in its result {each.ranks:b}")
        last[each.writer] = each.number
    for call in history.company:
        who = f"call {call.number} of a collective by writer {call.writer} (rank {call.rank})"
        if call.refused and call.live:
            wrong.append(f"{who} was refused, although ranks {call.live} lived")
        if call.alone and call.returned:
            wrong.append(f"{who} got its own value, after ranks {call.returned} had returned")
    return wrong


def _ranges(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:10])) + (", ..." if len(positions) > 10 else "")


def everyone_finishes(history: History) -> list[str]:
    """13. After healing every live client moves within seconds and ends by its deadline."""
    return [*history.unfinished, *history.slow]


def processes_raise_nothing(history: History) -> list[str]:
    """No client's process ends by an exception that none of its calls has a reason for."""
    return history.raised


ALL: tuple[Checker, ...] = (
    exactly_once,
    counters_agree,
    all_or_nothing,
    sessions_in_order,
    older_incarnations_change_nothing,
    restarts_keep_the_clocks,
    clocks_are_decided_in_time,
    bounded_staleness,
    who_counts,
    spoiled_gradients_change_nothing,
    drops_by_staleness,
    gradients_count_as_decided,
    buffers_are_full,
    changes_agree,
    samples_are_used,
    ranks_agree,
    everyone_finishes,
    processes_raise_nothing,
)


def check(history: History, again: str = "", checkers: tuple[Checker, ...] = ALL) -> None:
    """Require every invariant.

    Args:
        history: of a run that has ended.
        again: how to repeat the run; stands first in the text.
    Raises:
        Violation: with the first findings of each invariant.
    """
    found = [(each.__name__, wrong) for each in checkers if (wrong := each(history))]
    if found:
        lines = [
            f"{name}: {text}" for name, wrong in found for text in wrong[: SHOWN_MAX // len(found)]
        ]
        raise Violation("\n  ".join([again or "the run broke an invariant", *lines]))


def _miscounted(row: Row, where: str) -> list[str]:
    if not row.sound:
        return [f"{where}: the values are no sum of whole pushes: {row_text(row)}"]
    return [
        f"{where}: writer {writer} is counted {count} times with {pushes.bit_count()} pushes"
        for writer, (count, pushes) in enumerate(zip(row.counts, row.pushes, strict=True))
        if count != pushes.bit_count()
    ]


def _pushed(history: History) -> dict[tuple[int, int], int]:
    """Pushes by (writer, block) that went to it, of clocks that are all or nothing."""
    found: dict[tuple[int, int], int] = {}
    for call in history.calls:
        together = history.collects_at(call.clock) and history.has_clock(call)
        if call.push is not None and together:
            for block in call.blocks:
                key = (call.writer, block)
                found[key] = found.get(key, 0) | 1 << call.push
    return found


class _Gone:
    """Which pushes were deleted, as masks."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._found: dict[Part, list[Deleted]] = {}

    def _of(self, part: Part) -> list[Deleted]:
        if not self._history.deletions:
            return []
        if part not in self._found:
            self._found[part] = self._history.deleted(part)
        return self._found[part]

    def by(self, part: Part, writer: int, order: int | None = None) -> int:
        """Surely deleted pushes of a writer on a part; before an order, if one is given."""
        found = 0
        for each in self._of(part):
            if order is None or each.order < order:
                found |= each.pushes.get(writer, 0)
        return found

    def at_most(self, part: Part, writer: int) -> int:
        """Those, and what may have come before a deletion or behind it."""
        found = 0
        for each in self._of(part):
            found |= each.pushes.get(writer, 0) | each.perhaps.get(writer, 0)
        return found


class _Timeline:
    """Which pushes had been issued by when."""

    def __init__(self, history: History) -> None:
        self._orders: dict[int, list[int]] = {}
        self._masks: dict[int, list[int]] = {}
        for writer, calls in history.by_writer().items():
            pushes = [call for call in calls if call.push is not None]
            self._orders[writer] = [call.issued for call in pushes]
            so_far = 0
            masks = [0]
            for call in pushes:
                so_far |= 1 << (call.push or 0)
                masks.append(so_far)
            self._masks[writer] = masks

    def not_yet_issued(self, call: Call, row: Row, who: str) -> list[str]:
        """Pushes in a read that no client had issued when it was answered."""
        assert call.answered is not None
        wrong = []
        for writer, pushes in enumerate(row.pushes):
            if pushes:
                until = bisect(self._orders.get(writer, ()), call.answered)
                early = pushes & ~self._masks.get(writer, [0])[until]
                wrong += push_numbers(early, f"{who} has, before it was issued by writer {writer}")
        return wrong
