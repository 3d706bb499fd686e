"""What a simulated client asks of the shards: the shipping client's steps, and what is recorded."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from paramserve.client.step_parts import StepOptions, StepParts, offset_of
from paramserve.client.ticket import Ticket
from paramserve.consistency import registry as policies
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import PolicyTraits
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.errors import ClientClosed, ParamServeError, Timeout, WorkerFenced
from paramserve.messages import (
    Define,
    Defined,
    Failed,
    Joined,
    JoinGroup,
    Leave,
    Ok,
    Placed,
    Read,
    ShardRequest,
    Step,
    SuspendMembership,
)
from paramserve_testing.history import Call
from paramserve_testing.process import ClientProcess
from paramserve_testing.scripts import Script
from paramserve_testing.workload import GroupStep, Pushed, Workload

if TYPE_CHECKING:
    from paramserve_testing.simulated import SimulatedCluster

Answered = Callable[[Call, ParamServeError | None], None]


class SimulatedClient(ClientProcess):
    """A client process that defines the blocks, or waits until another has, and then makes the
    calls of its script.

    A call that an interrupt ends has no ticket: its program does not see what it reads, and what it
    was refused with is raised by the next call.
    """

    def __init__(
        self, cluster: SimulatedCluster, writer: int, rank: int, script: type[Script]
    ) -> None:
        super().__init__(cluster, writer, rank)
        self.left = cluster.scenario.steps
        """Steps still to be begun."""
        self.blocks: dict[str, Block] = {}
        """Blocks that the client knows, by name."""
        self._planned: dict[str, GroupStep] = {}
        """Step of each group that is about to be sent."""
        self._issued: list[tuple[str, Call, Operation]] = []
        """What the present call has sent."""
        self._asked = Counter[int]()
        """Reads of the present call, by shard."""
        self._calls = 0
        self._pushes = Counter[str]()
        """Pushes so far, by group."""
        self.changes: deque[Policy] = deque()
        """Policies that it is to give the group, when it has room for a request."""
        self._undefined = list(cluster.workload.blocks)
        self._thinking = False
        self.script = script(self)

    @property
    def workload(self) -> Workload:
        """What it trains."""
        return self.cluster.workload

    def _begin_steps(self, joined: Joined) -> None:
        super()._begin_steps(joined)
        for each in self.workload.parameters:
            each.enter(self)

    @property
    def block(self) -> Block:
        """Any of the first group."""
        return next(iter(self.blocks.values()))

    def block_of(self, group: str) -> Block:
        """Any of a group."""
        return next(each for each in self.blocks.values() if each.group_name == group)

    def traits_at(self, clock: int, group: str = "") -> PolicyTraits:
        """What this client takes to hold for its step of a clock, of the first group or another."""
        return self.terms.at((self.block_of(group) if group else self.block).group, clock)

    # --- what it does -------------------------------------------------------------------

    @property
    def computes(self) -> bool:
        return self._thinking and self.cluster.scenario.slow_readers

    def go_on(self) -> None:
        if self._undefined:
            self._place()
        elif not self._thinking:
            self._thinking = True
            self.later(self.script.pause_s(), self._make_calls)

    def _make_calls(self) -> None:
        self._thinking = False
        for each in self.workload.parameters:
            each.prepare_calls(self)
        self.retiring = self.steps.retiring
        if self.retiring and self.left > 0:
            self.left = 0
        while self.changes and self.alive and not self.full:
            self.change_policy(self.changes.popleft())
            self.take_answers()
        while self.alive and not self.full and self.script.next():
            self.take_answers()
        idle = self.alive and self.in_flight == 0 and not self.calling
        if idle and self.full:  # of calls that were interrupted, whose answers no script awaits
            self.go_on()
        elif idle and self.left == 0:
            every, groups = self.script.every, tuple(self.cluster.histories)
            self.left = -1 if self.step(pull=every, groups=groups, then=self._leave) else 0

    def answered(self, call: Call, error: ParamServeError | None) -> None:
        """A call is complete."""
        if isinstance(error, WorkerFenced):
            self.fence(error.failed)
        else:
            self.go_on()

    def _leave(self, call: Call, error: ParamServeError | None) -> None:
        """The last read is complete."""
        if isinstance(error, WorkerFenced):
            self.fence(error.failed)
        else:
            self.call(Leave(0), lambda _: self.end())

    # --- define -------------------------------------------------------------------------

    def _place(self) -> None:
        self.call(self.workload.placing(self, self._undefined[0]), self._placed)

    def _placed(self, reply: Placed | Failed) -> None:
        if isinstance(reply, Failed):
            self.fence(reply.failed)
            return
        block = Block(reply.spec)
        self.exchange.blocks[block.id] = self.cluster.blocks[block.id] = block
        self.blocks[self._undefined[0]] = block
        self.steps.defined(block)
        if reply.attempt == 0:
            self._known()
        else:
            call = Defined(0, block.id, reply.attempt)
            self.define(block, reply.attempt, partial(self._defined, call))

    def _defined(self, call: Defined, operation: Operation) -> None:
        if operation.error is not None:
            self.fence(operation.error.failed)
        else:
            self.call(call, self._known)

    def _known(self, reply: Ok | None = None) -> None:
        self._undefined.pop(0)
        self.go_on()

    def define(self, block: Block, attempt: int, then: Callable[[Operation], None]) -> None:
        """Send a block's first values to all shards; `then` is called when all have answered."""
        slots = self.workload.owner(block.spec).first_values(self, block)
        requests = [
            Define(0, block.spec, attempt, slots[0].arena, offset_of(block, slots[0], shard))
            if slots
            else Define(0, block.spec, attempt, 0, 0)
            for shard in range(len(self.exchange.shards))
        ]
        operation = Operation(len(requests))

        def complete() -> None:
            self.exchange.give_back(slots)
            then(operation)

        self.when_answered(operation, complete)
        try:
            self.exchange.submit(requests, operation)
        except KeyboardInterrupt:
            assert operation.numbered, "it is under way, and a program waits for it later"

    # --- steps --------------------------------------------------------------------------

    def step(
        self,
        push: Sequence[Any] = (),
        pull: Sequence[Any] = (),
        *,
        tick: bool = False,
        skip: bool = False,
        spoiled: bool = False,
        wrong: bool = False,
        samples: tuple[int, int] | None = None,
        groups: Sequence[str] = (),
        then: Answered,
    ) -> bool:
        """One step of all shards; `then` is called when all have answered. Whether it was sent;
        it goes on after a while if it was not.

        Args:
            groups: whose blocks are pushed and read; none: the first one's.
            spoiled: one element of the gradient, on one shard, is NaN.
            wrong: one shard refuses the step, whatever its gradient.
            samples: [start, stop) of those that its gradients come from.
        """
        what = "step" if push or tick else "pull"
        options = StepOptions(tick, skip=skip)
        self._planned.clear()
        self._issued.clear()
        self._asked.clear()
        tickets: dict[Operation, tuple[Ticket, StepParts, Sequence[Any]]] = {}

        def send() -> None:
            if spoiled:  # its gradient is made for the policy of its clock
                self.steps.enter_ahead(self.block, None)
            reads = not (push or tick or skip)
            self.steps.begin(None, what, max(1, len(groups)), reads=reads)
            parts, pulls = list[StepParts](), list[Sequence[Any]]()
            for group in groups or (self.block.group_name,):
                pushed, read = self._of(group, push), self._of(group, pull)
                if not (pushed or read or tick):
                    continue
                which = None
                if pushed and not skip:
                    which = Pushed(self.writer, self.rank, self._pushes[group], self.clock)
                    self._pushes[group] += 1
                pulls.append(read)
                step = GroupStep(what, group, pushed, read, which, options, spoiled, wrong, samples)
                parts.append(self.workload.parts(self, step))
                self._planned[group] = step
            ask = self.steps.ask if reads else self.steps.send
            for ticket, part, read in zip(ask(parts), parts, pulls, strict=True):
                assert ticket.operation is not None
                tickets[ticket.operation] = ticket, part, read

        self.make(send)
        self.member_told()
        if not self._issued:
            self.go_on()
            return False
        self._await(tickets, then)
        return True

    def _await(
        self, tickets: Mapping[Operation, tuple[Ticket, StepParts, Sequence[Any]]], then: Answered
    ) -> None:
        """Read what each group answers to the present call, and go on when all have.

        Args:
            tickets: with what the program reads from them; a call that was interrupted has none.
        """
        issued = list(self._issued)
        for group, call, operation in issued:

            def complete(
                group: str = group, call: Call = call, operation: Operation = operation
            ) -> None:
                if operation in tickets:
                    ticket, parts, read = tickets[operation]
                    if operation.error is None:
                        self.workload.record(self, call, ticket.result(), read, parts)
                    self.steps.error_was_read(ticket)
                    ticket.release()
                self._complete(group, call, operation)
                if all(each.answered is not None for _, each, _ in issued):
                    then(call, operation.error)

            self.when_answered(operation, complete)

    def _of(self, group: str, chosen: Sequence[Any]) -> Sequence[Any]:
        """Subset of what is pushed or read that a group has."""
        alone = len(self.cluster.histories) == 1
        return [each for each in chosen if alone or each.group_name == group]

    def sending(
        self, requests: Sequence[ShardRequest | None], operation: Operation
    ) -> Sequence[ShardRequest | None]:
        self.workload.record_requests(self, requests)
        step = next(each for each in requests if each is not None)
        if isinstance(step, JoinGroup):  # in the others it is no member until they follow
            for each in self.blocks.values():
                if each.group in step.others:
                    self.cluster.histories[each.group_name].rests(self.rank, True)
                    self.follows[each.group_name] = step.group
        if isinstance(step, SuspendMembership):
            for each in self.blocks.values():
                if each.group == step.group:
                    self.cluster.histories[each.group_name].rests(self.rank, True)
        if not isinstance(step, Step | Read):
            return requests
        group = next(e.group_name for e in self.blocks.values() if e.group == step.group)
        planned = self._planned.pop(group)
        number, self._calls = self._calls, self._calls + 1
        membership = self.steps.membership
        tick = isinstance(step, Step) and step.tick
        out = membership.may_be_out(group) and not tick
        call = self.cluster.histories[group].issue(
            self.writer,
            number,
            None if planned.which is None else planned.which.number,
            frozenset(e.id for e in planned.push) if planned.which is not None else frozenset(),
            rank=self.rank,
            clock=step.clock,
            tick=tick,
            spoiled=planned.spoiled or planned.wrong,
            bases=tuple(each.base for each in requests if isinstance(each, Step)),
            pending=membership.pending(group) or membership.follows(group) or out,
            more=isinstance(step, Step) and step.more is not None,
        )
        call.samples = planned.samples
        self._issued.append((group, call, operation))
        here = sum(not each.numbered for _, _, each in self._issued)  # in this frame
        for shard, request in zip(self.exchange.shards, requests, strict=True):
            seq = shard.session.last + here
            if isinstance(request, Read):
                self._asked[shard.number] += 1
                seq = -(shard.session.last_read + self._asked[shard.number])
            if request is not None:
                self.cluster.call_of[self.writer, shard.number, seq] = group, call
        self.stepping = step.clock
        if not planned.wrong:
            return requests
        one = number % len(requests)
        return [
            structs.replace(each, weight=0.0)
            if isinstance(each, Step) and (shard == one or self.each_shard_judges())
            else each
            for shard, each in enumerate(requests)
        ]

    def each_shard_judges(self) -> bool:
        """Whether a shard may apply the next step though another one refuses it. A worker that has
        come later may not know the policy."""
        return self.late or not self.traits_at(self.clock).collects

    def _complete(self, group: str, call: Call, operation: Operation) -> None:
        """Tell the history what all shards have answered."""
        error, replies = operation.error, operation.replies
        if error is not None:
            call.error, call.applied = type(error).__name__, error.applied
        else:
            dropped = frozenset(shard for shard, reply in replies.items() if reply.skipped)
            call.skipped = len(dropped) == len(replies)
            call.dropped = frozenset() if call.skipped else dropped
            at = max(reply.at for reply in replies.values())
            steps = call.tick or call.push is not None
            if at < 0 and (steps or not call.reread):  # else it may have read a later one
                call.state = self.script.shown(call, group)
        self.cluster.histories[group].answer(call)
        self.cluster.recorder.moved(self)

    # --- calls that wait ----------------------------------------------------------------

    def change_policy(self, policy: Policy) -> None:
        """Ask the shards for another policy; the answers to later steps tell of it."""
        self.make(partial(self.steps.change_policy, self.block, policies.spec(policy), None))

    def suspend(self, *groups: str) -> None:
        """No clock is to wait for this worker until it joins again, in the first group or these."""
        for group in groups or (self.block.group_name,):
            if self.alive:
                self.make(partial(self.steps.suspend, self.block_of(group), None))
        self.member_told()
        self.go_on()

    def make(self, call: Callable[[], None]) -> None:
        """Make a call, as a program that goes on after an interrupt and after an error: each may
        be that of an earlier step, whose outcome is read with its ticket."""
        try:
            call()
        except KeyboardInterrupt:
            pass
        except (ClientClosed, Timeout):
            raise
        except WorkerFenced as error:
            self.fence(error.failed)
        except ParamServeError:
            self.cluster.network.note(f"writer {self.writer} is told of an earlier step's error")
