"""What must hold of every run under its consistency policy, besides what `checkers.py` asks.

Each counts again, from the recorded `History`, what the policy has decided about clocks, staleness
and buffers. They are in `checkers.ALL` with the others.
"""

from __future__ import annotations

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Sync
from paramserve.consistency.registry import BUILT_IN
from paramserve_testing.history import Call, History, Part, Row
from paramserve_testing.wording import call_name, part_name


def clocks_are_decided_in_time(history: History) -> list[str]:
    """13, for Sync: a clock waits for no worker that it can do without, and not past `timeout_s`.

    Judged only where the network loses nothing, so that there is no other reason to wait.
    """
    if history.prompt_s is None:
        return []
    wrong = []
    for each in history.decided:
        policy = history.policy_at(each.clock)
        limit_s = policy.timeout_s if isinstance(policy, Sync) else None
        if each.late_s > history.prompt_s:
            wrong.append(
                f"clock {each.clock} was decided {each.late_s:.4f} s after all that it needs had "
                f"reached all shards ({policy!r})"
            )
        elif isinstance(limit_s, float) and each.waited_s > limit_s + history.prompt_s:
            wrong.append(f"clock {each.clock} was decided after {each.waited_s:.4f} s ({policy!r})")
    return wrong


def bounded_staleness(history: History) -> list[str]:
    """3. A read at clock c has every update of clock <= c - s - 1 of the workers that count there.

    s is the bound of `BoundedStaleness`, and 0 under `Sync`. Which workers count on a shard when it
    answers is what that shard has shown; `who_counts` judges that. A worker that rests, or has not
    joined yet, is at no clock: it reads what is there.
    """
    if all(_bound(policy) is None for _, policy in history.policies):
        return []
    wrong = []
    pushes = _by_rank(history)
    for call in history.calls:
        if not call.reads or call.rank < 0 or call.pending:
            continue
        clock = call.clock + call.tick
        policies = (history.policy_of(call), history.policy_at(clock))
        bounds = [_bound(policy) for policy in policies]
        if None in bounds:
            continue
        newest = clock - max(each for each in bounds if each is not None) - 1
        for part, row in call.reads.items():
            answered = history.answers.get((part.shard, call.writer, call.number))
            if answered is None or history.rested(call.rank, answered.order):
                continue
            for other in pushes:
                if other.clock > newest or other.rank == call.rank:
                    continue
                if isinstance(history.policy_of(other), Buffered):
                    continue
                if part.block in other.blocks and _lacks(history, other, part, row, answered.order):
                    wrong.append(
                        f"{call_name(call)} read of {part_name(part)} at clock {clock} lacks push "
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
    return not any(  # an incarnation that repeats a step which its predecessor had pushed here
        each.rank == push.rank
        and each.writer != push.writer
        and each.clock == push.clock
        and each.tick
        and history.reached.get((part.shard, each.writer, each.number), order) < order
        for each in history.calls
    )


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
            if call.rank >= 0 and not history.counts(shard, call.rank, answer.order):
                continue  # it was no member there, which `who_counts` judges
            if limit is None or answer.after - base <= limit:
                wrong.append(f"{who} was dropped at version {answer.after} ({policy!r})")
    return wrong


def may_leave_out(history: History, call: Call, shard: int) -> bool:
    """Whether a shard has left a gradient out, and its policy lets it: the policy decides clocks
    without all, drops what is stale, or skips NaN."""
    answer = history.answers.get((shard, call.writer, call.number))
    if answer is None or not answer.skipped:
        return False
    policy = history.policy_of(call)
    if policy is None:  # not known: any of them may have been meant
        return any(_drops(each) for _, each in history.policies) or not history.policies
    return _drops(policy) or (policy.on_nonfinite == "skip" and _spoiled(history, call, policy))


def _drops(policy: Policy) -> bool:
    if policy.collects:
        return policy.partial
    own = type(policy) not in BUILT_IN.values() and type(policy).on_push is not Policy.on_push
    return own or (isinstance(policy, Async) and policy.drop_after is not None)


def _spoiled(history: History, call: Call, policy: Policy) -> bool:
    """Whether NaN was pushed with a call, or to its clock where that is all or nothing."""
    if not policy.collects or policy.skips_alone:
        return call.spoiled
    return any(each.spoiled and each.clock == call.clock for each in history.calls)


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
    # Where one shard decides several clocks in one event, only the last of them is recorded.
    known = {each.clock for each in history.decided}
    wrong = []
    for call in _by_rank(history):
        assert call.push is not None
        if not call.tick or not any(
            history.final[part].pushes[call.writer] >> call.push & 1 for part in history.final
        ):
            continue
        together = (call.clock, call.writer) in decided
        collects = history.collects_at(call.clock)
        if together is not collects and not (collects and call.clock not in known):
            how = "with its clock" if together else "by itself"
            wrong.append(
                f"{call_name(call)} push {call.push} of clock {call.clock} was applied {how}, "
                f"under {history.policy_at(call.clock)!r}"
            )
    return wrong
