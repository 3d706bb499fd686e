"""Builds, sends and completes a client's steps: the messages, their tickets and their slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import numpy.typing as npt
from msgspec.structs import replace

from paramserve.client import call_frames
from paramserve.client.awaiting import AwaitedSteps
from paramserve.client.call_frames import NOT_LEASED, Prepared
from paramserve.client.clocks import ClientClocks
from paramserve.client.encoding import Encoded, Encoder
from paramserve.client.exchange import Exchange, Slot, answers_by_shard, copy_error
from paramserve.client.loop_progress import LoopProgress
from paramserve.client.saving import Saving
from paramserve.client.staging import Staged, Staging, fail_staged
from paramserve.client.step_parts import StepParts, say_pushed
from paramserve.client.ticket import Ticket
from paramserve.client.usage import Usage
from paramserve.client.value_slots import ValueSlots
from paramserve.client.waits import Waits
from paramserve.config import NO_RANK, ConsistencySpec, check_number
from paramserve.consistency.registry import PolicyTraits
from paramserve.core.client_membership import Joining
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.core.policy_epochs import CHANGES_MAX
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.resumption import clocks_to_resume, not_joined
from paramserve.errors import NotAMember, ParamServeError, PushTimeout, Timeout
from paramserve.messages import (
    Done,
    Gradient,
    GroupReport,
    JoinGroup,
    Read,
    ReadTarget,
    Saved,
    SentGradients,
    ServerBeat,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
)

Array = npt.NDArray[Any]


class Steps(ClientClocks):
    """Sends steps of this client. The caller holds the client's lock.

    Attributes:
        waits: for answers.
        awaited: what tasks of an event loop wait for.
        versions: read last, by group number and shard.
        first: whether the cluster was started with this rank, and did not go on without it: it is a
            member of groups that are defined after it has come.
        resumed: the clock of each group where this client began, if not at 0.
        steps_made: steps of each group that older incarnations of this rank have ended, if any.
        overtaken: of groups in which the others went on past an older incarnation that had ended:
            the clock where that was.
        staged: by group, what waits for its tick.
        repeated: Async: how many steps of an older incarnation some shard has had that this one
            takes again, since another had not.
        now: the time, in seconds, of the exchange's clock.
        give_back: releases value slots.
        next_mark: is called once for each call that ends a clock, in order, and gives its mark
            (lease, samples); None: there are none.
        loop: of the worker over its batches.
        usage: of its time.
        values: where those lie that it reads.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        waits: Waits,
        terms: GroupTraits,
    ) -> None:
        super().__init__(terms)
        self.waits = waits
        self.awaited = AwaitedSteps(waits, exchange)
        self.versions: dict[int, list[int]] = {}
        self.first = True
        self.resumed: dict[str, int] = {}
        self.steps_made: dict[str, int] = {}
        self.overtaken: dict[str, int] = {}
        self.repeated = 0
        self.staged = Staging()
        self.next_mark: Callable[[], tuple[int, int] | None] | None = None
        self._saving: Saving | None = None
        """What this worker has saved; None: nothing."""
        self.run = 0
        """Number of the run; see `WorkerConfig.run`."""
        self.epochs = 0
        """Epochs that loops over `loader.epochs` have begun, with those that they left out."""
        self.loop = LoopProgress()
        self._factor = 1.0
        self._initial_groups: frozenset[str] = frozenset()
        """Groups that were there when this client came."""
        self.now = exchange.now
        self.usage = Usage(exchange, self.loop)
        self.give_back = exchange.give_back
        self.encoder: Encoder | None = None
        """Encoder of gradients, where a block has a codec for them."""
        self._exchange = exchange
        self._rank = rank
        self._shards = len(exchange.shards)
        self.values = ValueSlots(exchange)
        self._unread: dict[Ticket, None] = {}
        """Tickets with an unread error, oldest first."""
        self._abandoned = deque[Ticket]()
        """Tickets that no call waits for any more, and whose slots are still to go back."""

    def register(self, saving: Saving) -> None:
        """Register what this worker saves: steps send it from now on."""
        self._saving = saving

    def resume(self, beats: Sequence[ServerBeat], *, excluded: bool) -> None:
        """Take over the clocks of this rank from its older incarnations, or the others' for a new
        one, and the groups' policies.

        Args:
            beats: by each shard.
            excluded: whether the others had gone on without this rank.
        """
        reports = [beat.groups for beat in beats]
        by_name: dict[str, list[GroupReport]] = {}
        for beat in beats:
            for report in beat.groups:
                by_name.setdefault(report.name, []).append(report)
        for name, position in clocks_to_resume(reports, self._rank).items():
            for news in {n.number: n for each in by_name[name] for n in each.changes}.values():
                self.learn(news)
            self.advance_to(name, position.clock)
            self.resumed[name] = position.clock
            self.repeated = max(self.repeated, position.repeated)
            ended = [clock for each in by_name[name] for r, clock in each.left if r == self._rank]
            if ended and max(ended) < position.clock:
                self.overtaken[name] = max(ended)
            member = any(r == self._rank for each in by_name[name] for r, _ in each.clocks)
            self.steps_made[name] = position.clock if member else max(ended, default=0)
        self._initial_groups = frozenset(by_name)
        self.first = self.first and not excluded
        late = by_name.keys() if excluded else not_joined(reports, self._rank)
        for name in late:
            self.membership.mark_pending(name)
        if len(by_name) - len(late) > 1:
            self.membership.mark_resumed()

    @property
    def factor(self) -> float:
        """What the servers multiply this client's gradients by, above 0; may be changed."""
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        check_number("factor", value, above=0.0)
        self._factor = float(value)

    # --- groups ------------------------------------------------------------------------------

    def defined(self, block: Block) -> None:
        """Know of a block from now on, and of its group whether this rank is to join it; repeating
        changes nothing."""
        self._terms.defined(block.group, block.spec.consistency)
        late = not (
            self.first or block.group in self.versions or block.group_name in self._initial_groups
        )
        if late and self._rank != NO_RANK and not self._is_member_before(block):
            self.membership.mark_pending(block.group_name)
        self.versions.setdefault(block.group, [0] * self._shards)
        coded = block.spec.push is not None and block.table is None
        if coded and self.encoder is None:
            self.encoder = Encoder(self._rank, self._exchange.take_each)

    def _is_member_before(self, block: Block) -> bool:
        """Whether this rank, which was added, is a member of the first group, and so of one that is
        defined now."""
        others = [each for each in self._defined() if each.group != block.group]
        collecting = [each for each in others if self.traits_of(each).collects]
        first = min(collecting, key=lambda each: each.group, default=block)
        return first is not block and not self.membership.pending(first.group_name)

    def sent_gradients(self) -> tuple[SentGradients, ...]:
        """Bytes of each group's gradients and values on the wire, where a codec has encoded
        some. May be called without the lock."""
        by_group = (
            {} if self.encoder is None else {each.group: each for each in self.encoder.report()}
        )
        for group, (encoded_bytes, plain) in list(self._exchange.decoder.read_bytes.items()):
            each = by_group.get(group, SentGradients(group, 0, 0, 0.0))
            by_group[group] = replace(each, read_bytes=encoded_bytes, read_plain_bytes=plain)
        return tuple(by_group.values())

    def undefined(self, block: Block) -> None:
        """Forget the policy of a group whose only block was not defined after all."""
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
            NotAMember: they do, and this client has no rank. Nothing was kept of the push.
            PushTimeout: not all shards know that it is a member. Nothing was sent of the push.
        """
        if block.group_name in self.staged:
            return True
        if self._groups_reported_pending:
            self._take_reported_pending()
        lasting = self._terms.lasting
        if block.group in lasting and not self.membership.any_pending:
            collects = lasting[block.group].collects
        else:
            if self.membership.any_pending and not self.traits_of(block).collects:
                self._join_blocks([block])
            collects = self.traits_of(block).collects
        if collects and self._rank == NO_RANK:
            raise NotAMember(
                f"a client without a rank pushed to group {block.group_name!r}, which steps in "
                "Sync with its workers",
                fix="push from a worker, use consistency=ps.Async(), or overwrite values with "
                "client.assign",
            )
        return collects

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

    # --- sending -----------------------------------------------------------------------------

    def begin(
        self,
        timeout_s: float | None = None,
        what: str = "push",
        requests: int = 1,
        *,
        reads: bool = False,
    ) -> None:
        """Raise unread errors and wait for room, before anything is captured or sent.

        `timeout_s` None waits as long as `wait` does.

        Args:
            requests: of the call, to each shard.
            reads: whether these are reads.
        Raises:
            PushTimeout: a shard left too much unanswered (`PullTimeout` if `what` is "pull").
            ParamServeError: as `Exchange.wait_for_room`, or an error of an earlier step.
                In all cases nothing was sent.
        """
        exchange = self._exchange
        if exchange.interrupted_in:
            exchange.check_whole()
        if self._unread:
            self.raise_unread()
        if self._abandoned:
            self._let_go()
        if not exchange.has_room(requests, reads=reads):
            self._make_room(timeout_s, what, requests, reads)

    def _make_room(self, timeout_s: float | None, what: str, requests: int, reads: bool) -> None:
        try:
            self.waits.until(
                lambda limit_s: self._exchange.wait_for_room(limit_s, requests, reads=reads),
                what,
                None,
                timeout_s,
            )
        except Timeout as error:
            full = self._exchange.full(requests, reads=reads)
            if full:  # else room has come since then
                error.failed, error.applied = f"{full}: {error.failed}", "no"
                raise

    def _numbered(self, calls: Sequence[Prepared]) -> None:
        """Count a call that is certain to be sent: its clocks end, and what it saves and encodes
        counts as sent."""
        for each in calls:
            parts = each.parts
            if parts.numbered is not None:
                parts.numbered(each.ticket)
            if parts.options.ahead:
                self.membership.stepped_within(parts.block.group_name)
            if parts.options.tick:
                self.advance_to(parts.block.group_name, each.clock + 1)
                self.membership.stepped(parts.block)
                for staged in parts.staged:
                    staged.operation = each.operation
            if self._saving is not None and each.saved:
                self._saving.mark_sent(each.saved)
            if self.encoder is not None:
                self.encoder.mark_sent([*each.encoded.values()], each.requests[0].flush)
        self._exchange.interrupted_in = ""

    def _break_off(
        self,
        parts: Sequence[StepParts],
        sent_steps: Sequence[Prepared],
        prepared: Sequence[Prepared],
        values: Sequence[Slot],
        error: BaseException,
    ) -> None:
        """Give back what an interrupted or failed call does not send any more, and fail its staged
        pushes.

        Args:
            sent_steps: in its frames before.
            prepared: for the present frame; the shards may write to `values` if it is sent.
        """
        if isinstance(error, ParamServeError | ValueError):
            self._exchange.interrupted_in = ""
        numbered = [each for each in (*sent_steps, *prepared) if each.operation.numbered]
        self._abandoned.extend(each.ticket for each in numbered)
        groups = {each.parts.block.group for each in numbered}
        others = [each for each in parts if each.block.group not in groups]
        if numbered and others:  # members of their groups may wait for this rank
            self.membership.mark_resumed()
        if len(numbered) == len(sent_steps):
            self._exchange.give_back(values)
        self._exchange.give_back([slot for each in others for slot in each.taken_slots])
        for each in others:
            fail_staged(each.block.group_name, each.staged, error)

    def send(self, parts: Sequence[StepParts]) -> list[Ticket]:
        """Send steps of several groups in one frame to every shard, or none. `begin` came first,
        and all checks have been made. Where this rank has just joined, those of groups that follow
        come in a second one, when it is a member there.

        Raises:
            PushTimeout: not all shards know that it is. Nothing was sent of the call.
            ParamServeError: an error between the two frames: the first one was sent, as it says.

        Returns:
            Their tickets, in the order given.
        """
        _, *more = parts
        ordered = sorted(parts, key=StepParts.order) if more else parts
        frames = [ordered]
        prepared: list[Prepared] = []
        sent_steps: list[Prepared] = []
        values: list[Slot] = []
        ticked = False
        leased = False
        last: Block | None = None
        saved: tuple[Saved, ...] = ()
        exchange = self._exchange
        try:
            exchange.interrupted_in = ""  # from here on `_break_off` says what was not sent
            if self._groups_reported_pending:
                self._take_reported_pending()
            if self.membership.any_pending:
                self._join_before(ordered)
                frames = call_frames.arrange(self.membership, ordered)
                ordered = [each for frame in frames for each in frame]
            flush = 0 if self.encoder is None else self._flush_of(self.encoder, ordered)
            for each in ordered:
                if each.options.tick:
                    ticked, last = True, each.block
                    leased = leased or each.block.table is None or each.leased
            if self._saving is not None and ticked:
                saved = self._saving.due(ordered)
            mark = self.next_mark() if leased and self.next_mark is not None else None
            for frame in frames:
                if sent_steps:
                    self._join_after(sent_steps, frame)
                    frame = call_frames.in_round(self.membership, frame)
                if ticked:
                    exchange.interrupted_in = "a step"
                calls: list[tuple[list[Step], Operation]] = []
                for each in frame:
                    own = (mark, saved) if each.block is last else (None, ())
                    follows = (mark or NOT_LEASED) if each.block is not ordered[-1].block else None
                    step = self._prepare(each, values, *own, follows, flush)
                    prepared += [step]
                    calls += [(step.requests, step.operation)]
                tells = ticked or self.encoder is not None or parts[-1].numbered is not None
                tells = tells or self.membership.any_pending
                exchange.submit_together(
                    calls, partial(self._numbered, prepared) if tells else None
                )
                sent_steps, prepared, values = [*sent_steps, *prepared], [], []
        except BaseException as error:
            self._break_off(parts, sent_steps, prepared, values, error)
            raise
        if not more:
            return [sent_steps[0].ticket]
        by_group = {each.parts.block.group: each.ticket for each in sent_steps}
        return [by_group[each.block.group] for each in parts]

    def ask(self, parts: Sequence[StepParts]) -> list[Ticket]:
        """Read values of several groups, each from those shards that have some of them, or send
        nothing. `begin` came first, and all checks have been made.

        Args:
            parts: that only read.
        Returns:
            Their tickets, in the order given.
        """
        values: list[Slot] = []
        tickets: list[Ticket] = []
        calls: list[tuple[list[Read | None], Operation]] = []
        try:
            for each in parts:
                block, clock = each.block, self.clocks.get(each.block.group_name, 0)
                requests, places, count = self.values.requests(each, clock, values)
                operation = Operation(count)
                operation.on_complete = partial(self._read_answered, operation)
                tickets += [Ticket(self, each.what, block.group, places, operation)]
                calls += [(requests, operation)]
            self._exchange.submit_together(calls)
        except BaseException:
            if calls and calls[0][1].numbered:
                self._abandoned.extend(tickets)
            else:
                slots = [slot for each in parts for slot in each.taken_slots]
                self._exchange.give_back([*values, *slots])
            raise
        return tickets

    def _read_answered(self, operation: Operation) -> None:
        """Take in what the answers to a read say besides, in whichever thread has read them."""
        says = False
        for shard in operation.replies:
            reply = operation.replies[shard]
            says = says or reply.retire or reply.news != ()
        if says:
            self._apply_reply_state(operation, None, 0)

    def _flush_of(self, encoder: Encoder, ordered: Sequence[StepParts]) -> int:
        """The number of the flush that a call is to be; 0: of none. What was sent before is
        answered first: of a gradient that is not applied nothing is left out."""

        def due() -> int:
            ticked = [each.block for each in ordered if each.options.tick]
            clocks = [(each.group, self.clocks.get(each.group_name, 0)) for each in ticked]
            blocks = (push.block for each in ordered for push, _ in each.pushes)
            return encoder.flush_of(clocks, blocks)

        flush = due()
        if not (flush and encoder.waits):
            return flush
        try:
            self.waits.until(self._exchange.settle, "push", None, None)
        except PushTimeout as error:
            error.applied = "no"  # of the call
            raise
        return due()

    def _prepare(
        self,
        parts: StepParts,
        values: list[Slot],
        mark: tuple[int, int] | None,
        saved: tuple[Saved, ...],
        more: tuple[int, int] | None,
        flush: int,
    ) -> Prepared:
        """One group's part of a call as it is about to be sent; its ticket is bound to the answers.

        Args:
            values: gets the slots that are taken for what is pulled.
            mark: of the call, if this is the last part that ends a clock.
            saved: what it tells.
            more: the mark of the call, if another part follows.
            flush: the number of the flush that it is; 0: of none.
        """
        # Loops and `+=`, not comprehensions and `append`: each of those is a call, and a small step
        # has few.
        block, options = parts.block, parts.options
        name, group = block.group_name, block.group
        tick, skip = options.tick, options.skip
        captured: list[Slot] = []
        push_parts: list[tuple[Gradient, ...]] = []
        pull_parts: list[tuple[ReadTarget, ...]] = []
        encoded: dict[int, Encoded] = {}
        leaves = False
        if self.encoder is not None and not skip:
            encoded = self._encode(self.encoder, parts, values, flush)
            leaves = self.encoder.leaves(group, encoded)
        for push, slot in parts.pushes:
            captured += [slot]
            if skip:
                continue
            if encoded and push.block.id in encoded:
                encoding = encoded[push.block.id]
                captured += [encoding.slot]
                push_parts += [encoding.headers or say_pushed(push, encoding.slot, self._shards)[3]]
                continue
            pushed = slot.pushed
            if (
                pushed is None
                or pushed[0] is not push.block
                or pushed[1:3] != (push.active, push.hyper)
            ):
                pushed = say_pushed(push, slot, self._shards)
            push_parts += [pushed[3]]
        for rows in parts.row_pushes:
            captured += [rows.slot]
            if not skip:
                push_parts += [rows.headers]
        places = self.values.take(parts, values) if parts.pull else []
        for pulled_block, slot in places:
            pulled = slot.pulled
            whole = pulled is not None and pulled[0] is pulled_block
            pull_parts += [
                pulled[1]
                if pulled is not None and whole
                else self.values.targets(pulled_block, slot)
            ]
        for read in parts.row_pulls:
            places += [(read.block, read.slot)]
            pull_parts += [read.places]
        clock = self.clocks.get(name, 0)
        # By shard, what was made by part.
        pushes = list(zip(*push_parts, strict=True)) if push_parts else repeat((), self._shards)
        pulls = list(zip(*pull_parts, strict=True)) if pull_parts else repeat((), self._shards)
        note, largest = options.note, options.largest if not encoded else -1.0
        same = (
            options.weight,
            skip,
            options.clip_norm,
            self._factor,
            mark,
            note,
            largest,
            saved,
            more,
            0 if skip else flush,
            leaves,
        )
        requests: list[Step] = []
        for base, push_part, pull_part in zip(self.versions[group], pushes, pulls, strict=True):
            requests += [Step(0, group, clock, tick, push_part, pull_part, base, *same)]
        operation = Operation(self._shards)
        ticket = Ticket(self, parts.what, group, places, operation)
        prepared = Prepared(parts, ticket, requests, operation, captured, clock, saved, encoded)
        operation.on_complete = partial(self._answered, prepared)
        return prepared

    def _encode(
        self, encoder: Encoder, parts: StepParts, values: list[Slot], flush: int
    ) -> dict[int, Encoded]:
        """Encode those gradients of a part that are to be encoded, by block.

        Args:
            values: gets the slots that are taken.
            flush: if not 0, the codecs leave nothing out that a later gradient is to make up for.
        """
        began = self.now()
        clock = self.clocks.get(parts.block.group_name, 0)
        shared = self._exchange.shared
        encoded = encoder.encode_all(parts.pushes, values, clock, flush=bool(flush), shared=shared)
        self.usage.encoded_s += self.now() - began
        return encoded

    def _defined(self) -> Iterator[Block]:
        return iter(self._exchange.blocks.values())

    # --- joining -----------------------------------------------------------------------------

    def _join_before(self, parts: Sequence[StepParts]) -> None:
        """Join groups in which this rank is pending, before a call that steps them."""
        self._join_blocks([each.block for each in call_frames.stepping(parts)])

    def _join_blocks(self, stepped: Sequence[Block]) -> None:
        try:
            self._join_all(lambda: self.membership.before(stepped, self._defined()), None)
        except PushTimeout as error:
            error.applied = "no"  # of the call
            raise

    def _join_after(self, sent_steps: Sequence[Prepared], parts: Sequence[StepParts]) -> None:
        """Join the groups that follow the entry of a call, when that was sent.

        Raises:
            ParamServeError: one was not joined. It says what was sent.
        """
        try:
            self._join_before(parts)
        except ParamServeError as error:
            first, second = (
                ", ".join(repr(each.group_name) for each in blocks)
                for blocks in (
                    [each.parts.block for each in sent_steps],
                    [each.block for each in parts],
                )
            )
            error.failed += f"; the call's step of {first} was sent, that of {second} was not"
            error.applied = "unknown"
            raise

    def enter_ahead(self, block: Block, limit_s: float | None) -> bool:
        """Join a group before the first step there; whether this rank was pending.

        Raises:
            PushTimeout: not all shards know that it is a member, after `limit_s`.
        """
        self._take_reported_pending()
        pending = self.membership.pending(block.group_name)
        self._join_all(lambda: self.membership.before_entering(block, self._defined()), limit_s)
        return pending

    def _join_all(self, planned: Callable[[], Sequence[Joining]], limit_s: float | None) -> None:
        """Join until nothing is left to: an answer may tell of another policy, by which other
        groups follow. A suspension that was interrupted comes first: no group waits for the rank
        while it rests there."""
        for block in list(self._defined()):
            if self.membership.suspends(block.group_name):
                self.waits.until(self._exchange.settle, "rest", None, limit_s)
                self._suspend(block, limit_s)
        for _ in range(CHANGES_MAX):
            joinings = planned()
            if not joinings:
                return
            for joining in joinings:
                self._join(joining, limit_s)

    def _join(self, joining: Joining, limit_s: float | None) -> None:
        block = joining.block
        # A suspension or a join that was interrupted may be unanswered: a shard that hears of this
        # join before it executes that one would never answer it. And the step needs its room.
        self.waits.until(self._exchange.settle, "join", None, limit_s)
        self.membership.asks(joining)
        others = tuple(each.group for each in joining.others)
        names = [each.group_name for each in (block, *joining.others)] if others else ()
        clocks = tuple(self.clocks.get(name, 0) for name in names)
        message = JoinGroup(0, block.group, others, clocks)
        requests = [message] * self._shards
        # Within a call: the outcome of its entry's step is told with the call's tickets.
        replies = answers_by_shard(
            self.finish("join", requests, limit_s, (), begins=not joining.follows)
        )
        late = self.membership.begins(block.group_name)
        self._join_at(block, max(reply.at for reply in replies), late)
        if ahead := max(reply.counts for reply in replies):
            self.membership.is_ahead(block.group_name, *ahead)
        self.membership.joined(joining)

    def _answered(self, prepared: Prepared) -> None:
        """Release the gradients of an answered step, and take in what the answers say besides, in
        whichever thread has read them."""
        if prepared.captured:
            self._exchange.let_go(prepared.captured)
        operation, clock = prepared.operation, prepared.clock
        if self.encoder is not None:
            self.encoder.answered([*prepared.encoded.values()], operation)
        says = False
        for shard in operation.replies:
            reply = operation.replies[shard]
            says = says or reply.at >= 0 or reply.retire or reply.news != ()
        if says:
            self._apply_reply_state(
                operation, prepared.parts.block.group_name, clock + prepared.parts.options.tick
            )
        if operation.error is not None:
            self._unread[prepared.ticket] = None

    def finish(
        self,
        what: str,
        requests: Sequence[ShardRequest],
        limit_s: float | None,
        slots: Sequence[Slot],
        *,
        begins: bool = True,
    ) -> Operation:
        """Send a request that is not a step and wait for its answers.

        Args:
            limit_s: None: as `wait`, for what was sent before it.
            begins: whether it is a call; else it is within one, for which there is room.
            slots: go back when all shards have answered. What they hold stands until the caller
                releases the client's lock.
        """
        operation = Operation(self._shards)

        def complete() -> None:
            self._exchange.give_back(slots)
            if self.encoder is not None:
                self.encoder.answered((), operation)
            self._apply_reply_state(operation, None, 0)

        operation.on_complete = complete
        try:
            if begins:
                self.begin(limit_s)
            self._exchange.submit(requests, operation)
        except BaseException:
            if not operation.numbered:
                self._exchange.give_back(slots)
            raise
        self.waits.until_complete(operation, what, None, limit_s)
        if operation.error is not None:
            raise copy_error(operation.error)
        return operation

    def ask_all(self, what: str, request: ShardRequest, limit_s: float | None) -> list[Done]:
        """Send every shard the same request, which is not a step; their answers, in shard order."""
        return answers_by_shard(self.finish(what, [request] * self._shards, limit_s, ()))

    def tell_saved(self) -> None:
        """Tell what the worker has saved after its last step."""
        saved = self._saving.unsent() if self._saving is not None else ()
        stepped = [each for each in self._defined() if self.clocks.get(each.group_name)]
        if saved and stepped:
            group, clock = stepped[0].group, self.clocks[stepped[0].group_name]
            requests = [
                Step(0, group, clock, False, (), (), saved=saved) for _ in range(self._shards)
            ]
            self.finish("save", requests, None, ())

    def suspend(self, block: Block, limit_s: float | None) -> None:
        """Suspend the membership of this rank in a block's group, after what was sent before."""
        self.drain(limit_s)
        if self._rank == NO_RANK:  # no clock waits for it
            return
        # First: if this is interrupted, the next step joins, whatever the shards have heard.
        self.membership.suspended(block.group_name)
        self._suspend(block, limit_s)

    def _suspend(self, block: Block, limit_s: float | None) -> None:
        self.ask_all("rest", SuspendMembership(0, block.group), limit_s)
        self.membership.membership_ended(block.group_name)

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
        self.waits.until(self._exchange.settle, "drain", None, timeout_s)
        self.raise_unread()

    def poll(self, operation: Operation) -> bool:
        """Read what has come, without waiting; whether all answers are there."""
        return self._exchange.poll(operation)

    def read_versions(self, group: int, operation: Operation) -> None:
        """Remember which versions a pull has read."""
        versions, replies = self.versions[group], operation.replies
        for shard in replies:
            version = replies[shard].version
            if version > versions[shard]:
                versions[shard] = version

    def error_was_read(self, ticket: Ticket) -> None:
        """Note that an error has been raised where it belongs, and need not be once more."""
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
            raise copy_error(ticket.error)

    def forget(self, ticket: Ticket) -> None:
        """Note a ticket that no caller waits for any more: its slots go back once they are free."""
        self._abandoned.append(ticket)

    def _let_go(self) -> None:
        for _ in range(len(self._abandoned)):
            ticket = self._abandoned.popleft()
            if ticket.operation is not None and ticket.operation.complete:
                ticket.release()
            else:
                self._abandoned.append(ticket)
