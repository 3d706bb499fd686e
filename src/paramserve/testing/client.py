"""What a simulated client asks of the shards: defines and steps, and the slots of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from paramserve.client.links import Slot
from paramserve.client.steps import offset_of
from paramserve.consistency import registry as policies
from paramserve.consistency.base import Policy
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.messages import (
    Define,
    Gradient,
    JoinGroup,
    ReadTarget,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
)
from paramserve.testing.counting import Pushed
from paramserve.testing.history import Call, Part
from paramserve.testing.process import ClientProcess

if TYPE_CHECKING:
    from paramserve.testing.simulated import SimulatedCluster


class SimulatedClient(ClientProcess):
    """A client process that can define blocks, push to them and read them.

    A slot is its call's from the first send until all shards have answered.
    """

    def __init__(self, cluster: SimulatedCluster, writer: int, rank: int) -> None:
        super().__init__(cluster, writer, rank)
        self.blocks: dict[str, Block] = {}
        """Those that it knows, by name."""
        self.in_flight = 0
        """Steps that are not answered yet."""
        self.enters = False
        """Whether it has to join before its next step."""
        self._slots: dict[Operation, list[Slot]] = {}
        self._calls = 0
        self._pushes = 0

    @property
    def group(self) -> int:
        """Number of the one group that there is."""
        return next(iter(self.blocks.values())).group

    def values(self, block: Block, slot: Slot) -> Any:
        """A slot as the block's elements: [size]."""
        return slot.array(block)

    def release(self, operation: Operation) -> None:
        """Let go of the slots of an operation."""
        self.exchange.give_back(self._slots.pop(operation, ()))

    def define(self, block: Block, attempt: int, then: Callable[[Operation], None]) -> None:
        """Bring a block's first values to all shards; `then` is called when all have answered."""
        slot = self.exchange.take(block.nbytes)
        self.cluster.workload.start(self.values(block, slot), block)
        requests = [
            Define(0, block.spec, attempt, slot.arena, offset_of(block, slot, shard))
            for shard in range(len(self.exchange.shards))
        ]
        operation = Operation(len(requests))
        self._slots[operation] = [slot]

        def complete() -> None:
            self.release(operation)
            then(operation)

        self._then_soon(operation, complete)
        self.submit(requests, operation)

    def step(
        self,
        push: Sequence[Any] = (),
        pull: Sequence[Any] = (),
        *,
        tick: bool = False,
        skip: bool = False,
        spoiled: bool = False,
        wrong: bool = False,
        state: int | None = None,
        samples: tuple[int, int] | None = None,
        mark: tuple[int, int] | None = None,
        then: Callable[[Call, Operation], None],
    ) -> None:
        """One step of all shards; `then` is called when all have answered.

        Args:
            spoiled: one element of the gradient, on one shard, is NaN.
            wrong: one shard refuses the step, whatever its gradient.
            state: how many clocks its reads contain, if they show a whole state.
            samples: [start, stop) of those that its gradients come from, and `mark` of its lease.
        """
        number = None
        if push and not skip:
            number, self._pushes = self._pushes, self._pushes + 1
        ids = frozenset(block.id for block in push) if number is not None else frozenset()
        call = self._issue(number, ids, state, tick, spoiled or wrong)
        call.samples = samples
        sources = self._gradients(push, number, spoiled)
        targets = self._targets(pull)
        plain = Step(0, self.group, self.clock, tick, (), (), skip=skip, mark=mark)
        requests = self._for_each_shard(plain, call.bases, sources, targets)
        if wrong:
            shards = [call.number % len(requests)]
            if self._each_shard_judges():
                shards = list(range(len(requests)))
            for shard in shards:
                requests[shard] = structs.replace(requests[shard], weight=0.0)
        operation = Operation(len(requests))
        self._slots[operation] = self._slots_of(sources, targets)
        self._then_soon(operation, partial(self._complete, call, operation, targets, then))
        for each in self.exchange.shards:
            self.cluster.call_of[self.writer, each.number, each.session.last + 1] = call
        self.stepping = self.clock
        if tick:
            self.clock += 1
        self.in_flight += 1
        self.submit(requests, operation)
        self.stepping = None

    def _issue(
        self, push: int | None, blocks: frozenset[int], state: int | None, tick: bool, spoiled: bool
    ) -> Call:
        """Record that the next call begins."""
        number, self._calls = self._calls, self._calls + 1
        return self.cluster.history.issue(
            self.writer,
            number,
            push,
            blocks,
            state,
            rank=self.rank,
            clock=self.clock,
            tick=tick,
            spoiled=spoiled,
            bases=tuple(self.versions),
            pending=self.enters,
        )

    def _targets(self, pull: Sequence[Any]) -> Sequence[Any]:
        """Memory for what is read: blocks and slots."""
        return [(block, self.exchange.take(block.nbytes)) for block in pull]

    def _slots_of(self, sources: Sequence[Any], targets: Sequence[Any]) -> list[Slot]:
        """Those of a step's gradients and of what it reads."""
        return [slot for _, slot in (*sources, *targets)]

    def _for_each_shard(
        self,
        step: Step,
        bases: Sequence[int],
        sources: Sequence[Any],
        targets: Sequence[Any],
    ) -> list[Step]:
        """A step as every shard gets it: with the places of its own parts of the slots."""
        requests = []
        for shard, base in enumerate(bases):
            push = tuple(Gradient(b.id, s.arena, offset_of(b, s, shard)) for b, s in sources)
            pull = tuple(ReadTarget(b.id, s.arena, offset_of(b, s, shard)) for b, s in targets)
            requests.append(structs.replace(step, push=push, pull=pull, base=base))
        return requests

    def change_policy(self, policy: Policy) -> None:
        """Ask the shards for another policy; the answers to later steps tell of it."""
        requests = [SetPolicy(0, self.group, policies.spec(policy)) for _ in self.exchange.shards]
        self._ask_all(requests)

    def suspend(self) -> None:
        """No clock is to wait for this worker until it joins again."""
        self._ask_all([SuspendMembership(0, self.group) for _ in self.exchange.shards])

    def join(self) -> None:
        """Clocks are to wait for this worker from now on."""

        def joined(operation: Operation) -> None:
            self.clock = max(self.clock, *(reply.at for reply in operation.replies.values()))
            self.enters = False
            self.cluster.history.rests(self.rank, False)

        self._ask_all([JoinGroup(0, self.group) for _ in self.exchange.shards], joined)

    def _ask_all(
        self,
        requests: Sequence[ShardRequest],
        then: Callable[[Operation], None] = lambda operation: None,
    ) -> None:
        operation = Operation(len(requests))

        def complete() -> None:
            self.in_flight -= 1
            self._hear(operation, None)
            if operation.error is None:
                then(operation)
            self.script()

        self._then_soon(operation, complete)
        self.in_flight += 1
        self.submit(requests, operation)

    def _gradients(self, push: Sequence[Any], number: int | None, spoiled: bool) -> Sequence[Any]:
        """A step's gradients: blocks and slots."""
        if number is None:
            return []
        sources = [(block, self.exchange.take(block.nbytes)) for block in push]
        which = Pushed(self.writer, self.rank, number, self.clock)
        for block, slot in sources:
            self.cluster.workload.fill(self.values(block, slot), block, which)
        if spoiled:
            block, slot = sources[-1]
            values = self.values(block, slot)
            values[-1] = np.nan
            if self._each_shard_judges():
                for shard in range(len(self.exchange.shards)):
                    low, high = block.range(shard)
                    values[low:high][-1:] = np.nan
        return sources

    def _each_shard_judges(self) -> bool:
        """Whether a shard may apply the next step though another one refuses it. A worker that has
        come later may not know the policy."""
        return self.late or not self.traits_at(self.clock).collects

    def _then_soon(self, operation: Operation, action: Callable[[], None]) -> None:
        """Do something when all shards have answered, and the process is at nothing else."""

        def complete() -> None:
            if self.exchange.lost is None:  # else it is fenced
                action()

        operation.then(partial(self.soon, complete))

    def _complete(
        self,
        call: Call,
        operation: Operation,
        targets: Sequence[Any],
        then: Callable[[Call, Operation], None],
    ) -> None:
        error = operation.error
        if error is not None:
            call.error, call.applied = type(error).__name__, error.applied
        else:
            replies = operation.replies
            dropped = frozenset(shard for shard, reply in replies.items() if reply.skipped)
            call.skipped = len(dropped) == len(replies)
            call.dropped = frozenset() if call.skipped else dropped
            if any(reply.at >= 0 for reply in replies.values()):
                call.state = None  # It may have read a later one.
            if any(reply.pending for reply in replies.values()):
                self.enters = True
            for target in targets:
                self._read(call, target)
        self._hear(operation, call)
        self.cluster.history.answer(call)
        self.release(operation)
        self.in_flight -= 1
        self.cluster.recorder.moved(self)
        then(call, operation)

    def _hear(self, operation: Operation, call: Call | None) -> None:
        """Take what the answers say besides; of a step (`call`) also where it goes on."""
        for shard, reply in sorted(operation.replies.items()):
            self.retiring = self.retiring or reply.retire
            for news in reply.news:
                self.learn(news)
            if call is not None and call.reads:
                self.versions[shard] = max(self.versions[shard], reply.version)
        if call is not None and operation.replies:
            self.clock = max(self.clock, *(reply.at for reply in operation.replies.values()))

    def _read(self, call: Call, target: Any) -> None:
        """Tell the history what was read."""
        block, slot = target
        values = self.values(block, slot)
        for shard in range(len(self.exchange.shards)):
            low, high = block.range(shard)
            if high > low:
                row = self.cluster.workload.read(values[low:high], low)
                call.reads[Part(block.id, shard)] = row
