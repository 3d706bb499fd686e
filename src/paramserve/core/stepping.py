"""What one step does to a group's blocks: check its parts, and do with them what its policy says.

Functions of the group's state: none of them answers a step or decides which one waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.config import NO_RANK
from paramserve.consistency.base import APPLY, Apply, Buffer, Drop, new_push
from paramserve.core import policy_calls
from paramserve.core.block import ShardBlock
from paramserve.core.group_state import GroupState
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.request_memory import Memory
from paramserve.core.shard_sessions import ShardSession
from paramserve.core.shard_storage import Keep
from paramserve.core.sums import addable
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import (
    NonFinite,
    ParamServeError,
    RuleFailed,
    ShapeMismatch,
    TableFull,
    rebuild,
)
from paramserve.messages import NOTE_BYTES_MAX, Done, Gradient, ReadTarget, Step
from paramserve.rules.base import Hyper, PushInfo, new_push_info
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]
Part = tuple[ShardBlock | KeyedBlock, Gradient, Any]
"""A block, what a step says of its gradient, and that: an array, or of a table a `RowGradient`."""


def gradients(state: GroupState, step: Step, memory: Memory) -> list[Part]:
    """Check a step whole and find its gradients; nothing is written.

    Raises:
        ParamServeError: something about it is wrong. Nothing was applied.
    """
    if not 0.0 < step.weight < math.inf:
        raise ParamServeError(f"weight {step.weight} is not positive", fix="give a number > 0")
    if not 0.0 < step.factor < math.inf:
        raise ParamServeError(f"factor {step.factor} is not positive", fix="give a number > 0")
    if not 0.0 <= step.clip_norm < math.inf:
        raise ParamServeError(f"clip_norm {step.clip_norm} is negative", fix="give a number > 0")
    if step.note and len(step.note) > NOTE_BYTES_MAX:
        raise ParamServeError(
            f"a note of {len(step.note)} bytes, allowed are {NOTE_BYTES_MAX}", fix="send less"
        )
    blocks = state.blocks
    parts: list[Part] = []
    for header in step.push:
        block = blocks[header.block] if header.block in blocks else state.block(header.block)
        if (header.active, header.hyper) != block.checked:
            block.check(header.active, header.hyper)
        if type(block) is ShardBlock:
            if header.encoded_bytes:
                gradient = block.decoded(memory, header)
            else:
                gradient = memory.at(header.arena, header.offset, block.sent)
            parts.append((block, header, gradient))
        else:
            parts.append((block, header, block.gradient(memory, header)))
    if step.pull:
        check_reads(state, step.pull, memory)
    if step.push[1:] and len({header.block for header in step.push}) < len(parts):
        raise ShapeMismatch(
            f"a step has {len(parts)} gradients for blocks {[g.block for g in step.push]}",
            fix="send one gradient for each block",
        )
    return parts


def check_reads(state: GroupState, pull: Sequence[ReadTarget], memory: Memory) -> None:
    """Check where values of a group are to be written.

    Raises:
        ParamServeError: something about it is wrong. Nothing was read.
    """
    blocks = state.blocks
    for place in pull:
        block = blocks[place.block] if place.block in blocks else state.block(place.block)
        if type(block) is KeyedBlock:
            block.check_place(memory, place)
        elif place.room:
            block.check_room(memory, place)
        else:
            memory.at(place.arena, place.offset, block.sent)


def largest(parts: list[Part], step: Step | None = None) -> float:
    """The largest size of an active element, inf if one is NaN or Inf: as the client of the step
    has found it when it captured the gradients, else from a pass over them."""
    if step is not None and step.largest >= 0.0:
        return step.largest
    most = 0.0
    for block, header, gradient in parts:
        size = block.largest(gradient, header.active)
        most = size if size > most else most
    return most


def apply_now(
    state: GroupState,
    session: ShardSession,
    step: Step,
    parts: list[Part],
    memory: Memory,
    epoch: PolicyEpoch,
) -> tuple[Done, Collection[int]]:
    """Do with a push what its policy says, by itself (all policies but those that collect).

    Returns:
        The answer, and the blocks whose pulled values are left at their places already.
    Raises:
        NonFinite: and the policy refuses it. Nothing was applied.
        NonFinite: a gradient was written to after it was looked at. They were applied in part if
            a rule of ours found it ("Applied: unknown"), else not.
        RuleFailed: of one of the blocks. Nothing was applied to any of them.
        PolicyFailed: nothing was applied.
    """
    skip = step.skip
    size = 0.0 if skip else largest(parts, step)
    if size == math.inf:
        if epoch.policy.on_nonfinite == "refuse":
            raise _not_finite(state, session)
        skip = True
    if skip:
        return _skip(state, session, step), ()
    if not parts:
        state.mark(session.client, step.mark)
        return Done(step.seq, state.version, state.members.slowest), ()
    state.collect.prepared = None  # it was computed from what is changed now
    staleness = state.version - step.base if state.version > step.base else 0
    if staleness:
        for block, _, _ in parts:
            if type(block) is not ShardBlock or block.size:
                break
        else:
            staleness = 0  # nothing of what is pushed lies here, and its client has read elsewhere
    push = new_push((session.rank, step.clock, staleness, step.weight, step.factor))
    decision = policy_calls.on_push(epoch, push, state)
    written: Collection[int] = ()
    dropped = False
    match decision:
        case Drop():
            state.drop(session.rank)
            dropped = True
        case Buffer():
            large = state.buffer.large or not addable(parts, decision.weight, size)
            if large and not state.buffer.fits(parts, decision.weight):
                return _overflown(state, session, step, epoch), ()
            _buffer(state, parts, decision, step.clock)
        case Apply():
            if state.buffer.count:
                flush(state)
            if decision.compensate:
                corrected = _corrected(state, session, step, parts, decision, epoch)
                if corrected is None:
                    return _skip(state, session, step), ()
                parts = corrected
            push_info = new_push_info(
                (session.rank, step.clock, state.version, staleness, step.weight, decision.scale)
            )
            try:
                written = apply_parts(state, step, parts, memory, push_info, decision)
            except NonFinite as error:
                if error.applied != "no" or epoch.policy.on_nonfinite == "refuse":
                    raise
                return _skip(state, session, step), ()
    if step.mark is not None:
        state.mark(session.client, step.mark)
    if not dropped:
        state.count_staleness(session.rank, staleness)
    return Done(step.seq, state.version, state.members.slowest, staleness, dropped), written


def _not_finite(state: GroupState, session: ShardSession) -> NonFinite:
    return NonFinite(
        f"the gradient of worker {session.rank} (client {session.client}) for group "
        f"{state.name!r} holds NaN or Inf",
        fix="lower the learning rate, clip, or use on_nonfinite='skip'",
    )


def _overflown(state: GroupState, session: ShardSession, step: Step, epoch: PolicyEpoch) -> Done:
    """A gradient is left out, as its policy says of NaN and Inf: with it, the buffer would hold
    some."""
    _drop_nonfinite(state)
    if epoch.policy.on_nonfinite == "refuse":
        raise NonFinite(
            f"the sum of the gradients in the buffer of group {state.name!r} is not finite with "
            f"that of worker {session.rank} (client {session.client}), although each is",
            fix="lower the learning rate, clip, or use on_nonfinite='skip'",
        )
    return _skip(state, session, step)


def _skip(state: GroupState, session: ShardSession, step: Step) -> Done:
    """A step ends without its gradients, as its policy says of NaN and Inf."""
    state.skipped += 1
    state.mark(session.client, step.mark)
    return Done(step.seq, state.version, state.members.slowest, skipped=True)


def _corrected(
    state: GroupState,
    session: ShardSession,
    step: Step,
    parts: list[Part],
    how: Apply,
    epoch: PolicyEpoch,
) -> list[Part] | None:
    """The gradients, corrected by what the values have changed since they were read; None: they
    cannot be applied.

    Raises:
        NonFinite: they are not finite any more, and the policy refuses that. Nothing was applied.
    """
    # With several blocks, one may have been read before the others were.
    changed = state.version > step.base or len(state.blocks) > 1
    if not changed:
        return parts
    parts = _compensated(state.reads.of(session.rank, step.base), parts, how.compensate)
    good = largest(parts) < math.inf
    if not good and epoch.policy.on_nonfinite == "refuse":
        raise NonFinite(
            f"the gradient of worker {session.rank} for group {state.name!r} was finite, and "
            f"is not when corrected by {how.compensate} * g * g * change of the values",
            fix="lower lam or the learning rate, clip, or use on_nonfinite='skip'",
        )
    return parts if good else None


def apply_parts(
    state: GroupState,
    step: Step,
    parts: list[Part],
    memory: Memory,
    push: PushInfo,
    how: Apply = APPLY,
) -> Collection[int]:
    """Apply one step's gradients as one update.

    Args:
        how: of it, what concerns hyper-parameters; `push` has its scale.
    Returns:
        The blocks whose pulled values are left at their places already.
    Raises:
        RuleFailed: of one of the blocks. Nothing was applied to any of them.
        NonFinite: a gradient was written to after it was looked at. They were applied in part if
            a rule of ours found it ("Applied: unknown"), else not.
    """
    places: dict[int, ReadTarget] = {}
    for place in step.pull:
        if not place.room:
            places[place.block] = place
    written: dict[int, Array] = {}
    for block, header, _ in parts:
        if type(block) is ShardBlock and header.block in places:
            place = places[header.block]
            written[header.block] = memory.at(place.arena, place.offset, block.sent)
    keep: dict[int, Keep] = {}
    if step.push[1:]:  # none is changed before all that may fail are prepared
        for block, header, gradient in parts:
            if block.may_fail:
                hyper, its_push = adapted(block, header.hyper, push, how)
                keep[header.block] = block.prepare(gradient, header.active, hyper, its_push)
    for block, header, gradient in parts:
        out: Array | None = None
        if header.block in written:
            out = written[header.block]
        if header.block in keep:
            keep[header.block](out)
            continue
        hyper, its_push = header.hyper, push
        if how is not APPLY:
            hyper, its_push = adapted(block, hyper, push, how)
        try:
            block.apply(gradient, header.active, hyper, its_push, out)
        except NonFinite as error:
            if error.applied != "no":
                state.advance()
            raise
    state.advance()
    return written


def _compensated(read: Mapping[int, Array], parts: list[Part], lam: float) -> list[Part]:
    """The gradients, corrected by what the values have changed since they were read."""
    compensate = compiled().compensate
    corrected_parts: list[Part] = []
    for block, header, gradient in parts:
        before = read.get(block.spec.block)
        if before is not None and isinstance(block, ShardBlock) and block.size:
            corrected = block.scratch
            if gradient.dtype == corrected.dtype:
                np.copyto(corrected, gradient)
            else:
                block.widened(gradient)
            compensate(corrected, block.value, before, lam)
            corrected_parts.append((block, header, corrected))
        else:
            corrected_parts.append((block, header, gradient))
    return corrected_parts


MOMENTA = ("momentum", "beta1", "betas.0")
"""What SGD, Adam and torch's rules call it."""
MOMENTUM_MIN = 1e-12
"""Not 0: a rule without any would leave its buffer as it is, stale for when momentum comes back."""


def adapted(
    block: ShardBlock | KeyedBlock, hyper: Hyper | None, push: PushInfo, how: Apply
) -> tuple[Hyper | None, PushInfo]:
    """What a policy makes of a push's hyper-parameters, and of its scale where the rule has none
    that would do."""
    if not how.momentum_reduction and how.lr_scale == 1.0:
        return hyper, push
    assert block.rule is not None, "check() comes first"
    names, numbers = block.rule.hyper_names, list(hyper if hyper is not None else block.hyper)
    for name in MOMENTA:
        if how.momentum_reduction and name in names:
            at = names.index(name)
            numbers[at] = numbers[at] and max(numbers[at] - how.momentum_reduction, MOMENTUM_MIN)
            break
    if "lr" in names:
        numbers[names.index("lr")] *= how.lr_scale
    else:
        push = push._replace(scale=push.scale * how.lr_scale)
    return tuple(numbers), push


def _buffer(state: GroupState, parts: list[Part], how: Buffer, clock: int) -> None:
    """Add a gradient to the buffer, and apply that if it is full."""
    buffer = state.buffer
    if buffer.count + 1 >= how.size:
        push = PushInfo(-1, clock, state.version, 0, 1.0, 1.0 / (buffer.count + 1))
        try:
            keep = buffer.prepare(state.blocks, parts, how.weight, push)
        except NonFinite:
            _drop_nonfinite(state)
            raise
        before = buffer.count
        buffer.add(parts, how.weight)
        try:
            buffer.apply(state.blocks, push, keep)
        except (RuleFailed, TableFull, NonFinite, MemoryError):
            # Those that were in the buffer may be lost.
            state.dropped[NO_RANK] = state.dropped.get(NO_RANK, 0) + before
            raise
        finally:
            state.advance()  # it may be applied in part
    else:
        buffer.add(parts, how.weight)


def _drop_nonfinite(state: GroupState) -> None:
    """Begin the buffer anew if it holds NaN or Inf, of a gradient that was written to after it was
    looked at: no sum with it could be applied."""
    buffer = state.buffer
    if not buffer.finite(state.blocks):
        state.dropped[NO_RANK] = state.dropped.get(NO_RANK, 0) + buffer.count
        buffer.clear()


def flush(state: GroupState) -> None:
    """Apply what is in the buffer, however much it is. Where that fails on this shard, the group's
    next step is refused with it (`GroupState.unapplied`)."""
    buffer = state.buffer
    if not buffer.count:
        return
    state.collect.prepared = None  # it was computed from what is changed now
    count = buffer.count
    push = PushInfo(-1, state.members.slowest, state.version, 0, 1.0, 1.0 / count)
    try:
        buffer.apply(state.blocks, push)
    except (RuleFailed, TableFull, NonFinite, MemoryError) as error:
        state.dropped[NO_RANK] = state.dropped.get(NO_RANK, 0) + count
        state.unapplied = _unapplied(state, count, error)
        if state.buffer_lost is not None:
            state.buffer_lost(state.unapplied)
    state.advance()


def _unapplied(state: GroupState, count: int, error: Exception) -> ParamServeError:
    """Why gradients are lost that no step waits for."""
    kind, why, fix = "Overloaded", "it has no memory for it", "use more servers"
    if isinstance(error, ParamServeError):
        kind, why, fix = type(error).__name__, error.failed, error.fix
    return rebuild(
        kind,
        f"a shard has lost {count} gradients of group {state.name!r} that it had collected before, "
        f"and others may have applied theirs: {why}",
        "no",
        f"{fix}; the values may be of two versions now: assign them, or go back to a checkpoint",
    )
