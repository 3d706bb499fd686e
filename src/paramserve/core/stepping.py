"""What one step does to a group's blocks: read its parts, apply or collect them, write values.

Functions of the shard's state; none of them answers anybody or decides who waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.group import Group, Staleness
from paramserve.core.shard_session import Answer, Memory, Request, ShardSession
from paramserve.core.two_stroke import Contribution, refusal_of, total
from paramserve.errors import (
    NonFinite,
    NotAMember,
    ParamServeError,
    ProtocolError,
    RuleFailed,
    ShapeMismatch,
    UnknownName,
    rebuild,
)
from paramserve.messages import (
    ALIGN,
    Commit,
    Done,
    Fetch,
    Gradient,
    Place,
    Ready,
    Refused,
    Step,
    TakeSnapshot,
)
from paramserve.rules.base import PushInfo

if TYPE_CHECKING:
    from paramserve.core.shard import Shard

from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Part = tuple[ShardBlock, Gradient, Array]


def padded(nbytes: int) -> int:
    """Bytes that a part takes in a payload."""
    return -(-nbytes // ALIGN) * ALIGN


def view(memory: Memory, arena: int, offset: int, block: ShardBlock) -> Array:
    """The block's part of a request's memory, [elements on this shard].

    Raises:
        ShapeMismatch: the memory does not hold that many bytes there. Nothing was applied.
    """
    if block.size == 0:
        return np.empty(0, block.dtype)
    whole = memory.get(arena)
    wrong = offset < 0 or offset % block.alignment
    if whole is None or wrong or offset + block.nbytes > whole.size:
        raise ShapeMismatch(
            f"{block.nbytes} bytes at offset {offset} of arena {arena} for block "
            f"{block.spec.block}, but there are {0 if whole is None else whole.size} bytes",
            fix="send exactly the elements that this shard holds, at aligned offsets",
        )
    return np.frombuffer(whole, block.dtype, block.size, offset)


def one(block: ShardBlock, arena: int, offset: int, memory: Memory) -> Array:
    """The single part of a request that has one."""
    if arena == 0:
        _check_payload(memory, padded(block.nbytes))
        offset = 0
    return view(memory, arena, offset, block)


def _check_payload(memory: Memory, expected: int) -> None:
    payload = memory.get(0)
    have = 0 if payload is None else payload.size
    if have != expected:
        raise ShapeMismatch(
            f"the request's payload has {have} bytes, its parts need {expected}",
            fix="send exactly the elements that this shard holds",
        )


def gradients(shard: Shard, step: Step, memory: Memory) -> list[Part]:
    """Check a step whole and find its gradients; nothing is written.

    Raises:
        ParamServeError: something about it is wrong. Nothing was applied.
    """
    if not (math.isfinite(step.weight) and step.weight > 0.0):
        raise ParamServeError(f"weight {step.weight} is not positive", fix="give a number > 0")
    if not (math.isfinite(step.clip_norm) and step.clip_norm >= 0.0):
        raise ParamServeError(f"clip_norm {step.clip_norm} is negative", fix="give a number > 0")
    parts: list[Part] = []
    cursor = 0
    for header in step.push:
        block = _block_of(shard, step.group, header.block)
        block.check(header.active, header.hyper)
        offset = header.offset
        if header.arena == 0:
            offset = cursor
            cursor += padded(block.nbytes)
        parts.append((block, header, view(memory, header.arena, offset, block)))
    if cursor:
        _check_payload(memory, cursor)
    if len(parts) > 1 and len({header.block for header in step.push}) < len(parts):
        raise ShapeMismatch(
            f"a step brings {len(parts)} gradients for blocks {[g.block for g in step.push]}",
            fix="send one gradient for each block",
        )
    for place in step.pull:
        block = _block_of(shard, step.group, place.block)
        if place.arena != 0:
            view(memory, place.arena, place.offset, block)
    return parts


def _block_of(shard: Shard, group: int, number: int) -> ShardBlock:
    block = shard.block(number)
    if block.spec.group != group:
        raise UnknownName(
            f"block {number} is in group {block.spec.group}, not in group {group}",
            fix="send one step for each group",
        )
    return block


def finite(parts: list[Part]) -> bool:
    """Whether all active elements are finite numbers."""
    kernels = compiled()
    for block, header, gradient in parts:
        if header.active is None:
            if not kernels.finite(gradient):
                return False
            continue
        for piece in header.active:
            start, stop = block.bounds(piece)
            if not kernels.finite(gradient[start:stop]):
                return False
    return True


def apply_now(
    group: Group, session: ShardSession, step: Step, parts: list[Part], memory: Memory
) -> Done:
    """Apply a push by itself (Async). Values that the step pulls of the blocks that it pushes are
    left at their places (`written_by`).

    Raises:
        NonFinite: and the policy refuses it. Nothing was applied.
        RuleFailed: of one of the blocks. Nothing was applied to any of them.
    """
    skip = step.skip
    if parts and not skip and not finite(parts):
        if group.policy.on_nonfinite == "refuse":
            raise NonFinite(
                f"the gradient of worker {session.rank} (client {session.client}) for group "
                f"{group.name!r} holds NaN or Inf",
                fix="lower the learning rate, clip, or use on_nonfinite='skip'",
            )
        skip = True
    if skip:
        group.skipped += 1
        return Done(step.seq, group.version, group.slowest(), skipped=True)
    if not parts:
        return Done(step.seq, group.version, group.slowest())
    staleness = max(0, group.version - step.base)
    push = PushInfo(session.rank, step.clock, group.version, staleness, step.weight, 1.0)
    places = {place.block: place for place in step.pull if place.arena != 0}
    outs = {
        number: view(memory, place.arena, place.offset, block)
        for block, _, _ in parts
        if (place := places.get(number := block.spec.block)) is not None
    }
    for block, header, gradient in parts:
        if block.guarded:
            block.draft(gradient, header.active, header.hyper, push)
    for block, header, gradient in parts:
        out = outs.get(block.spec.block)
        if block.guarded:
            block.keep_draft(out)
        else:
            block.apply(gradient, header.active, header.hyper, push, out)
    group.staleness.setdefault(session.rank, Staleness()).add(staleness)
    group.advance()
    return Done(step.seq, group.version, group.slowest(), staleness)


def written_by(step: Step, done: Done) -> set[int]:
    """Blocks whose pulled values `apply_now` has left at their places."""
    return set() if done.skipped else {header.block for header in step.push}


def collect(
    shard: Shard, group: Group, session: ShardSession, request: Request, parts: list[Part]
) -> None:
    """Keep a worker's gradients of the present clock, unapplied (Sync).

    Raises:
        NotAMember, ProtocolError: nothing was applied or kept.
    """
    step = request.message
    assert isinstance(step, Step)
    rank = session.rank
    if rank not in group.clocks:
        raise NotAMember(
            f"client {session.client} (rank {rank}) pushed to group {group.name!r}, "
            f"which steps in Sync with the live workers {sorted(group.clocks)}",
            fix="push from a worker, or use consistency=ps.Async()",
        )
    if not step.tick or step.clock != group.committed or rank in group.collect.held:
        raise ProtocolError(
            f"worker {rank} brought gradients for clock {step.clock} "
            f"({'with' if step.tick else 'without'} a tick); group {group.name!r} is at clock "
            f"{group.committed}",
            fix="end each synchronous step with exactly one tick, in order",
        )
    by_block = {block.spec.block: (header, gradient) for block, header, gradient in parts}
    held = Contribution(step, session.client, by_block, step.skip or finite(parts))
    group.collect.held[rank] = held


def ready(group: Group, shard: int, contributors: tuple[int, ...]) -> Ready:
    """What this shard can say about these contributions."""
    chosen = [
        (r, each) for r, each in sorted(group.collect.held.items()) if each.client in contributors
    ]
    held = [each for _, each in chosen]
    steps = [each.step for each in held]
    clip = max((step.clip_norm for step in steps), default=0.0)
    refusal = refusal_of(steps, [rank for rank, _ in chosen])
    bad = [rank for rank, each in chosen if not each.finite]
    finite = not bad
    if bad and not refusal and group.policy.on_nonfinite == "refuse":
        refusal = (
            "NonFinite",
            f"the gradients of ranks {bad} for group {group.name!r} hold NaN or Inf on shard "
            f"{shard}, although the workers found none",
            "do not write to a gradient after it was pushed",
        )
    squared = 0.0
    skip = any(step.skip for step in steps)
    if clip > 0.0 and finite and not refusal and not skip:
        squared = _squared_norm(group, held)
    elif finite and not refusal and not skip and held:
        refusal = _draft(group, held)
    return Ready(
        group.id,
        group.committed,
        shard,
        contributors,
        finite,
        skip,
        sum(step.weight for step in steps),
        clip,
        squared,
        refusal,
    )


def _squared_norm(group: Group, held: list[Contribution]) -> float:
    kernels = compiled()
    squared = 0.0
    for number, block in sorted(group.blocks.items()):
        having = [each for each in held if number in each.gradients]
        if having and block.size:
            gradient, _ = total(having, block, keep=True)
            squared += kernels.squared_norm(gradient)
    return squared


def _draft(group: Group, held: list[Contribution]) -> tuple[str, ...]:
    """Compute what a guarded rule makes of a clock before it is decided: (kind, failed, fix) if a
    rule fails, so that no shard applies it; else empty."""
    scale = group.policy.scale(sum(each.step.weight for each in held))
    key = _key(group, scale, held)
    push = PushInfo(-1, group.committed, group.version, 0, 1.0, scale)
    try:
        for number, block in sorted(group.blocks.items()):
            having = [each for each in held if number in each.gradients]
            if having and block.guarded:
                gradient, active = total(having, block, keep=True)
                hyper = having[0].gradients[number][0].hyper
                block.draft(gradient, active, hyper, push, key)
    except ParamServeError as error:
        return (type(error).__name__, error.failed, error.fix)
    return ()


def _key(group: Group, scale: float, contributors: list[Contribution]) -> object:
    """What an update is computed from, as far as the lead's decision may change it."""
    return group.committed, scale, tuple(each.client for each in contributors)


def apply_commit(group: Group, commit: Commit, held: dict[int, Contribution]) -> None:
    """Do what the lead decided about the present clock.

    Guarded rules have mostly computed their updates before (`ready`), and what failed there was
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
    except RuleFailed as error:
        for number in pushed:
            group.blocks[number].failure = (commit.clock, error)
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
            if block.guarded is not guarded or (guarded and block.has_draft(key)):
                continue
            gradient, active = total(having, block, keep=False)
            hyper = having[0].gradients[number][0].hyper
            if guarded:
                block.draft(gradient, active, hyper, push, key)
            else:
                block.apply(gradient, active, hyper, push)
    for number in pushed:
        if group.blocks[number].guarded:
            group.blocks[number].keep_draft()


def _failure(group: Group, clock: int) -> RuleFailed | None:
    """Why this shard could not apply a clock that was decided."""
    failures = (block.failure for block in group.blocks.values())
    return next((each[1] for each in failures if each is not None and each[0] == clock), None)


def after_commit(
    shard: Shard, group: Group, commit: Commit, step: Step, session: ShardSession
) -> Answer:
    """The answer to a step that was held until its clock was decided."""
    request = session.held
    assert request is not None
    if session.client not in commit.contributors:
        if commit.refusal:
            kind, failed, fix = commit.refusal
            error = rebuild(kind, failed, "no", fix)
            return Answer(Refused(step.seq, type(error).__name__, failed, "no", fix))
        if session.fenced:
            text = f"worker {session.rank} counted as dead when clock {commit.clock} was applied"
            return Answer(Refused(step.seq, "WorkerFenced", text, "no", "let this process end"))
    skipped = session.client not in commit.contributors
    failure = None if skipped else _failure(group, commit.clock)
    if failure is not None:
        kind = type(failure).__name__
        return Answer(Refused(step.seq, kind, failure.failed, failure.applied, failure.fix))
    done = Done(step.seq, group.version, group.slowest(), 0, skipped)
    return with_values(shard, step, request.memory, done)


def with_values(
    shard: Shard, step: Step, memory: Memory, done: Done, written: Collection[int] = ()
) -> Answer:
    """Write the values that a step pulls to their places; the answer says where they are.

    Args:
        written: blocks whose values a rule has left at their place already, in its own pass.
    """
    inline = []
    for place in step.pull:
        block = shard.blocks[place.block]
        if place.arena == 0:
            inline.append(block.value)
        elif place.block not in written:
            np.copyto(view(memory, place.arena, place.offset, block), block.value)
    return Answer(done, gathered(inline, shard.allocate) if inline else None)


def fresh(size: int) -> Bytes:
    """New memory [size] of any content."""
    return np.empty(size, np.uint8)


def gathered(arrays: list[Array], allocate: Callable[[int], Bytes] = fresh) -> Bytes:
    """Arrays one after the other, each padded to `ALIGN`, as the bytes of a payload.

    Args:
        allocate: gives memory of a size; that of large payloads is worth using again.
    """
    out = allocate(sum(padded(array.nbytes) for array in arrays))
    cursor = 0
    for array in arrays:
        end = cursor + array.nbytes
        out[cursor:end] = array.view(np.uint8)
        cursor += padded(array.nbytes)
        out[end:cursor] = 0  # what the memory held before is nobody's business
    return out


def fetch(shard: Shard, message: Fetch, memory: Memory) -> Answer:
    """Read one field of a block."""
    block = shard.block(message.block)
    source = block.field(message.field)
    version = shard.groups[block.spec.group].version
    done = Done(message.seq, version, counts=tuple(block.counts))
    if message.arena == 0:
        return Answer(done, gathered([source], shard.allocate))
    np.copyto(view(memory, message.arena, message.offset, block), source)
    return Answer(done)


def take_snapshot(shard: Shard, client: int, message: TakeSnapshot, memory: Memory) -> Answer:
    """Read the oldest kept snapshot past `after`; older ones are let go."""
    group = shard.group(message.group)
    watching = group.watching.get(client)
    if watching is None:
        raise ParamServeError(
            f"client {client} does not watch group {group.name!r}", fix="send watch() first"
        )
    while watching.kept and watching.kept[0][0] <= message.after:
        watching.kept.popleft()
    done = Done(message.seq, group.version, group.slowest(), dropped=watching.dropped)
    if not watching.kept:
        return Answer(done)
    version, values = watching.kept[0]
    taken = Done(
        message.seq, group.version, group.slowest(), taken=version, dropped=watching.dropped
    )
    inline = []
    for place in message.pull:
        value = _snapshot_of(values, place)
        if place.arena == 0:
            inline.append(value)
        else:
            np.copyto(view(memory, place.arena, place.offset, shard.block(place.block)), value)
    return Answer(taken, gathered(inline, shard.allocate) if inline else None)


def _snapshot_of(values: dict[int, Array], place: Place) -> Array:
    value = values.get(place.block)
    if value is None:
        raise UnknownName(
            f"block {place.block} was not defined when the snapshot was taken",
            fix="take a newer snapshot",
        )
    return value
