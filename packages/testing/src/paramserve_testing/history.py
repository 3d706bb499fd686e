"""What happened in a run, as the checkers see it: who asked what, who was told what, what is left.

It holds no reference to a cluster: a simulation records it, and so can a test of real processes.
Order is a number that grows with each thing recorded; times do not matter to the checkers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from paramserve.consistency.base import Policy


class Part(NamedTuple):
    """What one shard holds of one block."""

    block: int
    shard: int


class Row(NamedTuple):
    """What one part's values say, by writer: how many pushes it holds, and which.

    `pushes` is a mask: bit k is set where push k is in the values. `sound` is False if the values
    do not have the form that sums of whole pushes have.
    """

    counts: tuple[int, ...]
    pushes: tuple[int, ...]
    sound: bool = True

    def each(self) -> list[tuple[int, int]]:
        """(writer, push) of all pushes."""
        found = []
        for writer, mask in enumerate(self.pushes):
            while mask:
                low = mask & -mask
                found.append((writer, low.bit_length() - 1))
                mask ^= low
        return found


@dataclass
class Call:
    """One operation of one client.

    Attributes:
        writer: the client's number, of its own for each incarnation.
        number: among the writer's calls, from 0.
        push: number of the push among the writer's, or None.
        blocks: what it pushes to.
        rank: the writer's; -1 for none.
        clock: the writer's clock before it; below 0: not known, and another for each call.
        tick: whether it ends its clock.
        state: if its reads show a synchronous clock as a whole, how many clocks they contain.
        spoiled: whether its gradients hold NaN, or a shard refuses it for another reason.
        samples: [start, stop) of the shared samples that its gradients come from.
        pending: whether its worker joins before its next step: no clock waits for it.
        bases: by shard, the version that they were computed from, if it was told.
        more: whether the writer's next one comes in the same request.
        error: kind of the refusal; `applied` is what the error said.
        skipped: it was told that its push is applied nowhere.
        dropped: it was told so by these shards, and by the others that it is applied there.
        reads: what it read, if it was answered with values.
        reread: shards that have read values again for it, because an answer may have been lost.
    """

    writer: int
    number: int
    issued: int
    push: int | None = None
    blocks: frozenset[int] = frozenset()
    state: int | None = None
    rank: int = -1
    clock: int = 0
    tick: bool = False
    spoiled: bool = False
    bases: tuple[int, ...] = ()
    pending: bool = False
    more: bool = False
    samples: tuple[int, int] | None = None
    answered: int | None = None
    error: str = ""
    applied: str = ""
    skipped: bool = False
    dropped: frozenset[int] = frozenset()
    reads: dict[Part, Row] = field(default_factory=dict)
    reread: set[int] = field(default_factory=set)

    @property
    def acknowledged(self) -> bool:
        """Whether its push was reported as applied, on all shards."""
        return self.answered is not None and not (self.error or self.skipped or self.dropped)

    def acknowledged_on(self, shard: int) -> bool:
        """Whether its push was reported as applied there."""
        told = self.answered is not None and not self.error
        return told and not self.skipped and shard not in self.dropped

    def rejected_on(self, shard: int) -> bool:
        """Whether its push was reported as not applied there."""
        told = self.answered is not None
        return told and (self.skipped or self.applied == "no" or shard in self.dropped)


@dataclass(eq=False)
class Deletion:
    """A client deletes rows of a table.

    Attributes:
        issued: when, among the client's calls.
        blocks: the keys.
        executed: by shard, when it answered first.
    """

    writer: int
    issued: int
    blocks: frozenset[int]
    executed: dict[int, int] = field(default_factory=dict)


class Deleted(NamedTuple):
    """What one deletion has taken out of a part, by writer: pushes that had reached it before, and
    those that may have."""

    order: int
    pushes: dict[int, int]
    perhaps: dict[int, int]


class Decided(NamedTuple):
    """A synchronous clock that was decided: who is in it, as (rank, writer); empty if it was
    skipped or refused."""

    clock: int
    order: int
    contributors: tuple[tuple[int, int], ...]
    empty: bool
    waited_s: float = 0.0
    """Seconds since the first step of this clock reached any shard after the last decision."""
    late_s: float = 0.0
    """Seconds since as many steps as the policy asks for had reached every shard."""
    step_s: float | None = None
    """The median time of a step that the lead went by (`GroupView.step_s`); None: not recorded."""


class Answered(NamedTuple):
    """A shard has answered a step. Versions are of its group there, before and after the event
    that carried the answer."""

    order: int
    skipped: bool
    before: int
    after: int


class Applied(NamedTuple):
    """What a shard asked a rule for: `version` is that before, `scale` multiplies the gradient, and
    `momentum` came out of the rule's own, `given`."""

    worker: int
    clock: int
    version: int
    scale: float
    momentum: float
    given: float
    change: float = 0.0
    """Error of the gradient's own counter, after its correction by lambda * change."""


class Update(NamedTuple):
    """Values of a shard have changed: `after - before` updates, with these (writer, push)."""

    shard: int
    order: int
    before: int
    after: int
    pushes: tuple[tuple[int, int], ...]
    alone: bool = False
    """Whether no worker counted there any more."""
    applied: tuple[Applied, ...] = ()
    """Gradients that were applied one by one, if that is recorded."""


class Entered(NamedTuple):
    """A rank counts on a shard from now on. `slowest` is that of the others before; None: there
    were none. `joins`: it is no rank that the cluster began with, and counts for the first time."""

    shard: int
    rank: int
    order: int
    clock: int
    slowest: int | None
    joins: bool
    then: int | None = None
    """The slowest of the others after the event: it may have let many go on. In a group that
    follows another one, the fastest, and how much further the rank is in that one."""
    told: int | None = None
    """The clock that another shard has decided for it; None: this one has."""


class Switched(NamedTuple):
    """What a shard says of a change of policy."""

    shard: int
    number: int
    clock: int
    policy: str


class Agreed(NamedTuple):
    """The result of one collective, as one worker got it."""

    writer: int
    rank: int
    number: int
    """Number of the collective."""
    ranks: int
    """The result: a bit for each rank whose value is in it."""
    again: bool
    """Whether the worker makes calls again that others made before it came."""
    nth: int
    """Number of it in the program, which all workers run."""


class Company(NamedTuple):
    """Which other workers there were while one made a collective, as the coordinator knew them."""

    writer: int
    rank: int
    number: int
    """Number of the worker's calls."""
    refused: bool
    alone: bool
    """Whether its own value alone is the result."""
    live: tuple[int, ...]
    """Ranks that lived from the call to the answer."""
    returned: tuple[int, ...]
    """Ranks that returned by themselves, where all others had ended before the call."""


@dataclass
class Shared:
    """Samples that the workers share by lease: `size` of them, once.

    Attributes:
        over: whether a worker was told that all are used.
        counted: repeats that the coordinator has counted.
    """

    size: int
    over: bool = False
    counted: int = 0


@dataclass
class History:
    """A recorded run, as far as one group is concerned.

    Attributes:
        ranks: all that the cluster begins with.
        collects: whether a clock is all or nothing over the shards (`Sync`), before any change.
        policies: (first clock, policy), in order; empty: not recorded, and nothing of it is judged.
        prompt_s: within which a clock that can be decided is; None: the network may lose what that
            takes.
        final: what the shards hold in the end.
        arrivals: (shard, writer, push) to the order in which the push first reached the shard.
        accepted: the same, from when the shard had the push: it may come in the wrong order first.
        fences: (shard, writer) to the order from which that shard knew the writer as ended.
        reached: (shard, writer, call) to the order in which that step first reached the shard.
        answers: (shard, writer, call) to the shard's first answer.
        updates: of all shards, in order.
        counted: (shard, rank) to (order, whether) of each change: who the shard's clocks speak of.
        entered: ranks that became members, in order.
        switched: every (shard, change of policy) once.
        decided: the synchronous clocks, in order.
        shared: samples that are shared by lease; None: there are none.
        deletions: of rows, in the order in which they were issued.
        agreed: what each worker got of its collectives, in order.
        company: of each collective of a worker, who else was there.
        away: (order, rank, whether) of each change: a rank has ended for good, or is back.
        resting: the same for ranks that take no steps by their own wish.
        backwards: clocks that went back on a shard, one text for each.
        ended: writers that were killed or declared dead.
        unfinished: what was still waiting when time was up, one text for each.
        slow: who moved too late after the network had healed, one text for each.
        raised: exceptions that ended a process, one text for each.
        incarnations: of its rank, by writer.
    """

    collects: bool
    ranks: tuple[int, ...] = ()
    policies: list[tuple[int, Policy]] = field(default_factory=list)
    prompt_s: float | None = None
    calls: list[Call] = field(default_factory=list)
    final: dict[Part, Row] = field(default_factory=dict)
    arrivals: dict[tuple[int, int, int], int] = field(default_factory=dict)
    accepted: dict[tuple[int, int, int], int] = field(default_factory=dict)
    fences: dict[tuple[int, int], int] = field(default_factory=dict)
    reached: dict[tuple[int, int, int], int] = field(default_factory=dict)
    answers: dict[tuple[int, int, int], Answered] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    counted: dict[tuple[int, int], list[tuple[int, bool]]] = field(default_factory=dict)
    entered: list[Entered] = field(default_factory=list)
    switched: dict[Switched, None] = field(default_factory=dict)
    decided: list[Decided] = field(default_factory=list)
    shared: Shared | None = None
    deletions: list[Deletion] = field(default_factory=list)
    agreed: list[Agreed] = field(default_factory=list)
    company: list[Company] = field(default_factory=list)
    away: list[tuple[int, int, bool]] = field(default_factory=list)
    resting: list[tuple[int, int, bool]] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    unfinished: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    incarnations: dict[int, int] = field(default_factory=dict)
    _orders: Iterator[int] = field(default_factory=lambda: count(1))

    def next(self) -> int:
        """The order of what happens now."""
        return next(self._orders)

    def of_another_group(self, policy: Policy) -> History:
        """The history of another group in the same run: what happens to processes, and the order
        of everything, is common."""
        return History(
            policy.collects,
            self.ranks,
            [(0, policy)],
            fences=self.fences,
            away=self.away,
            ended=self.ended,
            unfinished=self.unfinished,
            slow=self.slow,
            raised=self.raised,
            _orders=self._orders,
        )

    def issue(
        self,
        writer: int,
        number: int,
        push: int | None = None,
        blocks: frozenset[int] = frozenset(),
        state: int | None = None,
        *,
        rank: int = -1,
        clock: int = 0,
        tick: bool = False,
        spoiled: bool = False,
        bases: tuple[int, ...] = (),
        pending: bool = False,
        more: bool = False,
    ) -> Call:
        """A client asks for something."""
        call = Call(
            writer,
            number,
            self.next(),
            push,
            blocks,
            state,
            rank,
            clock,
            tick,
            spoiled,
            bases,
            pending,
            more,
        )
        self.calls.append(call)
        return call

    def answer(self, call: Call) -> None:
        """All shards have answered a call."""
        call.answered = self.next()

    def arrived(self, shard: int, writer: int, push: int) -> None:
        """A push has reached a shard, for the first time or again."""
        self.arrivals.setdefault((shard, writer, push), self.next())

    def fenced(self, shard: int, writer: int) -> None:
        """A shard was told that a writer has ended."""
        self.fences.setdefault((shard, writer), self.next())

    def belongs(self, rank: int, ended: bool) -> None:
        """The coordinator knows a rank as ended for good, or not."""
        self._change(self.away, rank, ended)

    def rests(self, rank: int, whether: bool) -> None:
        """A rank asks that no clock waits for it, or takes a step again."""
        self._change(self.resting, rank, whether)

    def _change(self, states: list[tuple[int, int, bool]], rank: int, new: bool) -> None:
        before = next((state for _, r, state in reversed(states) if r == rank), False)
        if before is not new:
            states.append((self.next(), rank, new))

    def policy_at(self, clock: int) -> Policy | None:
        """What holds for steps of a clock; None: not recorded."""
        found = None
        for first, policy in self.policies:
            if clock >= first:
                found = policy
        return found

    def policy_of(self, call: Call) -> Policy | None:
        """What holds for a call; None: not known."""
        return self.policy_at(call.clock) if self.has_clock(call) else None

    def has_clock(self, call: Call) -> bool:
        """Whether a call's clock says which policy holds for it."""
        unknown = call.pending or call.rank < 0
        return len(self.policies) < 2 or not unknown

    def knew_policy(self, call: Call) -> bool:
        """Whether the policy that holds for a call was known when it was sent: it held from the
        beginning, or an earlier call had been answered under it."""
        first = max((at for at, _ in self.policies if at <= call.clock), default=0)
        return self.has_clock(call) and (
            first == 0
            or any(
                each.writer == call.writer
                and each.clock >= first
                and each.answered is not None
                and each.answered < call.issued
                for each in self.calls
            )
        )

    def came_before_its_end(self, call: Call, shards: Collection[int]) -> bool:
        """Whether each of these shards had a call's push when it knew of its writer's end."""
        return call.push is not None and all(
            self.accepted.get((shard, call.writer, call.push), inf)
            < self.fences.get((shard, call.writer), inf)
            for shard in shards
        )

    def collects_at(self, clock: int) -> bool:
        """Whether a step of a clock is all or nothing over the shards."""
        policy = self.policy_at(clock)
        return self.collects if policy is None else policy.collects

    def counts(self, shard: int, rank: int, order: int) -> bool:
        """Whether a rank counted on a shard at a time."""
        state = False
        for at, whether in self.counted.get((shard, rank), ()):
            if at > order:
                break
            state = whether
        return state

    def was_away(self, rank: int, after: int, before: int) -> bool:
        """Whether a rank counted as ended, or rested, at any time between two orders."""
        return self.has_ended(rank, after, before) or _ever(self.resting, rank, after, before)

    def has_ended(self, rank: int, after: int, before: int) -> bool:
        """Whether a rank counted as ended for good at any time between two orders."""
        return _ever(self.away, rank, after, before)

    def is_away(self, rank: int) -> bool:
        """Whether a rank has ended for good, by now."""
        return next((state for _, r, state in reversed(self.away) if r == rank), False)

    def rested(self, rank: int, order: int) -> bool:
        """Whether a rank rested at a time."""
        return _ever(self.resting, rank, order, order)

    def by_writer(self) -> dict[int, list[Call]]:
        """Calls in the order of their numbers."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.writer, []).append(call)
        return found

    def deleted(self, part: Part) -> list[Deleted]:
        """What was deleted of a part. A push reaches it between its arrival at the shard and the
        answer there; those of one client in the order in which it sends them."""
        found = []
        for each in self.deletions:
            at = each.executed.get(part.shard)
            if at is None or part.block not in each.blocks:
                continue
            gone = Deleted(at, {}, {})
            for call in self.calls:
                if call.push is None or part.block not in call.blocks:
                    continue
                key = (part.shard, call.writer, call.number)
                answered, own = self.answers.get(key), call.writer == each.writer
                before = own and call.issued < each.issued
                behind = own or self.reached.get(key, 0) > at
                if before or (answered is not None and answered.order < at):
                    masks = gone.pushes
                elif not behind:
                    masks = gone.perhaps
                else:
                    continue
                masks[call.writer] = masks.get(call.writer, 0) | 1 << call.push
            found.append(gone)
        return found

    def reads(self) -> Iterator[tuple[Call, Part, Row]]:
        """Everything that was read."""
        for call in self.calls:
            for part, row in call.reads.items():
                yield call, part, row


def mask(pushes: Iterator[int | None]) -> int:
    """Numbers of pushes as a mask."""
    found = 0
    for number in pushes:
        if number is not None:
            found |= 1 << number
    return found


def _ever(states: list[tuple[int, int, bool]], rank: int, after: int, before: int) -> bool:
    state = False
    for order, who, new in states:
        if who != rank or order >= before:
            continue
        if order <= after:
            state = new
        elif new:
            return True
    return state
