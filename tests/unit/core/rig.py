"""Shards and their clients with nothing between them: each message is handed over by the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from paramserve.compiling import needed
from paramserve.config import Limits
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async
from paramserve.core.decisions import LEAD
from paramserve.core.events import (
    ClientHere,
    DeadlineReached,
    Effects,
    Event,
    FromShard,
    MembersChanged,
    Requested,
)
from paramserve.core.request_memory import Memory
from paramserve.core.shard import Shard
from paramserve.core.table.parts import padded
from paramserve.errors import ParamServeError, rebuild
from paramserve.messages import (
    ALIGN,
    BlockSpec,
    Decision,
    Define,
    Done,
    Gradient,
    Member,
    Members,
    NotRead,
    PeerMessage,
    Piece,
    Read,
    ReadTarget,
    Refused,
    ShardRequest,
    Step,
    Values,
)
from paramserve.rules import Add, Rule
from paramserve.rules.registry import spec as rule_spec

RESEND_S = 0.5
PUSHED, PULLED = 0, 9
"""Arenas of a request: what it pushes, and what it pulls, unless the test says otherwise."""
ARENA_BYTES = 1 << 16


class Replied(NamedTuple):
    """An answer, and the bytes that were written for it; None: there are none."""

    message: Any
    payload: Any


ADD = Add()


def block_spec(
    *shapes: tuple[int, ...],
    number: int = 0,
    group: int = 0,
    cuts: Sequence[int] | None = None,
    rule: Rule | None = ADD,
    dtype: str = "float64",
) -> BlockSpec:
    """A block of one piece for each shape, by default whole on the first shard."""
    shapes = shapes if shapes else ((4,),)
    size = sum(int(np.prod(shape)) for shape in shapes)
    return BlockSpec(
        number,
        group,
        f"group {group}",
        dtype,
        None if rule is None else rule_spec(rule),
        tuple(Piece(f"b{number}.{i}", shape) for i, shape in enumerate(shapes)),
        tuple(cuts) if cuts is not None else (0, size),
    )


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin that lie one after the other."""
    return [0, *accumulate(padded(size) for size in sizes)][:-1]


def gathered(arrays: Sequence[Any]) -> Any:
    """Arrays one after the other, each padded."""
    parts = [np.zeros(0, np.uint8)]
    for array in arrays:
        data = np.ascontiguousarray(array).view(np.uint8)
        parts.append(np.concatenate([data, np.zeros(-data.size % ALIGN, np.uint8)]))
    return np.concatenate(parts)


class Rig:
    """Shards whose messages to each other wait in `wire` until `deliver`."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        shards: int = 1,
        workers: int = 2,
        limits: Limits | None = None,
        policies: Mapping[str, Any] | None = None,
        rules: Mapping[str, type[Any]] | None = None,
    ) -> None:
        self.policy = policy if policy is not None else Async()
        self.rules = rules if rules is not None else {}
        limits = limits if limits is not None else Limits()
        self.shards = [
            Shard(
                k,
                shards,
                workers,
                self.policy,
                limits=limits,
                resend_s=RESEND_S,
                policies=policies if policies is not None else {},
                rules=self.rules,
            )
            for k in range(shards)
        ]
        self.now = 0.0
        self.wire: list[tuple[int, PeerMessage]] = []
        self.replies: list[tuple[int, int, Replied]] = []
        """(shard, client, answer) of everything that was answered."""
        self._memories: dict[tuple[int, int, bool, int], dict[int, Any]] = {}
        """By client, shard, whether it is a read, and number: the arenas of a request."""
        self._last: dict[tuple[int, int], int] = {}
        self._members = 0

    def happen(self, event: Event, shard: int = 0) -> Effects:
        """Let one event happen at a shard."""
        effects = self.shards[shard].step(event, self.now)
        for at, (client, answer) in enumerate(effects.replies):
            read = isinstance(answer.message, Values | NotRead)
            key = (client, shard, read, getattr(answer.message, "seq", 0))
            known = self._memories.get(key, {})
            runs = [run for run in sorted(answer.written) if run[2]]
            found = gathered([known[arena][start : start + n] for arena, start, n in runs])
            replied = Replied(answer.message, found if runs else None)
            effects.replies[at] = client, replied  # type: ignore[call-overload]
        self.wire += effects.peers
        self.replies += [(shard, client, answer) for client, answer in effects.replies]
        return effects

    def deliver(self) -> None:
        """Hand over what shards tell each other, until they are silent."""
        while self.wire:
            self.deliver_one()

    def deliver_one(self) -> None:
        """Hand over the oldest message."""
        shard, message = self.wire.pop(0)
        self.happen(FromShard(message), shard)

    def decide(self, decision: Decision) -> None:
        """The lead decides; what it sends to the others is on the wire."""
        self.shards[LEAD].decisions.append(decision, self.now)
        self.happen(DeadlineReached(), LEAD)

    def join(self, client: int, rank: int = -1, *, incarnation: int = 1, window: int = 4) -> None:
        """A client connects to all shards."""
        for shard in range(len(self.shards)):
            effects = self.happen(ClientHere(client, incarnation, rank, window), shard)
            assert effects.refused is None, effects.refused

    def members(self, *states: tuple[int, int, str]) -> Members:
        """A new membership: (client, incarnation, state) by rank."""
        self._members += 1
        members = tuple(Member(rank, *state) for rank, state in enumerate(states))
        return Members(self._members, members)

    def tell(self, members: Members, *shards: int) -> None:
        """The coordinator's news reach these shards, or all."""
        for shard in shards if shards else range(len(self.shards)):
            self.happen(MembersChanged(members), shard)

    def send(
        self,
        client: int,
        message: ShardRequest,
        shard: int = 0,
        memory: Mapping[int, Any] | None = None,
    ) -> Effects:
        """A client's next request to a shard."""
        key = (client, shard)
        self._last[key] = self._last.get(key, 0) + 1
        numbered = structs.replace(message, seq=self._last[key])
        return self.again(client, numbered, shard, memory)

    def again(
        self,
        client: int,
        message: ShardRequest,
        shard: int = 0,
        memory: Mapping[int, Any] | None = None,
    ) -> Effects:
        """A request with the number that it has; its memory stays as it was, where it is repeated.

        Args:
            memory: by arena. What lies in `PUSHED` is copied to one that has room.
        """
        key = (client, shard, isinstance(message, Read), message.seq)
        if key not in self._memories:
            known = {PULLED: np.zeros(ARENA_BYTES, np.uint8), **(memory or {})}
            pushed = known.get(PUSHED, np.zeros(0, np.uint8))
            known[PUSHED] = np.zeros(max(ARENA_BYTES, pushed.size), np.uint8)
            known[PUSHED][: pushed.size] = pushed
            self._memories[key] = known
        memory = Memory(self._memories[key], mirrored=True)
        sessions = self.shards[shard].sessions.by_client
        if client in sessions:
            sessions[client].mirror = memory
        return self.happen(Requested(client, message, memory), shard)

    def define(self, client: int, spec: BlockSpec, values: Any = None, attempt: int = 1) -> None:
        """Send a block's first values to all shards. As a server does, load its kernels first."""
        prepare = needed(spec, self.rules)
        if prepare is not None:
            prepare()
        size = spec.cuts[-1]
        whole = np.zeros(size, spec.dtype) if values is None else np.asarray(values, spec.dtype)
        for shard in range(len(self.shards)):
            low, high = spec.cuts[shard], spec.cuts[shard + 1]
            payload = gathered([whole[low:high]])
            effects = self.send(client, Define(0, spec, attempt, 0, 0), shard, {0: payload})
            done(effects)

    def step(
        self,
        client: int,
        push: Mapping[int, Any] | None = None,
        pull: Sequence[int] = (),
        *,
        shard: int = 0,
        clock: int = 0,
        tick: bool = True,
        group: int = 0,
        active: Sequence[int] | None = None,
        hyper: tuple[float, ...] | None = None,
        **options: Any,
    ) -> Effects:
        """A step; `push` has this shard's elements by block."""
        push = push if push is not None else {}
        arrays = [np.asarray(g, self.dtype(shard, block)) for block, g in push.items()]
        pieces = None if active is None else tuple(active)
        known = self.shards[shard].blocks
        pulled = [known[block].nbytes if block in known else 0 for block in pull]
        starts = offsets([array.nbytes for array in arrays])
        headers = tuple(
            Gradient(block, PUSHED, start, pieces, hyper)
            for block, start in zip(push, starts, strict=True)
        )
        places = tuple(
            ReadTarget(block, PULLED, start)
            for block, start in zip(pull, offsets(pulled), strict=True)
        )
        message = Step(0, group, clock, tick, headers, places, **options)
        memory = {PUSHED: gathered(arrays)} if arrays else {}
        return self.send(client, message, shard, memory)

    def dtype(self, shard: int, block: int) -> Any:
        known = self.shards[shard].blocks.get(block)
        return known.dtype if known is not None else np.float64

    def value(self, block: int = 0, shard: int = 0) -> list[float]:
        """What a shard holds of a block."""
        found: list[float] = self.shards[shard].blocks[block].value.tolist()
        return found

    def answers(self, client: int, shard: int | None = None) -> list[Any]:
        """What a client was told, in order."""
        return [
            answer.message
            for at, to, answer in self.replies
            if to == client and shard in (None, at)
        ]


def done(effects: Effects) -> Done:
    """The one answer, which must be good."""
    assert len(effects.replies) == 1, effects.replies
    message = effects.replies[0][1].message
    assert isinstance(message, Done), message
    return message


def refused(effects: Effects) -> ParamServeError:
    """The one answer, which must be a refusal, as the error that the client will see."""
    assert len(effects.replies) == 1, effects.replies
    message = effects.replies[0][1].message
    assert isinstance(message, Refused), message
    assert message.kind in str(type(rebuild(message.kind, "", "no", "")))
    return rebuild(message.kind, message.failed, message.applied, message.fix)


def payload(effects: Effects, dtype: str = "float64") -> list[float]:
    """The elements that were written for the one answer (with the padding of each part)."""
    found = effects.replies[0][1].payload  # type: ignore[attr-defined]
    assert found is not None
    values: list[float] = found.view(dtype).tolist()
    return values
