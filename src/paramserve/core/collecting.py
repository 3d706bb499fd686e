"""What a synchronous clock does to a group's blocks: collect gradients, tell the lead, apply.

Functions of the shard's state; none of them answers anybody or decides who waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from paramserve.core import policy_calls
from paramserve.core.commit import NONFINITE_FIX, Contribution, refusal_of
from paramserve.core.group import Group, Staleness
from paramserve.core.replies import with_values
from paramserve.core.sessions import Answer, Request, ShardSession
from paramserve.core.stepping import Part, apply_parts, finite
from paramserve.core.sums import addable, reduced
from paramserve.errors import (
    NotAMember,
    Overloaded,
    ParamServeError,
    ProtocolError,
    RuleFailed,
    TableFull,
    rebuild,
)
from paramserve.messages import Commit, Done, Refused, Step, Vote
from paramserve.rules.base import PushInfo

if TYPE_CHECKING:
    from paramserve.core.shard_members import ShardMembers

Array = npt.NDArray[Any]
Refusal = tuple[str, str, str]
"""Kind, what failed, and how to correct it."""


def refusal_with(group: Group, shard: int, rank: int, wrong: Exception) -> Refusal:
    """Why a shard refuses a worker's step of the present clock, for all workers of the clock."""
    fix = "correct the argument"
    kind, failed = ParamServeError.__name__, str(wrong)
    if isinstance(wrong, ParamServeError):
        kind, failed, fix = type(wrong).__name__, wrong.failed, wrong.fix
    failed = (
        f"the step of rank {rank} for clock {group.committed} of group {group.name!r} was refused "
        f"by shard {shard}: {failed}"
    )
    return kind, failed, fix


def collect(
    group: Group,
    session: ShardSession,
    request: Request,
    parts: list[Part],
    pending: bool,
    refusal: Refusal | None = None,
) -> None:
    """Keep a worker's gradients of the present clock, unapplied (Sync).

    Args:
        pending: whether the worker is not waited for yet.
        refusal: why this shard refuses the step, which then has no parts.

    Raises:
        NotAMember, ProtocolError: nothing was applied or kept.
    """
    step = request.message
    assert isinstance(step, Step)
    rank = session.rank
    if not pending and rank not in group.clocks:
        raise NotAMember(
            f"client {session.client} (rank {rank}) pushed to group {group.name!r}, "
            f"which steps in Sync with the live workers {sorted(group.clocks)}",
            fix="push from a worker, or use consistency=ps.Async()",
        )
    if not step.tick or step.clock != group.committed or rank in group.collect.pending:
        raise ProtocolError(
            f"worker {rank} brought gradients for clock {step.clock} "
            f"({'with' if step.tick else 'without'} a tick); group {group.name!r} is at clock "
            f"{group.committed}",
            fix="end each synchronous step with exactly one tick, in order",
        )
    by_block = {block.spec.block: (header, gradient) for block, header, gradient in parts}
    held = Contribution(step, session.client, by_block, finite=True, refusal=refusal)
    if not step.skip and not addable(parts, held.weight):
        held.finite = finite(parts)
        held.large = held.finite
    group.collect.pending[rank] = held


def commit_single_worker(
    shard: ShardMembers, group: Group, session: ShardSession, request: Request, parts: list[Part]
) -> Answer | None:
    """What the whole of a clock comes to where one worker steps on the only shard: nothing to
    collect and nobody to ask. None: it has to go the long way, to the same end."""
    step, since = request.message, group.at(group.committed)
    assert isinstance(step, Step)
    if shard.shards > 1 or since.guarded:
        return None
    if len(group.clocks) != 1 or session.rank not in group.clocks:
        return None
    plain = step.weight == step.factor == 1.0 and not step.skip and step.clip_norm == 0.0
    plain = plain and not step.enters
    if not plain or group.collect.pending or group.buffered or step.clock != group.committed:
        return None
    if any(block.drafted for block, _, _ in parts) or not finite(parts):
        return None
    commit = Commit(group.id, step.clock, (session.client,), since.policy.scale(1.0))
    push = PushInfo(-1, step.clock, group.version, 0, 1.0, commit.scale)
    written = apply_parts(group, step, parts, request.memory, push) if parts else ()
    group.staleness.setdefault(session.rank, Staleness()).add(0)
    group.mark(session.client, step.mark)
    assert group.lead is not None, "the only shard leads all groups"
    group.lead.last = commit
    group.commit((session.rank,))
    done = Done(step.seq, group.version, group.slowest)
    return with_values(shard, step, request.memory, done, written)


def vote(group: Group, shard: int, contributors: tuple[int, ...]) -> Vote:
    """What this shard can say about these contributions."""
    chosen = [
        (r, each)
        for r, each in sorted(group.collect.pending.items())
        if each.client in contributors
    ]
    held = [each for _, each in chosen]
    steps = [each.step for each in held]
    clip = max((step.clip_norm for step in steps), default=0.0)
    refusal = next((each.refusal for each in held if each.refusal is not None), None)
    refusal = refusal or refusal_of(steps, [rank for rank, _ in chosen])
    bad = [rank for rank, each in chosen if not each.finite]
    finite = not bad
    if bad and not refusal and group.at(group.committed).policy.on_nonfinite == "refuse":
        refusal = (
            "NonFinite",
            f"the gradients of ranks {bad} for group {group.name!r} hold NaN or Inf on shard "
            f"{shard}, although the workers found none",
            "do not write to a gradient after it was pushed",
        )
    squared = 0.0
    skip = any(step.skip for step in steps)
    if finite and not refusal and not skip and held:
        try:
            finite = not any(each.large for each in held) or _sum_is_finite(group, held)
            if not finite:
                if group.at(group.committed).policy.on_nonfinite == "refuse":
                    refusal = (
                        "NonFinite",
                        f"the sum of the gradients of ranks {[rank for rank, _ in chosen]} for "
                        f"group {group.name!r} is not finite on shard {shard}, although each is",
                        NONFINITE_FIX,
                    )
            elif clip > 0.0:
                squared = _squared_norm(group, held)
            else:
                _draft(group, held)
        except ParamServeError as error:
            refusal = (type(error).__name__, error.failed, error.fix)
        except MemoryError:
            refusal = (type(full := _full(group)).__name__, full.failed, full.fix)
    return Vote(
        group.id,
        group.committed,
        shard,
        contributors,
        finite,
        skip,
        sum(each.weight for each in held),
        clip,
        squared,
        refusal,
    )


def _sum_is_finite(group: Group, held: list[Contribution]) -> bool:
    """Whether these gradients, each finite, have a reduced one that is."""
    scale = policy_calls.scale(group.at(group.committed), sum(each.weight for each in held))
    for number, block in sorted(group.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having and any(each.large for each in having):
            gradient, _, _ = reduced(having, block, scale)
            if not block.finite(gradient, None):
                return False
    return True


def _squared_norm(group: Group, held: list[Contribution]) -> float:
    """Sum of the squares of the gradients' sum, to which the scale is still to be applied."""
    scale = policy_calls.scale(group.at(group.committed), sum(each.weight for each in held))
    squared = 0.0
    for number, block in sorted(group.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having:
            gradient, _, left = reduced(having, block, scale)
            part = block.squared_norm(gradient)
            squared += part if left == scale or not part else part / scale / scale
    return squared


def _draft(group: Group, held: list[Contribution]) -> None:
    """Make sure of what may fail before the clock is decided: then no shard applies it."""
    scale = policy_calls.scale(group.at(group.committed), sum(each.weight for each in held))
    key = _key(group, scale, held)
    push = PushInfo(-1, group.committed, group.version, 0, 1.0, scale)
    if len(held) > 1 or held[0].weight != 1.0:
        for each in group.blocks.values():
            each.reserve()
    for number, block in sorted(group.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having and block.drafted:
            gradient, active, left = reduced(having, block, scale)
            hyper = having[0].gradients[number][0].hyper
            its_push = push if left == scale else push._replace(scale=left)
            block.draft(gradient, active, hyper, its_push, key)


def _full(group: Group) -> Overloaded:
    return Overloaded(
        f"a server has no memory for an update of group {group.name!r}",
        applied="unknown",
        fix="use more servers on more machines, or smaller parameters",
    )


def _key(group: Group, scale: float, contributors: list[Contribution]) -> object:
    """What an update is computed from, as far as the lead's decision may change it."""
    return group.committed, scale, tuple(each.client for each in contributors)


def apply_commit(group: Group, commit: Commit, held: dict[int, Contribution]) -> None:
    """Do what the lead decided about the present clock.

    Guarded rules have mostly computed their updates before (`vote`), and what failed there was
    refused on all shards. With clipping the scale is known only now: where a rule fails here, this
    shard applies nothing and refuses the clock to its contributors (`ShardBlock.failure`), although
    others may have applied theirs, which a client tells from their answers.
    """
    chosen = [(r, each) for r, each in sorted(held.items()) if each.client in commit.contributors]
    contributors = [each for _, each in chosen]
    if not contributors:
        group.skipped += not commit.refusal
        return
    pushed = {
        number: having
        for number in sorted(group.blocks)
        if (having := [each for each in contributors if number in each.gradients])
    }
    try:
        _apply(group, commit, contributors, pushed)
    except (RuleFailed, TableFull, MemoryError) as error:
        failure = _full(group) if isinstance(error, MemoryError) else error
        # The frames behind it would hold the clients' memory.
        failure.__context__ = failure.__cause__ = None
        failure = failure.with_traceback(None)
        for number in pushed:
            group.blocks[number].failure = (commit.clock, failure)
    for rank, _ in chosen:
        group.staleness.setdefault(rank, Staleness()).add(0)
    if pushed:
        group.advance()  # also after a failure: in Sync all shards have one version


def _apply(
    group: Group,
    commit: Commit,
    contributors: list[Contribution],
    pushed: dict[int, list[Contribution]],
) -> None:
    push = PushInfo(-1, commit.clock, group.version, 0, 1.0, commit.scale)
    key = _key(group, commit.scale, contributors)
    for guarded in (True, False):  # what may fail comes first
        for number, having in pushed.items():
            block = group.blocks[number]
            if block.guarded is not guarded or block.has_draft(key):
                continue
            gradient, active, left = reduced(having, block, commit.scale)
            hyper = having[0].gradients[number][0].hyper
            its_push = push if left == commit.scale else push._replace(scale=left)
            if guarded:
                block.draft(gradient, active, hyper, its_push, key)
            else:
                block.apply(gradient, active, hyper, its_push)
    for number in pushed:
        if group.blocks[number].has_draft(key):
            group.blocks[number].keep_draft()


def _failure(group: Group, clock: int) -> ParamServeError | None:
    """Why this shard could not apply a clock that was decided."""
    failures = (block.failure for block in group.blocks.values())
    return next((each[1] for each in failures if each is not None and each[0] == clock), None)


def late(
    shard: ShardMembers, group: Group, request: Request, session: ShardSession, at: int
) -> Answer:
    """The answer to a step whose clock was over without it: it changes nothing, and its worker goes
    on at another one."""
    step = request.message
    assert isinstance(step, Step)
    if step.push:
        group.drop(session.rank)
    group.mark(session.client, step.mark)
    done = Done(step.seq, group.version, group.slowest, skipped=True, at=at)
    return with_values(shard, step, request.memory, done)


def after_commit(
    shard: ShardMembers,
    group: Group,
    commit: Commit,
    step: Step,
    session: ShardSession,
    own: Refusal | None = None,
) -> Answer:
    """The answer to a step that was held until its clock was decided.

    Args:
        own: why this shard refuses the step, if it does.
    """
    request = session.held
    assert request is not None
    if own is not None:  # also if the clock was decided without it; its reads may be wrong, too
        kind, failed, fix = own
        return Answer(Refused(step.seq, kind, failed, "no", fix))
    if session.client not in commit.contributors:
        if commit.refusal:
            kind, failed, fix = commit.refusal
            error = rebuild(kind, failed, "no", fix)
            return Answer(Refused(step.seq, type(error).__name__, failed, "no", fix))
        if session.fenced:
            text = f"worker {session.rank} counted as dead when clock {commit.clock} was applied"
            return Answer(Refused(step.seq, "WorkerFenced", text, "no", "let this process end"))
    group.mark(session.client, step.mark)
    skipped = session.client not in commit.contributors
    if skipped and commit.contributors and step.push:
        group.drop(session.rank)  # decided without it, as its policy allows
    failure = None if skipped else _failure(group, commit.clock)
    if failure is not None:
        kind = type(failure).__name__
        return Answer(Refused(step.seq, kind, failure.failed, failure.applied, failure.fix))
    done = Done(step.seq, group.version, group.slowest, 0, skipped)
    return with_values(shard, step, request.memory, done)
