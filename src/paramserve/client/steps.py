"""A client's steps: one message to every shard, and what its answers mean for the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from paramserve.client.exchange import Exchange, Slot, again
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.core.session import Operation
from paramserve.errors import ParamServeError, PullTimeout, PushTimeout
from paramserve.messages import Gradient, Place, ShardRequest, Step
from paramserve.rules.base import Hyper

Array = npt.NDArray[Any]

INQUIRE_S = 1.0
"""How long a wait that has failed may take to find out who is missing."""
PARTS_KEPT_MAX = 4096
"""Parts of messages kept for the next step, which mostly has the same."""


class BlockPush(NamedTuple):
    """One block's gradient for `Client.step`.

    `gradient` is what `gradient_slot` gave; `active` lists the pieces that have a gradient (None:
    all); `hyper` are the rule's hyper-parameters for this push (None: as defined).
    """

    block: Block
    gradient: Array
    active: tuple[int, ...] | None = None
    hyper: Hyper | None = None


Captured = Sequence[tuple[BlockPush, Slot]]
"""Gradients with the slots that they lie in."""


class StepOptions(NamedTuple):
    """How a step is meant; see `messages.Step`."""

    tick: bool = False
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0


class Steps:
    """Sends steps of this client. The caller holds the client's lock.

    `clocks` counts the ended steps by group name, `versions` has the version read last by group
    number and shard.
    """

    def __init__(self, exchange: Exchange, rank: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.clocks: dict[str, int] = {}
        self.versions: dict[int, list[int]] = {}
        self._exchange = exchange
        self._rank = rank
        self._shards = len(exchange.shards)
        self._staged: dict[str, list[Ticket]] = {}
        """Tickets of pushes that wait for their group's tick."""
        self._unread: deque[Ticket] = deque()
        """Tickets with an error that nobody has read."""
        self._gradients: dict[Any, tuple[Gradient, ...]] = {}
        self._places: dict[Any, tuple[Place, ...]] = {}

    def send(
        self,
        what: str,
        block: Block,
        pushes: Captured,
        pull: Sequence[Block],
        options: StepOptions,
    ) -> Ticket:
        """Send one step to every shard; all checks have been made.

        Args:
            what: "push", "pull", "tick" or "step", for messages.
            block: any block of the group.
            pushes: their slots go back when all shards have answered.
        """
        self.raise_unread()
        group, name = block.group, block.group_name
        slots = [self._exchange.take(each.nbytes) for each in pull]
        clock = self.clocks.get(name, 0)
        tick, weight, skip, clip_norm = options
        push_parts = () if skip else [self._gradient_parts(*each) for each in pushes]
        pull_parts = [self.places(each, slot) for each, slot in zip(pull, slots, strict=True)]
        requests: list[ShardRequest] = [
            Step(
                0,
                group,
                clock,
                tick,
                tuple([parts[shard] for parts in push_parts]),
                tuple([parts[shard] for parts in pull_parts]),
                base,
                weight,
                skip,
                clip_norm,
            )
            for shard, base in enumerate(self.versions[group])
        ]
        ticket = Ticket(self, what, group, tuple(zip(pull, slots, strict=True)))
        operation = self._exchange.submit(requests, self.timeout_s)
        staged: list[Ticket] = []
        if tick:
            self.clocks[name] = clock + 1
            staged = self._staged.pop(name, staged)
        self._bind(ticket, staged, operation, [slot for _, slot in pushes])
        return ticket

    def stage(self, block: Block) -> Ticket:
        """The ticket of a push that is sent with the group's next tick."""
        ticket = Ticket(self, "push", block.group)
        self._staged.setdefault(block.group_name, []).append(ticket)
        return ticket

    def _bind(
        self, ticket: Ticket, staged: list[Ticket], operation: Operation, slots: list[Slot]
    ) -> None:
        """What happens when the answers are there, whoever reads them."""

        def complete() -> None:
            if slots:
                self._exchange.give_back(slots)
            if operation.error is not None:
                self._unread.append(ticket)

        ticket.operation = operation
        for each in staged:
            each.operation = operation
        operation.then(complete)

    def _gradient_parts(self, push: BlockPush, slot: Slot) -> tuple[Gradient, ...]:
        """The header parts of a gradient, for each shard."""
        key = (push.block.id, slot.arena, slot.offset, push.active, push.hyper)
        parts = self._gradients.get(key)
        if parts is None:
            _bound(self._gradients)
            parts = self._gradients[key] = tuple(
                Gradient(
                    push.block.id,
                    slot.arena,
                    offset_of(push.block, slot, shard),
                    push.active,
                    push.hyper,
                )
                for shard in range(self._shards)
            )
        return parts

    def places(self, block: Block, slot: Slot) -> tuple[Place, ...]:
        """Where each shard writes its part of a block."""
        key = (block.id, slot.arena, slot.offset)
        parts = self._places.get(key)
        if parts is None:
            _bound(self._places)
            parts = self._places[key] = tuple(
                Place(block.id, slot.arena, offset_of(block, slot, shard))
                for shard in range(self._shards)
            )
        return parts

    def finish(
        self, what: str, requests: Sequence[ShardRequest], limit_s: float, slots: Sequence[Slot]
    ) -> Operation:
        """Send a request that is not a step and wait for its answers.

        Args:
            slots: go back when all shards have answered.
        """
        operation = self._exchange.submit(requests, limit_s)
        operation.then(lambda: self._exchange.give_back(slots))
        if not self._exchange.wait(operation, limit_s):
            raise self.late(what, None, limit_s)
        if operation.error is not None:
            raise again(operation.error)
        return operation

    def wait(self, ticket: Ticket, timeout_s: float) -> None:
        """Wait for a ticket's answers.

        Raises:
            PushTimeout, PullTimeout: they are not there in time. Applied: unknown.
        """
        assert ticket.operation is not None
        if not self._exchange.wait(ticket.operation, timeout_s):
            raise self.late(ticket.what, ticket.group, timeout_s)

    def poll(self, operation: Operation) -> bool:
        """Read what has come, without waiting; whether all answers are there."""
        return self._exchange.poll(operation)

    def read_versions(self, group: int, operation: Operation) -> None:
        """Remember which versions a pull has read."""
        versions = self.versions[group]
        for shard, reply in operation.replies.items():
            if reply.version > versions[shard]:
                versions[shard] = reply.version

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Let go of value slots."""
        self._exchange.give_back(slots)

    def error_was_read(self, ticket: Ticket) -> None:
        """An error has been raised where it belongs."""
        read = ticket.operation
        self._unread = deque(each for each in self._unread if each.operation is not read)

    def raise_unread(self) -> None:
        """Raise the oldest error that nobody has read from its ticket."""
        if self._unread:
            error = self._unread.popleft().error
            assert error is not None
            raise again(error)

    def late(self, what: str, group: int | None, waited_s: float) -> ParamServeError:
        """The error of a wait that has failed; asks the shards who is missing."""
        reasons = []
        if group is not None:
            for waiting in self._exchange.inquire(group, INQUIRE_S):
                who = ", ".join(f"worker {rank} (at clock {c})" for rank, c in waiting.missing)
                reasons.append(f"{waiting.reason}: {who}" if who else waiting.reason)
        why = "; ".join(dict.fromkeys(reasons)) or "the servers did not answer"
        kind = PullTimeout if what == "pull" else PushTimeout
        return kind(
            f"{what} timed out: rank {self._rank} waited {waited_s:.1f} s; {why}",
            applied="unknown",
            fix="look at the workers or servers named, or raise timeout_s; calling result() again "
            "waits on and repeats nothing",
        )


def offset_of(block: Block, slot: Slot, shard: int) -> int:
    """Where a shard's part of a block begins in the slot's arena, in bytes."""
    return slot.offset + block.spec.cuts[shard] * block.dtype.itemsize


def _bound(kept: dict[Any, Any]) -> None:
    if len(kept) >= PARTS_KEPT_MAX:
        kept.clear()
