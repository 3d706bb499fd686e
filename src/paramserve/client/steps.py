"""A client's steps: one message to every shard, and what becomes of its ticket and its slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import numpy.typing as npt

from paramserve.client import timeouts
from paramserve.client.clocks import ClientClocks
from paramserve.client.exchange import Exchange, Slot, again, done
from paramserve.client.step_parts import (
    BlockPush,
    Staged,
    StepParts,
    check_push,
)
from paramserve.client.ticket import Ticket
from paramserve.config import NO_RANK, ConsistencySpec, check_number
from paramserve.consistency.registry import PolicyTraits
from paramserve.core.client_membership import Joining
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.core.policy_epochs import CHANGES_MAX
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.resumption import not_joined, resume
from paramserve.errors import ParamServeError, PushTimeout, Timeout
from paramserve.messages import (
    CURRENT_CLOCK,
    Done,
    Gradient,
    GroupReport,
    JoinGroup,
    ReadTarget,
    ServerBeat,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
)

Array = npt.NDArray[Any]

PARTS_KEPT_MAX = 4096
"""Parts of messages kept for the next step, which mostly has the same."""


class Prepared(NamedTuple):
    """A step that is about to be sent."""

    ticket: Ticket
    requests: list[Step]
    operation: Operation
    block: Block
    """Any of the group."""
    clock: int
    """Of this client in that group before it."""
    tick: bool
    staged: Sequence[Ticket]


class Steps(ClientClocks):
    """Sends steps of this client. The caller holds the client's lock.

    Attributes:
        timeout_s: deadline of every call that names none.
        busy_s: how long live workers are waited for, where no call says how long.
        stall_s: how long a shard that lives may take to say whom a wait is for.
        all_live: whether the coordinator counts all of these ranks as live.
        versions: read last, by group number and shard.
        first: whether the cluster was started with this rank, and did not go on without it: it is a
            member of groups that are defined after it has come.
        resumed: the clock of each group where this client began, if not at 0.
        staged: by group, what waits for its tick.
        repeated: Async: how many steps of an older incarnation some shard has had that this one
            takes again, since another had not.
        now: the time, in seconds, of the exchange's clock.
        next_mark: is called once for each step that ends a clock, in order, and gives its mark
            (lease, samples); None: there are none.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        timeout_s: float,
        terms: GroupTraits,
        *,
        busy_s: float = 0.0,
        stall_s: float = 0.0,
        all_live: Callable[[Collection[int]], bool] = lambda ranks: False,
    ) -> None:
        super().__init__(terms)
        self.timeout_s = timeout_s
        self.busy_s = busy_s
        self.stall_s = stall_s
        self.all_live = all_live
        self.versions: dict[int, list[int]] = {}
        self.first = True
        self.resumed: dict[str, int] = {}
        self.repeated = 0
        self.staged: dict[str, Staged] = {}
        self.next_mark: Callable[[], tuple[int, int] | None] | None = None
        self._factor = 1.0
        self._found: frozenset[str] = frozenset()
        """Groups that were there when this client came."""
        self.now = exchange.now
        self._exchange = exchange
        self._rank = rank
        self._shards = len(exchange.shards)
        self._unread: dict[Ticket, None] = {}
        """Tickets with an unread error, oldest first."""
        self._forgotten = deque[Ticket]()
        """Tickets that no call waits for any more, and whose slots are still to go back."""
        self._gradients: dict[Any, tuple[Gradient, ...]] = {}
        self._places: dict[Any, tuple[ReadTarget, ...]] = {}

    def resume(self, told: Sequence[ServerBeat], *, returned: bool) -> None:
        """Take over the clocks of this rank from its older incarnations, or the others' for a new
        one, and the groups' policies.

        Args:
            told: by each shard.
            returned: whether the others have gone on without this rank.
        """
        reports = [beat.groups for beat in told]
        by_name: dict[str, list[GroupReport]] = {}
        for beat in told:
            for report in beat.groups:
                by_name.setdefault(report.name, []).append(report)
        for name, found in resume(reports, self._rank).items():
            for news in {n.number: n for each in by_name[name] for n in each.changes}.values():
                self.learn(news)
            self.go_on(name, found.clock)
            self.resumed[name] = found.clock
            self.repeated = max(self.repeated, found.repeated)
        self._found = frozenset(by_name)
        self.first = self.first and not returned
        late = by_name.keys() if returned else not_joined(reports, self._rank)
        for name in late:
            self.membership.came_late(name)
        if len(by_name) - len(late) > 1:
            self.membership.came_again()

    @property
    def factor(self) -> float:
        """What the servers multiply this client's gradients by, above 0; may be changed."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        check_number("factor", value, above=0.0)
        self._factor = float(value)

    @property
    def patience_s(self) -> float:
        """How long live workers are waited for by what names no limit, in seconds."""
        return max(self.timeout_s, self.busy_s)

    # --- groups ------------------------------------------------------------------------------

    def defined(self, block: Block) -> None:
        """This client knows of a block from now on; repeating changes nothing."""
        self._terms.defined(block.group, block.spec.consistency)
        late = not (self.first or block.group in self.versions or block.group_name in self._found)
        if late and self._rank != NO_RANK:
            self.membership.came_late(block.group_name)
        self.versions.setdefault(block.group, [0] * self._shards)

    def undefined(self, block: Block) -> None:
        """A block was not defined after all."""
        if all(each.group != block.group for each in self._defined()):
            self._terms.undefined(block.group)

    def terms(self, group: str = "default") -> PolicyTraits:
        """What this client's next step of a group goes by; the cluster's policy if it knows of
        nothing that is defined there. May be called without the lock."""
        for block in list(self._defined()):
            if block.group_name == group:
                return self.traits_of(block)
        return self._terms.cluster

    def refuses(self, block: Block) -> bool:
        """Whether the policy of a block's group refuses NaN and Inf."""
        return self.traits_of(block).refuses

    # --- staging until a tick ----------------------------------------------------------------

    def collects(self, block: Block) -> bool:
        """Whether pushes to a block's group wait for its tick; also the rest of a step that was
        begun so, before its policy changed.

        A rank that is pending there joins first: the answer may tell of another policy.

        Raises:
            PushTimeout: not all shards know that it is a member. Nothing was sent of the push.
        """
        if block.group_name in self.staged:
            return True
        if self._told_pending:
            self._take_told_pending()
        if self.membership.any_pending and not self.traits_of(block).collects:
            self._join_before([block])
        return self.traits_of(block).collects

    def check_same_weight(self, group: str, weight: float | None) -> None:
        """Refuse another weight than was said before of a group's step under way."""
        said = self.staged[group].weight if group in self.staged else None
        if weight is not None and said is not None and weight != said:
            raise ValueError(
                f"the step of group {group!r} under way has the weight {said}, now {weight} came: "
                "a step has one weight; give it with one push, or with tick"
            )

    def stage(self, block: Block, staged: Staged, weight: float | None) -> Ticket:
        """Keep what was pushed to a block's group until its tick; the ticket of the push.

        Args:
            staged: all of it, what was kept before included.
            weight: what was said of the step with this push.
        """
        ticket = Ticket(self, "push", block.group)
        staged.tickets.append(ticket)
        if weight is not None:
            staged.weight = weight
        self.staged[block.group_name] = staged
        return ticket

    def unapplied(self) -> str:
        """What waits for a tick that has not come, in words; empty: nothing does."""
        found = []
        for group, staged in self.staged.items():
            names = {
                piece.name
                for filling in staged.gradients.values()
                for index, piece in enumerate(filling.block.pieces)
                if index in filling.staged
            }
            which = f" ({', '.join(map(repr, sorted(names)))})" if names else ""
            found.append(f"{len(staged.tickets)} to group {group!r}{which}")
        return ", ".join(found)

    # --- sending -----------------------------------------------------------------------------

    def begin(self, timeout_s: float | None = None, what: str = "push", requests: int = 1) -> None:
        """Before anything is captured or sent: raise what was not read, and wait for room, with
        None as long as `wait` does.

        Args:
            requests: of the call, to each shard.
        Raises:
            PushTimeout: a shard left too much unanswered (`PullTimeout` if `what` is "pull").
            ParamServeError: as `Exchange.wait_for_room`, or an error of an earlier step.
                In all cases nothing was sent.
        """
        self._exchange.check_whole()
        self._make_room(timeout_s, what, requests)

    def _make_room(self, timeout_s: float | None, what: str, requests: int) -> None:
        if self._unread:
            self.raise_unread()
        if self._forgotten:
            self._let_go()
        if self._exchange.has_room(requests):
            return
        try:
            self.wait_for(
                lambda limit_s: self._exchange.wait_for_room(limit_s, requests),
                what,
                None,
                timeout_s,
            )
        except Timeout as error:
            full = self._exchange.full(requests)
            if full:  # else room has come since then
                error.failed, error.applied = f"{full}: {error.failed}", "no"
                raise

    def _numbered(self, sent: Sequence[Prepared]) -> None:
        """A call is certain to be sent."""
        for each in sent:
            if each.tick:
                self._ended(each)
        self._exchange.unfinished = ""

    def _broken_off(
        self, sent: Sequence[Prepared], slots: Sequence[Slot], error: BaseException
    ) -> bool:
        """A call was ended by an error or an interrupt; whether nothing of it will be sent.

        Args:
            slots: that it has taken. The shards may write to those of a call that has its numbers.
        """
        if isinstance(error, ParamServeError | ValueError):
            self._exchange.unfinished = ""
        if any(each.operation.numbered for each in sent):
            self._forgotten.extend(each.ticket for each in sent)
            return False
        for each in sent:
            if each.clock == CURRENT_CLOCK:
                self._clock_not_asked(each.block.group_name)
        self._exchange.give_back(slots)
        return True

    def send(self, parts: Sequence[StepParts]) -> list[Ticket]:
        """Send steps of several groups in one frame to every shard, or none. `begin` came first,
        and all checks have been made.

        Returns:
            Their tickets, in the order given.
        """
        ordered = parts if len(parts) == 1 else sorted(parts, key=StepParts.order)
        prepared: list[Prepared] = []
        values: list[Slot] = []
        ticked = False
        exchange = self._exchange
        try:
            exchange.unfinished = ""  # from here on `_broken_off` says what was not sent
            if self._told_pending:
                self._take_told_pending()
            if self.membership.any_pending:
                self._join_before(
                    [
                        each.block
                        for each in ordered
                        if each.options.tick or each.options.skip or each.pushes or each.row_pushes
                    ]
                )
                ordered = self._entry_first(ordered)
            for each in ordered:
                ticked = ticked or each.options.tick
            if ticked:
                exchange.unfinished = "a step"
            calls = []
            for each in ordered:
                sent = self._prepare(each, values, each.block.table is None or each.leased)
                prepared.append(sent)
                calls.append((sent.requests, sent.operation))
            numbered = partial(self._numbered, prepared) if ticked else None
            exchange.submit_together(calls, numbered)
        except BaseException as error:
            taken = [slot for each in parts for slot in (*each.slots, *each.read_slots)]
            if self._broken_off(prepared, [*taken, *values], error):
                for each in parts:
                    fail_staged(each.block.group_name, each.staged, error)
            raise
        if len(parts) == 1:
            return [prepared[0].ticket]
        by_group = {each.block.group: each.ticket for each in prepared}
        return [by_group[each.block.group] for each in parts]

    def _prepare(self, parts: StepParts, values: list[Slot], marked: bool) -> Prepared:
        """One group's part of a call as it is about to be sent; its ticket is bound to the answers.

        Args:
            values: gets the slots that are taken for what is pulled.
            marked: whether it may have leased samples in it.
        """
        # Loops, not comprehensions: each of those is a call, and a small step has few.
        block = parts.block
        name, group = block.group_name, block.group
        tick, weight, skip, clip_norm, note = parts.options
        captured: list[Slot] = []
        places: list[tuple[Block, Slot]] = []
        push_parts: list[tuple[Gradient, ...]] = []
        pull_parts: list[tuple[ReadTarget, ...]] = []
        for push, slot in parts.pushes:
            captured.append(slot)
            if not skip:
                push_parts.append(self._gradient_parts(push, slot))
        for rows in parts.row_pushes:
            captured.append(rows.slot)
            if not skip:
                push_parts.append(rows.headers)
        for wanted in parts.pull:
            slot = self._exchange.take(wanted.nbytes)
            values.append(slot)
            places.append((wanted, slot))
            pull_parts.append(self.places(wanted, slot))
        for read in parts.row_pulls:
            captured.append(read.keys)
            places.append((read.block, read.values))
            pull_parts.append(read.places)
        marks = self.next_mark if marked and tick else None
        mark = marks() if marks is not None else None
        clock = self._clock_of_step(name, tick or push_parts != [])
        if tick and self.membership.any_pending:
            for following in self.membership.following(block):
                self._ask_clock(following)
        # By shard, what was made by part.
        pushes = list(zip(*push_parts, strict=True)) if push_parts else repeat((), self._shards)
        pulls = list(zip(*pull_parts, strict=True)) if pull_parts else repeat((), self._shards)
        requests = []
        for base, push_part, pull_part in zip(self.versions[group], pushes, pulls, strict=True):
            requests.append(
                Step(
                    0,
                    group,
                    clock,
                    tick,
                    push_part,
                    pull_part,
                    base,
                    weight,
                    skip,
                    clip_norm,
                    self._factor,
                    mark,
                    note=note,
                )
            )
        operation = Operation(self._shards)
        ticket = Ticket(self, parts.what, group, places)
        ticket.operation = operation
        after = clock + tick if clock != CURRENT_CLOCK else CURRENT_CLOCK
        self._bind(ticket, operation, captured, name, after)
        return Prepared(ticket, requests, operation, block, clock, tick, parts.staged)

    def _ended(self, sent: Prepared) -> None:
        """A step with a tick was sent."""
        self.go_on(sent.block.group_name, sent.clock + 1)
        self.membership.stepped(sent.block)
        for staged in sent.staged:
            staged.operation = sent.operation

    def _defined(self) -> Iterator[Block]:
        return iter(self._exchange.blocks.values())

    # --- joining -----------------------------------------------------------------------------

    def _join_before(self, stepped: Sequence[Block]) -> None:
        """Join groups in which this rank is pending, before a call that steps them."""
        try:
            self._join_all(lambda: self.membership.before(stepped, self._defined()), None)
        except PushTimeout as error:
            error.applied = "no"  # of the call
            raise

    def _entry_first(self, ordered: Sequence[StepParts]) -> Sequence[StepParts]:
        """The parts of a call in which this rank joins: a group that follows the entry comes after
        it. Where the others step it before the entry, this step of it is none of their rounds: it
        ends no clock."""
        call = [each.block for each in ordered]
        entered, first, after = False, list[StepParts](), list[StepParts]()
        for each in ordered:
            if not entered and self.membership.steps_after(each.block, call):
                after.append(each._replace(options=each.options._replace(tick=False)))
            else:
                first.append(each)
            entered = entered or bool(self.membership.following(each.block))
        return [*first, *after]

    def enter_ahead(self, block: Block, limit_s: float | None) -> bool:
        """Join a group before the first step there; whether this rank was pending.

        Raises:
            PushTimeout: not all shards know that it is a member, after `limit_s`.
        """
        self._take_told_pending()
        pending = self.membership.pending(block.group_name)
        self._join_all(lambda: self.membership.ahead(block, self._defined()), limit_s)
        return pending

    def _join_all(self, planned: Callable[[], Sequence[Joining]], limit_s: float | None) -> None:
        """Join until nothing is left to: an answer may tell of another policy, by which other
        groups follow."""
        for _ in range(CHANGES_MAX):
            found = planned()
            if not found:
                return
            for joining in found:
                self._join(joining, limit_s)

    def _join(self, joining: Joining, limit_s: float | None) -> None:
        block = joining.block
        # A suspension or a join that was interrupted may be unanswered: a shard that hears of this
        # join before it executes that one would never answer it. And the step needs its room.
        self.wait_for(self._exchange.settle, "join", None, limit_s)
        for each in joining.leaves:
            self.membership.suspended(each.group_name)
            self.ask_all("rest", SuspendMembership(0, each.group), limit_s)
        self.membership.asks(joining)
        message = JoinGroup(0, block.group, tuple(each.group for each in joining.others))
        replies = self.ask_all("join", message, limit_s)
        late = self.membership.pending(block.group_name)
        self._join_at(block, max(reply.at for reply in replies), late)
        self.membership.joined(joining)

    def _bind(
        self, ticket: Ticket, operation: Operation, slots: list[Slot], group: str, after: int
    ) -> None:
        """What happens when the answers are there, in whichever thread reads them.

        Args:
            after: as `_hear` takes it.
        """

        def complete() -> None:
            if slots:
                self._exchange.give_back(slots)
            replies = operation.replies.values()
            if after == CURRENT_CLOCK or any(r.at >= 0 or r.retire or r.news for r in replies):
                self._hear(operation, group, after)
            if operation.error is not None and ticket.what != "pull":
                self._unread[ticket] = None  # a pull that failed has changed nothing

        operation.then(complete)

    def _gradient_parts(self, push: BlockPush, slot: Slot) -> tuple[Gradient, ...]:
        """The header parts of a gradient, for each shard."""
        key = (push.block.id, slot.arena, slot.offset, push.active, push.hyper)
        parts = self._gradients.get(key)
        if parts is None:
            check_push(push)
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

    def places(self, block: Block, slot: Slot) -> tuple[ReadTarget, ...]:
        """Where each shard writes its part of a block."""
        key = (block.id, slot.arena, slot.offset)
        parts = self._places.get(key)
        if parts is None:
            _bound(self._places)
            parts = self._places[key] = tuple(
                ReadTarget(block.id, slot.arena, offset_of(block, slot, shard))
                for shard in range(self._shards)
            )
        return parts

    def finish(
        self,
        what: str,
        requests: Sequence[ShardRequest],
        limit_s: float | None,
        slots: Sequence[Slot],
    ) -> Operation:
        """Send a request that is not a step and wait for its answers.

        Args:
            limit_s: None: as `wait`, for what was sent before it.
            slots: go back when all shards have answered. What they hold stands until the caller
                lets go of the client's lock.
        """
        operation = Operation(self._shards)

        def complete() -> None:
            self._exchange.give_back(slots)
            self._hear(operation, None, 0)

        operation.then(complete)
        try:
            self.begin(limit_s)
            self._exchange.submit(requests, operation)
        except BaseException:
            if not operation.numbered:
                self._exchange.give_back(slots)
            raise
        self.wait_for(lambda wait_s: self._exchange.wait(operation, wait_s), what, None, limit_s)
        if operation.error is not None:
            raise again(operation.error)
        return operation

    def ask_all(self, what: str, request: ShardRequest, limit_s: float | None) -> list[Done]:
        """Send every shard the same request, which is not a step; their answers, in shard order."""
        return done(self.finish(what, [request] * self._shards, limit_s, ()))

    def suspend(self, block: Block, limit_s: float | None) -> None:
        """Suspend the membership of this rank in a block's group, after what was sent before."""
        self.drain(limit_s)
        if self._rank == NO_RANK:  # no clock waits for it
            return
        # First: if this is interrupted, the next step joins, whatever the shards have heard.
        self.membership.suspended(block.group_name)
        self.ask_all("rest", SuspendMembership(0, block.group), limit_s)

    def change_policy(self, block: Block, policy: ConsistencySpec, limit_s: float | None) -> None:
        """Ask all shards for another policy of a block's group; what they decide is told later.

        Raises:
            ParamServeError: a shard cannot go by it. Nothing was changed.
        """
        try:  # No shard begins before all have said that they can.
            check = SetPolicy(0, block.group, policy, check=True)
            self.ask_all("set_consistency", check, limit_s)
        except ParamServeError as error:
            error.applied = "no"
            raise
        self.ask_all("set_consistency", SetPolicy(0, block.group, policy), limit_s)

    # --- waiting -----------------------------------------------------------------------------

    def drain(self, timeout_s: float | None) -> None:
        """Wait until everything sent has been answered, and raise what was refused unread."""
        self.wait_for(self._exchange.settle, "drain", None, timeout_s)
        self.raise_unread()

    def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait for a ticket's answers; with None `self.timeout_s`, or `busy_s` where they depend on
        live workers only.

        Raises:
            PushTimeout, PullTimeout: they are not there in time. Applied: unknown.
        """
        operation = ticket.operation
        assert operation is not None
        self.wait_for(
            lambda limit_s: self._exchange.wait(operation, limit_s),
            ticket.what,
            ticket.group,
            timeout_s,
        )

    def wait_for(
        self, wait: Callable[[float], bool], what: str, group: int | None, timeout_s: float | None
    ) -> None:
        """Wait for answers, as long as `wait` of a ticket does.

        Args:
            wait: waits this long; whether they are there.
            group: of the step that is waited for; None: of the steps unanswered longest.
        """
        began = self.now()
        limit_s = timeout_s if timeout_s is not None else self.timeout_s
        first_s = min(limit_s, timeouts.SAY_S)
        if wait(first_s):
            return
        said = first_s < limit_s and self._say(what, group, first_s, timeout_s)
        if timeout_s is not None:
            if not wait(began + timeout_s - self.now()):
                raise self.timed_out(what, group, timeout_s)
            return
        limit_s -= self.now() - began
        while not wait(limit_s):
            left_s = began + self.busy_s - self.now()
            asked = group if group is not None else self._exchange.oldest_group()
            busy = self._waits_for(asked, left_s) if asked is not None else ()
            waited_s = self.now() - began
            if wait(0.0):
                return
            if not busy or left_s <= 0.0 or not self.all_live(busy):
                raise self.timed_out(what, asked, waited_s, busy=busy)
            if not said:
                said = True
                self._warn(what, busy, waited_s, None)
            limit_s = min(self.timeout_s, max(self.busy_s - waited_s, 0.0))

    def _say(self, what: str, group: int | None, waited_s: float, timeout_s: float | None) -> bool:
        """Say for whom a wait is, if it is for other ranks; whether it was said."""
        asked = group if group is not None else self._exchange.oldest_group()
        missing = self._waits_for(asked, timeouts.INQUIRE_S) if asked is not None else ()
        if missing:
            self._warn(what, missing, waited_s, timeout_s)
        return bool(missing)

    def _warn(
        self, what: str, missing: Sequence[int], waited_s: float, timeout_s: float | None
    ) -> None:
        limit_s = timeout_s if timeout_s is not None else self.patience_s
        knob = "timeout_s" if timeout_s is not None else timeouts.knob_of(True)
        timeouts.warn_user(
            f"rank {self._rank} has waited {waited_s:.0f} s in {what} for a step of "
            f"{timeouts.ranks(missing)}; as long as they live it waits up to {limit_s:.0f} s, "
            f"{knob}"
        )

    def _waits_for(self, group: int, left_s: float) -> tuple[int, ...]:
        """The ranks that a group's unanswered steps wait for; empty: something else, too.

        A shard that has not answered yet proves nothing: it has up to `stall_s`, if the wait has.
        """
        told = self._exchange.inquire(group, min(self.stall_s, max(timeouts.INQUIRE_S, left_s)))
        missing = {rank for each in told for rank, _ in each.missing}
        return tuple(sorted(missing - {self._rank}))

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
        for each in list(self._unread):
            if each.operation is ticket.operation:
                self._unread.pop(each, None)

    def raise_unread(self) -> None:
        """Raise the oldest error that was not read from its ticket."""
        self._exchange.check_whole()
        unread = list(self._unread)  # at once: a thread that reads answers may add one
        if unread:
            ticket = unread[0]
            self.error_was_read(ticket)
            ticket.release()
            assert ticket.error is not None
            raise again(ticket.error)

    def forget(self, ticket: Ticket) -> None:
        """No caller waits for this ticket any more: its slots go back once they are free."""
        self._forgotten.append(ticket)

    def _let_go(self) -> None:
        for _ in range(len(self._forgotten)):
            ticket = self._forgotten.popleft()
            if ticket.operation is not None and ticket.operation.complete:
                ticket.release()
            else:
                self._forgotten.append(ticket)

    def timed_out(
        self, what: str, group: int | None, waited_s: float, *, busy: Collection[int] | None = None
    ) -> ParamServeError:
        """The error of a wait that has failed; asks the shards who is missing.

        Args:
            busy: where no call has said how long: the ranks that were waited for.
        """
        return timeouts.timed_out(self._exchange, self._rank, what, group, waited_s, busy)


def fail_staged(group: str, tickets: Sequence[Ticket], why: BaseException) -> None:
    """The step of these pushes was not sent: their tickets say so, and not the next step's."""
    if not isinstance(why, ParamServeError):
        why = ParamServeError(
            f"the step of group {group!r} was not sent: {type(why).__name__}: {why}",
            fix="fix the rejected argument and push these gradients again",
        )
    operation = Operation(1)
    operation.failed(why)
    for ticket in tickets:
        if ticket.operation is None:  # else the step was on its way when this call was interrupted
            ticket.operation = operation


def offset_of(block: Block, slot: Slot, shard: int) -> int:
    """Where a shard's part of a block begins in the slot's arena, in bytes."""
    return slot.offset + block.spec.cuts[shard] * block.dtype.itemsize


def _bound(kept: dict[Any, Any]) -> None:
    if len(kept) >= PARTS_KEPT_MAX:
        kept.clear()
