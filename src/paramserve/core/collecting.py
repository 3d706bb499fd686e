"""What a synchronous clock does to a group's blocks: collect gradients, tell the lead, apply.

Functions of the group's state: none of them answers a step or decides which one waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt

from paramserve.core import policy_calls
from paramserve.core.block import ShardBlock
from paramserve.core.commit import NONFINITE_FIX, Contribution, PreparedUpdates, refusal_of
from paramserve.core.group_state import GroupState
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.shard_sessions import Request, ShardSession
from paramserve.core.shard_storage import Keep
from paramserve.core.stepping import Part, largest
from paramserve.core.sums import addable, reduced
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import (
    NonFinite,
    NotAMember,
    Overloaded,
    ParamServeError,
    ProtocolError,
    RuleFailed,
    TableFull,
)
from paramserve.messages import Commit, Gradient, Step, Vote
from paramserve.rules.base import Hyper, PushInfo, new_push_info

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
    assert type(step) is Step
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
    by_block: dict[int, tuple[Gradient, Any]] = {}
    for _, header, gradient in parts:
        by_block[header.block] = header, gradient
    weight = step.weight * step.factor
    own = Contribution(step, session, by_block, finite=True, weight=weight, refusal=refusal)
    if not step.skip:
        size = largest(parts, step)
        if not addable(parts, own.weight, size):
            own.large = own.finite = size < math.inf
    state.collect.pending[rank] = own


def cannot_fail(step: Step, parts: list[Part]) -> bool:
    """Whether these gradients can be applied without being prepared."""
    may_fail = False
    for block, _, _ in parts:
        may_fail = may_fail or block.may_fail
    return not may_fail and largest(parts, step) < math.inf


def vote(state: GroupState, shard: int, contributors: tuple[int, ...], decision: int) -> Vote:
    """Prepare the update of these contributions, and say what this shard can of them, and up to
    which entry it has applied the decision log."""
    epoch, pending = state.at(state.committed), state.collect.pending
    state.collect.forget_prepared()
    ranks = [rank for rank in sorted(pending) if pending[rank].session.client in contributors]
    contributions = [pending[rank] for rank in ranks]
    others = _without_nonfinite(epoch, contributions)
    if others:
        ranks, contributions = [each.session.rank for each in others], others
    steps = [each.step for each in contributions]
    weights = sum([each.weight for each in contributions])
    refusal: Refusal | None = None
    clip, skip, large = 0.0, False, False
    bad: list[int] = []
    for rank, each in zip(ranks, contributions, strict=True):
        refusal = refusal or each.refusal
        clip = each.step.clip_norm if each.step.clip_norm > clip else clip
        skip = skip or each.step.skip
        large = large or each.large
        if not each.finite:
            bad.append(rank)
    refusal = refusal or refusal_of(steps, ranks, state.blocks)
    finite = not bad
    if bad and not refusal and epoch.policy.on_nonfinite == "refuse":
        refusal = (
            "NonFinite",
            f"the gradients of ranks {bad} for group {state.name!r} hold NaN or Inf on shard "
            f"{shard}, although the workers found none",
            "do not write to a gradient after it was pushed",
        )
    squared = 0.0
    if finite and not refusal and not skip and contributions:
        try:
            scale = policy_calls.scale(epoch, weights)
            finite = not large or _sum_is_finite(state, contributions, scale)
            if not finite:
                if epoch.policy.on_nonfinite == "refuse":
                    refusal = (
                        "NonFinite",
                        f"the sum of the gradients of ranks {ranks} for "
                        f"group {state.name!r} is not finite on shard {shard}, although each is",
                        NONFINITE_FIX,
                    )
            elif clip > 0.0:
                squared = _squared_norm(state, contributions, scale)
            else:
                _prepare(state, contributions, scale)
        except NonFinite as error:
            finite = False
            if epoch.policy.on_nonfinite == "refuse":
                refusal = (type(error).__name__, error.failed, error.fix)
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
        weights,
        decision,
        clip,
        squared,
        refusal,
        tuple([(each.session.client, each.weight) for each in others]),
    )


def _without_nonfinite(epoch: PolicyEpoch, parts: list[Contribution]) -> list[Contribution]:
    """The contributions of a clock whose policy leaves out those with NaN or Inf; empty: none is
    to be left out, or nothing would be left."""
    if not epoch.policy.skips_alone or epoch.policy.on_nonfinite == "refuse":
        return []
    good = [each for each in parts if each.finite and not each.step.skip and not each.refusal]
    refused = any(each.refusal for each in parts)
    return good if len(good) < len(parts) and not refused else []


def _sum_is_finite(state: GroupState, contributions: list[Contribution], scale: float) -> bool:
    """Whether these gradients, each finite, have a reduced one that is."""
    for number, block in sorted(state.blocks.items()):
        having = [each for each in contributions if number in each.gradients]
        if having and any(each.large for each in having):
            gradient, _, _ = reduced(having, block, scale)
            if block.largest(gradient, None) == math.inf:
                return False
    return True


def _squared_norm(state: GroupState, contributions: list[Contribution], scale: float) -> float:
    """Sum of the squares of the gradients' sum, to which the scale is still to be applied; the
    update has its memory then, and room for its rows."""
    squared = 0.0
    for number, block in sorted(state.blocks.items()):
        having = [each for each in contributions if number in each.gradients]
        if having:
            gradient, _, scale_to_apply = reduced(having, block, scale)
            if isinstance(block, KeyedBlock):
                block.find_room(gradient)
                _hold(state, block)
            part = block.squared_norm(gradient)
            squared += part if scale_to_apply == scale or not part else part / scale / scale
    return squared


def _prepare(state: GroupState, contributions: list[Contribution], scale: float) -> None:
    """Prepare what may fail before the clock is decided: then no shard applies it."""
    push = new_push_info((-1, state.committed, state.version, 0, 1.0, scale))
    whole = True
    for header in contributions[0].step.push:
        whole = whole and header.active is None
    if len(contributions) > 1 or contributions[0].weight != 1.0 or not whole:  # there is a sum
        for each in state.blocks.values():
            each.reserve()
    keep: dict[int, Keep] = {}
    for block, arguments in _updates(_that_may_fail(state), contributions, push):
        keep[block.spec.block] = block.prepare(*arguments)
        if isinstance(block, KeyedBlock):
            _hold(state, block)
    clients = tuple([each.session.client for each in contributions])
    state.collect.prepared = PreparedUpdates(scale, clients, keep)


def _hold(state: GroupState, block: KeyedBlock) -> None:
    """What is put in the table before the clock is decided takes no room from its rows."""
    block.hold()
    state.collect.reserved.append(block)


def _that_may_fail(state: GroupState) -> list[ShardBlock | KeyedBlock]:
    """The blocks whose updates may fail, in order."""
    blocks = state.blocks
    return [blocks[number] for number in sorted(blocks) if blocks[number].may_fail]


def _updates(
    blocks: Iterable[ShardBlock | KeyedBlock], contributors: list[Contribution], push: PushInfo
) -> Iterator[tuple[ShardBlock | KeyedBlock, tuple[Any, Any, Hyper | None, PushInfo]]]:
    """Blocks that have gradients, with the arguments of `apply` and `prepare`."""
    for block in blocks:
        number = block.spec.block
        having = [each for each in contributors if number in each.gradients]
        if having:
            gradient, active, scale_to_apply = reduced(having, block, push.scale)
            hyper = having[0].gradients[number][0].hyper
            its_push = push if scale_to_apply == push.scale else push._replace(scale=scale_to_apply)
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
    by_rank: dict[int, Contribution],
    prepared: PreparedUpdates | None,
) -> ParamServeError | None:
    """Do what the lead decided about the present clock; why this shard could not, if so.

    What may fail was mostly prepared before (`vote`), and what failed there was refused on all
    shards. With clipping the scale is known only now: where a rule fails here, this shard applies
    nothing and refuses the clock to its contributors, although others may have applied theirs,
    which a client tells from their answers.

    Args:
        by_rank: the contributions that the lead decided for, by rank.
        prepared: what `vote` has prepared.
    """
    contributors = [by_rank[rank] for rank in sorted(by_rank)]
    if not contributors:
        state.skipped += not commit.refusal
        return None
    failure: ParamServeError | None = None
    try:
        _apply(state, commit, contributors, prepared)
    except (RuleFailed, TableFull, NonFinite, MemoryError) as error:
        failure = _full(state) if isinstance(error, MemoryError) else error
        # The frames behind it would hold the clients' memory.
        failure.__context__ = failure.__cause__ = None
        failure = failure.with_traceback(None)
    for rank in sorted(by_rank):
        state.count_staleness(rank, 0)
    pushed = False
    for each in contributors:
        for number in each.gradients:
            pushed = pushed or number in state.blocks
    if pushed:
        state.advance()  # also after a failure: in Sync all shards have one version
    return failure


def _apply(
    state: GroupState,
    commit: Commit,
    contributors: list[Contribution],
    prepared: PreparedUpdates | None,
) -> None:
    push = new_push_info((-1, commit.clock, state.version, 0, 1.0, commit.scale))
    clients = tuple([each.session.client for each in contributors])
    keep: dict[int, Keep] = {}
    if prepared is not None and (prepared.scale, prepared.clients) == (commit.scale, clients):
        keep = dict(prepared.keep)
    elif len(state.blocks) > 1:  # none is changed before all that may fail are prepared
        for block, arguments in _updates(_that_may_fail(state), contributors, push):
            keep[block.spec.block] = block.prepare(*arguments)
    rest = [state.blocks[number] for number in sorted(state.blocks) if number not in keep]
    for block, arguments in _updates(rest, contributors, push):
        block.apply(*arguments)
    for number in keep:
        keep[number]()


def flush_of(state: GroupState, by_rank: Mapping[int, Contribution]) -> int:
    """The flush that a clock was which these contributions made; 0: none, or one of their clients
    keeps something that it did not flush."""
    numbers = {each.step.flush for each in by_rank.values() if each.step.flush}
    for each in by_rank.values():
        keeps = each.step.leaves or state.id in each.session.left_out
        if keeps and not each.step.flush:
            return 0
    return numbers.pop() if len(numbers) == 1 else 0
