"""What must hold of every run: one function for each invariant, over a recorded `History`.

Each returns what it found wrong, one text for each, and nothing if the invariant held. Numbers are
those of the project's list of invariants. The pushes that they speak of add one to a counter and
their own power of two to a mask, so that a value tells which pushes are in it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable

from paramserve.core.consistency import Adaptive, Async, BoundedStaleness, Buffered, Sync
from paramserve.core.decisions import Policy
from paramserve.testing.history import Call, Decided, History, Part, Row, mask

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
    what another one has applied of a client without a clock: it is told that this is not known.
    """
    wrong = []
    for writer, calls in history.by_writer().items():
        for part, row in history.final.items():
            pushes = [c for c in calls if c.push is not None and part.block in c.blocks]
            present = row.pushes[writer]
            acknowledged = mask(c.push for c in pushes if c.acknowledged_on(part.shard))
            rejected = mask(c.push for c in pushes if c.rejected_on(part.shard))
            issued = mask(c.push for c in pushes)
            half = (c for c in pushes if c.applied == "unknown" and not history.has_clock(c))
            unknown = mask(c.push for c in half)
            who = f"writer {writer} on {_name(part)}"
            wrong += _numbers(acknowledged & ~present, f"{who}: acknowledged, but lost")
            wrong += _numbers(present & rejected, f"{who}: reported as not applied, but applied")
            wrong += _numbers(present & ~issued, f"{who}: applied, but never issued")
            if writer not in history.ended:
                untold = present & ~acknowledged & ~rejected & ~unknown
                wrong += _numbers(untold, f"{who}: applied, never acknowledged")
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
    wrong = []
    for call in history.calls:
        if not (history.collects_at(call.clock) and history.has_clock(call)):
            continue
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
                who = f"{_call(call)} read of {_name(part)}"
                own = row.pushes[writer]
                lacking = acknowledged.get(part, 0) & ~own
                if lacking.bit_count() > spare:
                    wrong += _numbers(lacking, f"{who} lacks its own")
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
    clock that its rank had reached, and no clock goes back.

    A policy may do without some: `Sync(backup=...)` without so many, `timeout_s` without all that
    are late.
    """
    wrong = list(history.backwards)
    last: dict[int, int] = {}
    for each in history.decided:
        ranks = [rank for rank, _ in each.contributors]
        if len(set(ranks)) < len(ranks):
            wrong.append(f"clock {each.clock} has {each.contributors}: one rank twice")
        missing = []
        for rank in sorted({*history.ranks, *last}):
            if rank not in ranks and not each.empty:
                if not history.was_away(rank, last.get(rank, 0), each.order):
                    missing.append(rank)
            else:
                last[rank] = each.order
        for rank in ranks:
            last[rank] = each.order
        wrong += _done_without(missing, each, history.policy_at(each.clock))
    return wrong + _resumed_wrongly(history) + _brought_twice(history)


def _done_without(missing: list[int], each: Decided, policy: Policy | None) -> list[str]:
    backup = policy.backup if isinstance(policy, Sync) else 0
    if len(missing) <= backup or (policy is not None and not isinstance(policy, Sync)):
        return []
    limit = policy.timeout_s if isinstance(policy, Sync) else None
    if isinstance(limit, Adaptive):
        limit = limit.least_s
    if limit is not None and each.waited_s >= limit - 1e-9:
        return []
    late = "" if limit is None else f", {each.waited_s:.3f} s after its first gradients"
    return [f"clock {each.clock} was decided without ranks {missing}{late} ({policy!r})"]


def clocks_are_decided_in_time(history: History) -> list[str]:
    """13, for Sync: a clock waits for nobody that it can do without.

    Judged only where the network loses nothing, so that there is no other reason to wait.
    """
    if history.prompt_s is None:
        return []
    return [
        f"clock {each.clock} was decided {each.late_s:.4f} s after all that it needs had come to "
        f"all shards ({history.policy_at(each.clock)!r})"
        for each in history.decided
        if each.late_s > history.prompt_s
    ]


def bounded_staleness(history: History) -> list[str]:
    """3. A read at clock c has every update of clock <= c - s - 1 of the workers that count there.

    s is the bound of `BoundedStaleness`, and 0 under `Sync`. Which workers count on a shard when it
    answers is what that shard has shown; `who_counts` judges that.
    """
    if all(_bound(policy) is None for _, policy in history.policies):
        return []
    wrong = []
    pushes = _by_rank(history)
    for call in history.calls:
        if not call.reads or call.rank < 0:
            continue
        clock = call.clock + call.tick
        policies = (history.policy_of(call), history.policy_at(clock))
        bounds = [_bound(policy) for policy in policies]
        if None in bounds:
            continue
        newest = clock - max(each for each in bounds if each is not None) - 1
        for part, row in call.reads.items():
            answered = history.answers.get((part.shard, call.writer, call.number))
            if answered is None:
                continue
            for other in pushes:
                if other.clock > newest or other.enters or other.rank == call.rank:
                    continue
                if isinstance(history.policy_of(other), Buffered):
                    continue
                if part.block in other.blocks and _lacks(history, other, part, row, answered.order):
                    wrong.append(
                        f"{_call(call)} read of {_name(part)} at clock {clock} lacks push "
                        f"{other.push} of writer {other.writer} (rank {other.rank}), which is of "
                        f"clock {other.clock}"
                    )
    return wrong


def _bound(policy: Policy | None) -> int | None:
    """How many clocks behind a read may be; None: any number."""
    if isinstance(policy, BoundedStaleness):
        return policy.bound
    return 0 if isinstance(policy, Sync) else None


def _by_rank(history: History) -> list[Call]:
    return [call for call in history.calls if call.push is not None and call.rank >= 0]


def _lacks(history: History, push: Call, part: Part, row: Row, order: int) -> bool:
    """Whether a push that is applied at some time was not, when it had to be."""
    assert push.push is not None
    bit = 1 << push.push
    if row.pushes[push.writer] & bit or not history.final[part].pushes[push.writer] & bit:
        return False
    if not history.counts(part.shard, push.rank, order):
        return False
    if any(  # it came back there at a later clock, and repeats what another shard has not had
        each.shard == part.shard
        and each.rank == push.rank
        and each.order <= order
        and each.clock > push.clock
        for each in history.entered
    ):
        return False
    return not any(  # an incarnation that repeats a step which its predecessor had brought here
        each.rank == push.rank
        and each.writer != push.writer
        and each.clock == push.clock
        and each.tick
        and history.reached.get((part.shard, each.writer, each.number), order) < order
        for each in history.calls
    )


def who_counts(history: History) -> list[str]:
    """Workers that are live count, and who comes begins where the others are.

    A rank that the cluster began with stops counting on a shard only after it has ended or rests. A
    rank that comes to count is not behind the slowest; one that joins a running cluster begins
    there exactly, or where it has begun on another shard.
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
        elsewhere = (e.clock for e in history.entered if e.rank == each.rank and e is not each)
        latest = max(latest, 1 + max(elsewhere, default=0))
        if each.clock < each.slowest or (each.joins and each.clock > latest):
            wrong.append(
                f"shard {each.shard}: rank {each.rank} came to count at clock {each.clock}, the "
                f"slowest worker was at {each.slowest}"
            )
    return wrong


def spoiled_gradients_change_nothing(history: History) -> list[str]:
    """9. A gradient with NaN is in no value, on no shard, at no time."""
    wrong = []
    spoiled: dict[int, int] = {}
    for call in history.calls:
        if call.spoiled and call.push is not None:
            spoiled[call.writer] = spoiled.get(call.writer, 0) | 1 << call.push
    if not spoiled:
        return []
    seen = [(f"final {_name(part)}", row) for part, row in history.final.items()]
    seen += [(f"{_call(c)} read of {_name(part)}", row) for c, part, row in history.reads()]
    for where, row in seen:
        for writer, pushes in spoiled.items():
            if row.pushes[writer] & pushes:
                text = f"{where} has what writer {writer} had spoiled"
                wrong += _numbers(row.pushes[writer] & pushes, text)
    return wrong


def drops_by_staleness(history: History) -> list[str]:
    """`Async(drop_after=n)`: a gradient staler than n updates is never applied on that shard, and
    one within n never dropped there. Staleness is counted again from the versions that the values
    went through."""
    if not any(isinstance(policy, Async) for _, policy in history.policies):
        return []
    wrong = []
    applied = {
        (each.shard, *push): (each.before, each.after)
        for each in history.updates
        for push in each.pushes
    }
    for call in history.calls:
        policy = history.policy_of(call)
        if call.push is None or not isinstance(policy, Async):
            continue
        limit = policy.drop_after
        for shard, base in enumerate(call.bases):
            answer = history.answers.get((shard, call.writer, call.number))
            found = applied.get((shard, call.writer, call.push))
            who = f"shard {shard}: push {call.push} of writer {call.writer}, based on {base},"
            if found is not None and limit is not None and found[0] - base > limit:
                wrong.append(f"{who} was applied at version {found[0]} ({policy!r})")
            if answer is None or found is not None or not answer.skipped or call.spoiled:
                continue
            if limit is None or answer.after - base <= limit:
                wrong.append(f"{who} was dropped at version {answer.after} ({policy!r})")
    return wrong


def buffers_are_full(history: History) -> list[str]:
    """`Buffered(size=n)`: an update has exactly n gradients, fewer only when no worker is left."""
    sizes = [policy.size for _, policy in history.policies if isinstance(policy, Buffered)]
    if not sizes or len(sizes) < len(history.policies):
        return []
    wrong = []
    for each in history.updates:
        most = max(sizes) * (each.after - each.before)
        least = min(sizes) * (each.after - each.before)
        if len(each.pushes) > most or (len(each.pushes) < least and not each.alone):
            wrong.append(
                f"shard {each.shard}: {each.after - each.before} update(s) to version "
                f"{each.after} with {len(each.pushes)} gradients, sizes {sizes}"
            )
    return wrong


def samples_are_used(history: History) -> list[str]:
    """14. Of samples that are shared by lease, each is used exactly once an epoch in Sync; else at
    least once on each shard, and what is used again is counted. A gradient that came too late is
    counted as dropped, and its samples as used.

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
            answer = history.answers.get((part.shard, call.writer, call.number))
            for position in range(*call.samples):
                uses[position] += row.pushes[call.writer] >> call.push & 1
                dropped[position] |= answer is not None and answer.skipped
        unused = [at for at in range(shared.size) if not (uses[at] or dropped[at])]
        if unused:
            wrong.append(f"{_name(part)} lacks the samples {_ranges(unused)}")
        again = [max(most, count - 1) for most, count in zip(again, uses, strict=True)]
    repeated = [position for position, count in enumerate(again) if count > 0]
    if repeated and history.collects:
        wrong.append(f"used more than once in Sync: samples {_ranges(repeated)}")
    elif sum(max(0, each) for each in again) > shared.counted:
        wrong.append(
            f"samples {_ranges(repeated)} were used again, and {shared.counted} repeats counted"
        )
    return wrong


def _ranges(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:10])) + (", ..." if len(positions) > 10 else "")


def changes_agree(history: History) -> list[str]:
    """A change of policy holds from one clock on, on all shards: no step of that clock or later is
    handled the old way, and none before it the new way."""
    wrong = []
    first: dict[int, tuple[int, str, int]] = {}
    for each in history.switched:
        clock, policy, shard = first.setdefault(each.number, (each.clock, each.policy, each.shard))
        if (clock, policy) != (each.clock, each.policy):
            wrong.append(
                f"change {each.number} is to {policy} from clock {clock} on shard {shard}, and to "
                f"{each.policy} from clock {each.clock} on shard {each.shard}"
            )
    if len(history.policies) > 1:
        wrong += _handled_wrongly(history)
    return wrong


def _handled_wrongly(history: History) -> list[str]:
    decided = {(each.clock, writer) for each in history.decided for _, writer in each.contributors}
    known = {each.clock for each in history.decided}
    """Where one shard decides several clocks in one event, only the last of them is recorded."""
    wrong = []
    for call in _by_rank(history):
        assert call.push is not None
        if (
            call.enters
            or not call.tick
            or not any(
                history.final[part].pushes[call.writer] >> call.push & 1 for part in history.final
            )
        ):
            continue
        together = (call.clock, call.writer) in decided
        collects = history.collects_at(call.clock)
        if together is not collects and not (collects and call.clock not in known):
            how = "with its clock" if together else "by itself"
            wrong.append(
                f"{_call(call)} push {call.push} of clock {call.clock} was applied {how}, under "
                f"{history.policy_at(call.clock)!r}"
            )
    return wrong


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
    clocks_are_decided_in_time,
    bounded_staleness,
    who_counts,
    spoiled_gradients_change_nothing,
    drops_by_staleness,
    buffers_are_full,
    changes_agree,
    samples_are_used,
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
    """By (writer, block): the pushes that went to it, of clocks that are all or nothing."""
    found: dict[tuple[int, int], int] = {}
    for call in history.calls:
        together = history.collects_at(call.clock) and history.has_clock(call)
        if call.push is not None and together:
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
