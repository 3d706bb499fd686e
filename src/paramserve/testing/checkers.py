"""What must hold of every run: one function for each invariant, over a recorded `History`.

Each returns what it found wrong, one text for each, and nothing if the invariant held. Numbers are
those of the project's list of invariants. The pushes that they speak of add one to a counter and
their own power of two to a mask, so that a value tells which pushes are in it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from paramserve.testing.history import Call, History, Part, Row, mask

Checker = Callable[[History], list[str]]

SHOWN_MAX = 8
"""Findings in the text of a `Violation`; a broken run has thousands."""


class Violation(AssertionError):
    """An invariant did not hold; the text says which, where, and how to run it again."""


def exactly_once(history: History) -> list[str]:
    """1. Acknowledged pushes are in the final values, once; refused and skipped ones are not.

    For a writer that ran to its end, exactly the acknowledged pushes are there. For one that was
    killed, also pushes that it had no answer to may be.
    """
    wrong = []
    for writer, calls in history.by_writer().items():
        for part, row in history.final.items():
            pushes = [c for c in calls if c.push is not None and part.block in c.blocks]
            present = row.pushes[writer]
            acknowledged = mask(c.push for c in pushes if c.acknowledged)
            rejected = mask(c.push for c in pushes if c.rejected)
            issued = mask(c.push for c in pushes)
            who = f"writer {writer} on {_name(part)}"
            wrong += _numbers(acknowledged & ~present, f"{who}: acknowledged, but lost")
            wrong += _numbers(present & rejected, f"{who}: reported as not applied, but applied")
            wrong += _numbers(present & ~issued, f"{who}: applied, but never issued")
            if writer not in history.ended:
                wrong += _numbers(
                    present & ~acknowledged & ~rejected, f"{who}: applied, never acknowledged"
                )
    return wrong


def counters_agree(history: History) -> list[str]:
    """2, first half. A counter equals the number of distinct pushes in the value, at all times.

    Also finds values that are no sum of whole pushes, as after a slot was used again too early.
    """
    wrong = []
    for part, row in history.final.items():
        wrong += _miscounted(row, f"final {_name(part)}")
    for call, part, row in history.reads():
        wrong += _miscounted(row, f"{_call(call)} read of {_name(part)}")
    return wrong


def all_or_nothing(history: History) -> list[str]:
    """2, second half. A synchronous clock is in all parts or in none, for every reader alike."""
    if not history.collects:
        return []
    wrong = []
    for call in history.calls:
        held = [
            (history.final[part].pushes[call.writer] >> call.push & 1, part)
            for part in history.final
            if call.push is not None and part.block in call.blocks
        ]
        if held and len({bit for bit, _ in held}) > 1:
            where = ", ".join(_name(part) for bit, part in held if bit)
            wrong.append(f"{_call(call)} push {call.push} is only on {where}")
    states: dict[int, tuple[str, Part, Row]] = {}
    pushed = _pushed(history)
    for call, part, row in history.reads():
        if call.state is None:
            continue
        seen = f"{_call(call)} read of {_name(part)}"
        first, at, expected = states.setdefault(call.state, (seen, part, row))
        for writer, (ours, theirs) in enumerate(zip(row.pushes, expected.pushes, strict=True)):
            both = pushed.get((writer, part.block), 0) & pushed.get((writer, at.block), 0)
            if (ours ^ theirs) & both:
                wrong.append(
                    f"after {call.state} clocks {seen} has {_text(row)}, "
                    f"{first} has {_text(expected)}"
                )
                break
    return wrong


def sessions_in_order(history: History) -> list[str]:
    """4. What a client reads of a part never goes back, and contains its own pushes before it.

    It also contains nothing that was issued after the answer, and nothing that came later in the
    client's own order.
    """
    wrong = []
    timeline = _Timeline(history)
    for writer, calls in history.by_writer().items():
        seen: dict[Part, Row] = {}
        acknowledged: dict[int, int] = {}
        issued = 0
        for call in calls:
            if call.push is not None:
                issued |= 1 << call.push
                for block in call.blocks if call.acknowledged else ():
                    acknowledged[block] = acknowledged.get(block, 0) | 1 << call.push
            for part, row in call.reads.items():
                who = f"{_call(call)} read of {_name(part)}"
                own = row.pushes[writer]
                wrong += _numbers(acknowledged.get(part.block, 0) & ~own, f"{who} lacks its own")
                wrong += _numbers(own & ~issued, f"{who} has its own later")
                before = seen.get(part, row)
                for other, (old, new) in enumerate(zip(before.pushes, row.pushes, strict=True)):
                    text = f"{who} lacks what it had read before of writer {other}"
                    wrong += _numbers(old & ~new, text) if old & ~new else []
                wrong += timeline.not_yet_issued(call, row, who)
                seen[part] = row
    return wrong


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
                who = f"writer {writer} on {_name(part)}"
                wrong += _numbers(late & row.pushes[writer], f"{who}: applied after its end")
    return wrong


def restarts_keep_the_clocks(history: History) -> list[str]:
    """8, for ranks that come back. Under Sync a rank is in each clock exactly once, whichever of
    its incarnations brought it, unless it had ended for good. A new incarnation goes on at the
    clock that its rank had reached, and no clock goes back."""
    wrong = list(history.backwards)
    last: dict[int, int] = {}
    for each in history.decided:
        ranks = [rank for rank, _ in each.contributors]
        if len(set(ranks)) < len(ranks):
            wrong.append(f"clock {each.clock} has {each.contributors}: one rank twice")
        for rank in history.ranks:
            if rank not in ranks and not each.empty:
                if not history.was_away(rank, last.get(rank, 0), each.order):
                    wrong.append(f"clock {each.clock} was decided without rank {rank}")
            else:
                last[rank] = each.order
    return wrong + _resumed_wrongly(history) + _brought_twice(history)


def _resumed_wrongly(history: History) -> list[str]:
    """A later incarnation that began before what its rank had been told to be done."""
    wrong = []
    reached: dict[int, int] = {}
    for calls in history.by_writer().values():
        rank, steps = calls[0].rank, [call for call in calls if call.tick]
        if rank < 0 or not steps:
            continue
        if steps[0].clock < reached.get(rank, 0):
            wrong.append(
                f"{_call(steps[0])} rank {rank} began at clock {steps[0].clock}, "
                f"it had ended {reached[rank]} steps"
            )
        done = [call.clock + 1 for call in steps if call.answered is not None and not call.error]
        reached[rank] = max([reached.get(rank, 0), *done])
    return wrong


def _brought_twice(history: History) -> list[str]:
    """Pushes of two incarnations to one synchronous clock that are both in a part's value."""
    if not history.collects:
        return []
    wrong = []
    for part, row in history.final.items():
        found: dict[tuple[int, int], int] = {}
        for call in history.calls:
            if call.push is None or part.block not in call.blocks or call.rank < 0:
                continue
            if row.pushes[call.writer] >> call.push & 1:
                other = found.setdefault((call.rank, call.clock), call.writer)
                if other != call.writer:
                    wrong.append(
                        f"{_name(part)} has the gradients of writers {other} and {call.writer} "
                        f"(rank {call.rank}) for clock {call.clock}"
                    )
    return wrong


def everyone_finishes(history: History) -> list[str]:
    """13. After healing every live client moves within seconds and ends by its deadline."""
    return [*history.unfinished, *history.slow]


ALL: tuple[Checker, ...] = (
    exactly_once,
    counters_agree,
    all_or_nothing,
    sessions_in_order,
    older_incarnations_change_nothing,
    restarts_keep_the_clocks,
    everyone_finishes,
)


def check(history: History, again: str = "", checkers: tuple[Checker, ...] = ALL) -> None:
    """Require every invariant.

    Args:
        history: of a run that has come to rest.
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


def _numbers(found: int, text: str) -> list[str]:
    if not found:
        return []
    return [
        f"{text}: push {', '.join(str(k) for k in range(found.bit_length()) if found >> k & 1)}"
    ]


def _miscounted(row: Row, where: str) -> list[str]:
    if not row.sound:
        return [f"{where}: the values are no sum of whole pushes: {_text(row)}"]
    return [
        f"{where}: writer {writer} is counted {count} times with {pushes.bit_count()} pushes"
        for writer, (count, pushes) in enumerate(zip(row.counts, row.pushes, strict=True))
        if count != pushes.bit_count()
    ]


def _pushed(history: History) -> dict[tuple[int, int], int]:
    """By (writer, block): the pushes that went to it."""
    found: dict[tuple[int, int], int] = {}
    for call in history.calls:
        if call.push is not None:
            for block in call.blocks:
                key = (call.writer, block)
                found[key] = found.get(key, 0) | 1 << call.push
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
        """Pushes in a read that nobody had issued when it was answered."""
        assert call.answered is not None
        wrong = []
        for writer, pushes in enumerate(row.pushes):
            if pushes:
                until = bisect(self._orders.get(writer, ()), call.answered)
                early = pushes & ~self._masks.get(writer, [0])[until]
                wrong += _numbers(early, f"{who} has, before it was issued by writer {writer}")
        return wrong


def _name(part: Part) -> str:
    return f"block {part.block} on shard {part.shard}"


def _call(call: Call) -> str:
    return f"writer {call.writer}, call {call.number}:"


def _text(row: Row) -> str:
    return " ".join(f"{count}:{pushes:b}" for count, pushes in zip(*row[:2], strict=True) if count)
