"""What a synchronous clock does to a group's blocks: collect gradients, tell the lead, apply.

Functions of the group's state: none of them answers a step or decides which one waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy.typing as npt

from paramserve.core import policy_calls
from paramserve.core.block import ShardBlock
from paramserve.core.commit import NONFINITE_FIX, Contribution, PreparedUpdates, refusal_of
from paramserve.core.group_state import GroupState
from paramserve.core.shard_sessions import Request, ShardSession
from paramserve.core.shard_storage import Keep
from paramserve.core.stepping import Part, finite
from paramserve.core.sums import addable, reduced
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import (
    NotAMember,
    Overloaded,
    ParamServeError,
    ProtocolError,
    RuleFailed,
    TableFull,
)
from paramserve.messages import Commit, Step, Vote
from paramserve.rules.base import Hyper, PushInfo

Array = npt.NDArray[Any]
Refusal = tuple[str, str, str]
"""Kind, what failed, and how to correct it."""


def refusal_with(state: GroupState, shard: int, rank: int, wrong: Exception) -> Refusal:
    """Why a shard refuses a worker's step of the present clock, for all workers of the clock."""
    fix = "correct the argument"
    kind, failed = ParamServeError.__name__, str(wrong)
    if isinstance(wrong, ParamServeError):
        kind, failed, fix = type(wrong).__name__, wrong.failed, wrong.fix
    failed = (
        f"the step of rank {rank} for clock {state.committed} of group {state.name!r} was refused "
        f"by shard {shard}: {failed}"
    )
    return kind, failed, fix


def collect(
    state: GroupState,
    session: ShardSession,
    request: Request,
    parts: list[Part],
    refusal: Refusal | None = None,
) -> None:
    """Keep a worker's gradients of the present clock, unapplied (Sync).

    Args:
        refusal: why this shard refuses the step, which then has no parts.

    Raises:
        NotAMember, ProtocolError: nothing was applied or kept.
    """
    step = request.message
    assert isinstance(step, Step)
    rank = session.rank
    if rank not in state.members.clocks:
        raise NotAMember(
            f"client {session.client} (rank {rank}) pushed to group {state.name!r}, "
            f"which steps in Sync with the live workers {sorted(state.members.clocks)}",
            fix="push from a worker, or use consistency=ps.Async()",
        )
    if not step.tick or step.clock != state.committed or rank in state.collect.pending:
        raise ProtocolError(
            f"worker {rank} sent gradients for clock {step.clock} "
            f"({'with' if step.tick else 'without'} a tick); group {state.name!r} is at clock "
            f"{state.committed}",
            fix="end each synchronous step with exactly one tick, in order",
        )
    by_block = {block.spec.block: (header, gradient) for block, header, gradient in parts}
    held = Contribution(step, session, by_block, finite=True, refusal=refusal)
    if not step.skip and not addable(parts, held.weight):
        held.finite = finite(parts)
        held.large = held.finite
    state.collect.pending[rank] = held


def cannot_fail(parts: list[Part]) -> bool:
    """Whether these gradients can be applied without being prepared."""
    return not any(block.may_fail for block, _, _ in parts) and finite(parts)


def vote(state: GroupState, shard: int, contributors: tuple[int, ...]) -> Vote:
    """What this shard can say about these contributions; prepares their update."""
    state.collect.prepared = None
    chosen = [
        (r, each)
        for r, each in sorted(state.collect.pending.items())
        if each.session.client in contributors
    ]
    held = [each for _, each in chosen]
    steps = [each.step for each in held]
    clip = max((step.clip_norm for step in steps), default=0.0)
    refusal = next((each.refusal for each in held if each.refusal is not None), None)
    refusal = refusal or refusal_of(steps, [rank for rank, _ in chosen], state.blocks)
    bad = [rank for rank, each in chosen if not each.finite]
    finite = not bad
    if bad and not refusal and state.at(state.committed).policy.on_nonfinite == "refuse":
        refusal = (
            "NonFinite",
            f"the gradients of ranks {bad} for group {state.name!r} hold NaN or Inf on shard "
            f"{shard}, although the workers found none",
            "do not write to a gradient after it was pushed",
        )
    squared = 0.0
    skip = any(step.skip for step in steps)
    if finite and not refusal and not skip and held:
        try:
            finite = not any(each.large for each in held) or _sum_is_finite(state, held)
            if not finite:
                if state.at(state.committed).policy.on_nonfinite == "refuse":
                    refusal = (
                        "NonFinite",
                        f"the sum of the gradients of ranks {[rank for rank, _ in chosen]} for "
                        f"group {state.name!r} is not finite on shard {shard}, although each is",
                        NONFINITE_FIX,
                    )
            elif clip > 0.0:
                squared = _squared_norm(state, held)
            else:
                _prepare(state, held)
        except ParamServeError as error:
            refusal = (type(error).__name__, error.failed, error.fix)
        except MemoryError:
            refusal = (type(full := _full(state)).__name__, full.failed, full.fix)
    return Vote(
        state.id,
        state.committed,
        shard,
        contributors,
        finite,
        skip,
        sum(each.weight for each in held),
        state.members.number,
        clip,
        squared,
        refusal,
    )


def _sum_is_finite(state: GroupState, held: list[Contribution]) -> bool:
    """Whether these gradients, each finite, have a reduced one that is."""
    scale = policy_calls.scale(state.at(state.committed), sum(each.weight for each in held))
    for number, block in sorted(state.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having and any(each.large for each in having):
            gradient, _, _ = reduced(having, block, scale)
            if not block.finite(gradient, None):
                return False
    return True


def _squared_norm(state: GroupState, held: list[Contribution]) -> float:
    """Sum of the squares of the gradients' sum, to which the scale is still to be applied; the
    update has its memory then, and rows."""
    scale = policy_calls.scale(state.at(state.committed), sum(each.weight for each in held))
    squared = 0.0
    for number, block in sorted(state.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having:
            gradient, _, left = reduced(having, block, scale)
            if isinstance(block, KeyedBlock):
                block.reserve_rows(gradient)
            part = block.squared_norm(gradient)
            squared += part if left == scale or not part else part / scale / scale
    return squared


def _prepare(state: GroupState, held: list[Contribution]) -> None:
    """Prepare what may fail before the clock is decided: then no shard applies it."""
    scale = policy_calls.scale(state.at(state.committed), sum(each.weight for each in held))
    push = PushInfo(-1, state.committed, state.version, 0, 1.0, scale)
    whole = all(header.active is None for header in held[0].step.push)
    if len(held) > 1 or held[0].weight != 1.0 or not whole:  # there is a sum
        for each in state.blocks.values():
            each.reserve()
    may_fail = [block for block in state.blocks.values() if block.may_fail]
    keep = {
        block.spec.block: block.prepare(*arguments)
        for block, arguments in _updates(may_fail, held, push)
    }
    clients = tuple(each.session.client for each in held)
    state.collect.prepared = PreparedUpdates(scale, clients, keep)


def _updates(
    blocks: Iterable[ShardBlock | KeyedBlock], contributors: list[Contribution], push: PushInfo
) -> Iterator[tuple[ShardBlock | KeyedBlock, tuple[Any, Any, Hyper | None, PushInfo]]]:
    """Those of the blocks that have gradients, with what `apply` and `prepare` are given."""
    for block in blocks:
        number = block.spec.block
        having = [each for each in contributors if number in each.gradients]
        if having:
            gradient, active, left = reduced(having, block, push.scale)
            hyper = having[0].gradients[number][0].hyper
            its_push = push if left == push.scale else push._replace(scale=left)
            yield block, (gradient, active, hyper, its_push)


def _full(state: GroupState) -> Overloaded:
    return Overloaded(
        f"a server has no memory for an update of group {state.name!r}",
        applied="unknown",
        fix="use more servers on more machines, or smaller parameters",
    )


def apply_commit(
    state: GroupState,
    commit: Commit,
    chosen: dict[int, Contribution],
    prepared: PreparedUpdates | None,
) -> ParamServeError | None:
    """Do what the lead decided about the present clock; why this shard could not, if so.

    What may fail was mostly prepared before (`vote`), and what failed there was refused on all
    shards. With clipping the scale is known only now: where a rule fails here, this shard applies
    nothing and refuses the clock to its contributors, although others may have applied theirs,
    which a client tells from their answers.

    Args:
        chosen: the contributions that the lead decided for, by rank.
        prepared: what `vote` has prepared.
    """
    contributors = [each for _, each in sorted(chosen.items())]
    if not contributors:
        state.skipped += not commit.refusal
        return None
    failure: ParamServeError | None = None
    try:
        _apply(state, commit, contributors, prepared)
    except (RuleFailed, TableFull, MemoryError) as error:
        failure = _full(state) if isinstance(error, MemoryError) else error
        # The frames behind it would hold the clients' memory.
        failure.__context__ = failure.__cause__ = None
        failure = failure.with_traceback(None)
    for rank in sorted(chosen):
        state.count_staleness(rank, 0)
    if any(number in each.gradients for each in contributors for number in state.blocks):
        state.advance()  # also after a failure: in Sync all shards have one version
    return failure


def _apply(
    state: GroupState,
    commit: Commit,
    contributors: list[Contribution],
    prepared: PreparedUpdates | None,
) -> None:
    push = PushInfo(-1, commit.clock, state.version, 0, 1.0, commit.scale)
    clients = tuple(each.session.client for each in contributors)
    blocks, keep = [each for _, each in sorted(state.blocks.items())], dict[int, Keep]()
    if prepared is not None and (prepared.scale, prepared.clients) == (commit.scale, clients):
        keep.update(prepared.keep)
    elif len(blocks) > 1:  # none is changed before all that may fail are prepared
        may_fail = [block for block in blocks if block.may_fail]
        for block, arguments in _updates(may_fail, contributors, push):
            keep[block.spec.block] = block.prepare(*arguments)
    rest = [block for block in blocks if block.spec.block not in keep]
    for block, arguments in _updates(rest, contributors, push):
        block.apply(*arguments)
    for each in keep.values():
        each()
