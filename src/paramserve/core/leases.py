"""Which worker gets which samples, by lease: parts of an epoch's common order.

A range goes to a worker when it asks, smaller ones towards the end of an epoch: guided
self-scheduling (Polychronopoulos and Kuck, IEEE Transactions on Computers C-36(12), 1987), with
each worker's share by its measured speed. What a worker that ended had not finished goes back,
once all shards have said how much of it is in the values.

Nothing here knows what the samples are, or reads a clock.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from msgspec import structs

from paramserve.errors import Overloaded, ParamServeError
from paramserve.messages import GiveBack, Lease, Leased, LeasePlan, LeaseReport, ServerBeat

Mark = tuple[int, int]
"""(lease, samples): all of a client's older leases of that turn, and so much of this one."""
NO_MARK: Mark = (0, 0)


class Span(NamedTuple):
    """Positions [start, stop) of one epoch's order. Spans sort in the order of training."""

    epoch: int
    start: int
    stop: int


@dataclass
class Grant:
    """A lease that is not finished; `done`: how many of its samples are."""

    number: int
    span: Span
    done: int = 0

    @property
    def samples(self) -> int:
        return self.span.stop - self.span.start

    def reached(self, mark: Mark) -> int:
        """How many of its samples a mark says are done."""
        if self.number != mark[0]:
            return self.samples if self.number < mark[0] else 0
        return min(mark[1], self.samples)


@dataclass
class Holder:
    """What one client holds; `ended`: number of the membership in which it has ended."""

    rank: int
    grants: deque[Grant] = field(default_factory=deque)
    last: Leased | None = None
    """What it was given last, for the case that the reply was lost."""
    idle: bool = False
    ended: int | None = None

    @property
    def open(self) -> int:
        """Samples that are not finished."""
        return sum(grant.samples - grant.done for grant in self.grants)


@dataclass
class Tally:
    """What has become of a loader's samples, by rank."""

    given: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    repeated: int = 0
    left_over: int = 0


def shares(speeds: Sequence[float]) -> list[float]:
    """Of the work, by speed; a speed of 0 is unknown and counts as the mean of the others."""
    known = [speed for speed in speeds if speed]
    mean = sum(known) / len(known) if known else 1.0
    weights = [speed or mean for speed in speeds]
    return [weight / sum(weights) for weight in weights]


def batch_sizes(total: int, speeds: Sequence[float], low: int, high: int) -> list[int]:
    """`total` samples shared by speed, each share from `low` to `high`: [len(speeds)].

    Their sum is `total` where the bounds let it be: what one cannot take goes to the others.

    Source: as CSS resolves flexible lengths (Flexible Box Layout, section 9.7): of the shares that
    break a bound, those on the side of the larger breach are fixed first.
    """
    fixed: dict[int, float] = {}
    part = shares(speeds)
    while len(fixed) < len(part):
        free = [i for i in range(len(part)) if i not in fixed]
        left = total - sum(fixed.values())
        whole = sum(part[i] for i in free)
        wanted = {i: left * part[i] / whole for i in free}
        clipped = {i: min(max(size, low), high) for i, size in wanted.items()}
        breach = sum(clipped.values()) - sum(wanted.values())
        broken = {i: size for i, size in clipped.items() if (size - wanted[i]) * breach > 0}
        fixed |= broken if abs(breach) > 1e-9 * total and broken else clipped
    ends = [math.floor(sum(fixed[k] for k in range(i)) + 0.5) for i in range(len(part) + 1)]
    return [min(max(b - a, low), high) for a, b in pairwise(ends)]


STEPS_MAX = 8
"""Steps' worth of samples in one lease: few, so that little is lost with a worker."""
FIRST_STEPS_MAX = 2
"""As long as a worker's speed is unknown."""
LOADERS_MAX = 256
"""Names of loaders in one cluster."""
TURNS_MAX = 64
"""Turns of one loader that are under way at one time."""


class Leases:
    """One turn of one loader: `samples` samples, epoch after epoch.

    Args:
        first_epoch: number of its first epoch.
        tally: is counted on.
    """

    def __init__(self, plan: LeasePlan, samples: int, first_epoch: int, tally: Tally) -> None:
        self.plan = plan
        self.over = False
        self.holders: dict[int, Holder] = {}
        """By client."""
        self._tally = tally
        self._fresh = samples
        """Samples that were never leased."""
        self._epoch = first_epoch
        self._position = 0
        self._back: list[Span] = []
        """What was given back, in order."""

    def take(
        self, client: int, rank: int, number: int, message: Lease, speeds: Mapping[int, float]
    ) -> Leased | None:
        """A lease for a client.

        Args:
            number: of the lease, if there is one.
            speeds: of the ranks that share the work, in their order; 0: unknown.
        Returns:
            None: nothing now, but others may give something back.
        """
        holder = self.holders.setdefault(client, Holder(rank))
        last = holder.last
        if last is not None and last.lease > message.seen:
            return structs.replace(last, call=message.call)
        span = self._next_span()
        if span is None:
            holder.idle = message.idle
            self.over = self.over or self._nothing_to_come()
            return Leased(message.call, over=True) if self.over else None
        mine, every, plan = list(speeds).index(rank), list(speeds.values()), self.plan
        batch = batch_sizes(plan.batch * len(every), every, plan.low, plan.high)[mine]
        unit = batch * plan.batches_per_step
        few = FIRST_STEPS_MAX if message.speed == 0 else STEPS_MAX
        left = self._left_in(span.epoch)
        steps = min(max(math.ceil(left * shares(every)[mine] / unit), 1), few)
        given = Span(span.epoch, span.start, min(span.start + steps * unit, span.stop))
        self._remove(given)
        grant = Grant(number, given)
        holder.grants.append(grant)
        holder.idle = False
        holder.last = Leased(message.call, number, *given, batch)
        self._tally.given[rank] = self._tally.given.get(rank, 0) + grant.samples
        return holder.last

    def finished(self, client: int, mark: Mark) -> None:
        """All that a client was given up to this mark is in the values."""
        holder = self.holders.get(client)
        if holder is None or all(grant.number != mark[0] for grant in holder.grants):
            return  # of another turn, or known already
        for grant in list(holder.grants):
            more = grant.reached(mark) - grant.done
            if more > 0:
                grant.done += more
                count = self._tally.finished.get(holder.rank, 0)
                self._tally.finished[holder.rank] = count + more
            if grant.done == grant.samples:
                holder.grants.remove(grant)

    def give_back(self, client: int, mark: Mark) -> None:
        """A client will not take what is beyond this mark."""
        holder = self.holders.get(client)
        if holder is None:
            return
        holder.last = None
        kept: deque[Grant] = deque()
        for grant in holder.grants:
            epoch, start, stop = grant.span
            end = max(grant.done, grant.reached(mark))
            self._put(Span(epoch, start + end, stop))
            grant.span = Span(epoch, start, start + end)
            if grant.done < end:
                kept.append(grant)
        holder.grants = kept

    def release(self, client: int, highest: Mark) -> None:
        """A client has ended, and `finished` has had its mark: what is beyond goes back.

        Args:
            highest: mark up to which some shard has had its steps.
        """
        for grant in self.holders.pop(client).grants:
            epoch, start, stop = grant.span
            self._tally.repeated += max(grant.reached(highest) - grant.done, 0)
            self._put(Span(epoch, start + grant.done, stop))

    def close(self) -> None:
        """Nothing more of this turn will be done: what is left filled no step."""
        self._tally.left_over += sum(holder.open for holder in self.holders.values())
        self.holders.clear()

    def _nothing_to_come(self) -> bool:
        """Whether all holders wait for more samples, as this one does."""
        return all(
            not holder.grants or (holder.idle and holder.ended is None)
            for holder in self.holders.values()
        )

    def _next_span(self) -> Span | None:
        if self._back:
            return self._back[0]
        return self._fresh_span()

    def _fresh_span(self) -> Span | None:
        """The rest of the epoch that was never leased."""
        if not self._fresh:
            return None
        stop = min(self._position + self._fresh, self.plan.size)
        return Span(self._epoch, self._position, stop)

    def _left_in(self, epoch: int) -> int:
        spans = [span for span in (*self._back, self._fresh_span()) if span is not None]
        return sum(span.stop - span.start for span in spans if span.epoch == epoch)

    def _remove(self, given: Span) -> None:
        """Take the beginning of `_next_span()` away."""
        if self._back:
            epoch, _, stop = self._back.pop(0)
            self._put(Span(epoch, given.stop, stop))
            return
        self._fresh -= given.stop - given.start
        self._position = given.stop
        if self._position == self.plan.size:
            self._epoch, self._position = self._epoch + 1, 0

    def _put(self, span: Span) -> None:
        """Add what is to be done again, joined with its neighbours."""
        if span.start == span.stop:
            return
        insort(self._back, span)
        joined: list[Span] = []
        for each in self._back:
            if joined and joined[-1].epoch == each.epoch and joined[-1].stop == each.start:
                joined[-1] = joined[-1]._replace(stop=each.stop)
            else:
                joined.append(each)
        self._back = joined


class _Loader:
    """All turns of one loader. Those below `first`, and those in `over`, are over."""

    def __init__(self, plan: LeasePlan, workers: int) -> None:
        self.plan = plan
        self.samples = plan.steps * plan.batch * workers if plan.steps else plan.epochs * plan.size
        self.turns: dict[int, Leases] = {}
        self.first = 0
        self.over: set[int] = set()
        self.speeds: dict[int, float] = {}
        self.tally = Tally()

    def turn(self, name: str, number: int) -> Leases | None:
        """The turn of this number; None: it is over."""
        if number < self.first or number in self.over:
            return None
        turn = self.turns.get(number)
        if turn is None:
            if len(self.turns) + len(self.over) >= TURNS_MAX or number >= self.first + TURNS_MAX:
                raise Overloaded(
                    f"turn {number} of loader {name!r} was asked for, while turn {self.first} is "
                    f"not over; at most {TURNS_MAX} turns are open at one time",
                    fix="iterate over the loader equally often on all ranks",
                )
            epochs = -(-self.samples // self.plan.size)
            turn = Leases(self.plan, self.samples, number * epochs, self.tally)
            self.turns[number] = turn
        return turn

    def end(self, number: int) -> None:
        self.turns.pop(number).close()
        self.over.add(number)
        while self.first in self.over:
            self.over.remove(self.first)
            self.first += 1


class LeaseBook:
    """All leases of a cluster, by loader.

    Lease numbers grow over all loaders, so that a mark says which one is meant.
    """

    def __init__(self) -> None:
        self._loaders: dict[str, _Loader] = {}
        self._next = 1

    def take(
        self, message: Lease, client: int, rank: int, ranks: Collection[int], workers: int
    ) -> Leased | None:
        """Answer a worker that asks for samples.

        Args:
            ranks: that share the work at present.
            workers: for how many the run was started.
        Returns:
            None: nothing at present; look again after any change.
        Raises:
            ParamServeError: the plan is impossible or another one than the other ranks', or a
                limit was reached. Nothing was given.
        """
        loader = self._loader(message, rank, workers)
        turn = loader.turn(message.loader, message.turn)
        if turn is None:
            return Leased(message.call, over=True)
        if message.taken is not None:
            self._finished(client, message.taken)
        if message.speed:
            loader.speeds[rank] = message.speed
        speeds = {each: loader.speeds.get(each, 0.0) for each in sorted({*ranks, rank})}
        reply = turn.take(client, rank, self._next, message, speeds)
        if reply is not None:
            self._next = max(self._next, reply.lease + 1)
        if turn.over:
            loader.end(message.turn)
        return reply

    def _loader(self, message: Lease, rank: int, workers: int) -> _Loader:
        check_plan(message)
        name, plan = message.loader, message.plan
        known = self._loaders.get(name)
        if known is None:
            if len(self._loaders) >= LOADERS_MAX:
                raise Overloaded(
                    f"rank {rank} began loader {name!r}, and {LOADERS_MAX} others are known",
                    fix="make the loader once, and iterate over it again",
                )
            known = self._loaders[name] = _Loader(plan, workers)
        if known.plan != plan:
            raise ParamServeError(
                f"rank {rank} came with another plan for loader {name!r} than a rank before: "
                f"{_described(plan)}; known: {_described(known.plan)}",
                fix="give worker.loader and worker.sampler the same arguments, and make them in "
                "the same order, on all ranks",
            )
        return known

    def holders(self, message: Lease) -> tuple[tuple[int, int], ...]:
        """(rank, samples) of the holders of what is not finished in the turn asked about."""
        loader = self._loaders.get(message.loader)
        turn = loader.turns.get(message.turn) if loader is not None else None
        if turn is None:
            return ()
        return tuple((each.rank, each.open) for each in turn.holders.values() if each.grants)

    def give_back(self, message: GiveBack, client: int) -> None:
        """A worker will not take what is beyond its mark. Repeating it changes nothing."""
        loader = self._loaders.get(message.loader)
        turn = loader.turns.get(message.turn) if loader is not None else None
        if turn is not None:
            turn.give_back(client, message.mark)

    def changed(self, living: Collection[int], number: int) -> None:
        """The membership has changed.

        Args:
            living: clients that are live workers.
            number: of the membership.
        """
        for turn in self._turns():
            for client, holder in list(turn.holders.items()):
                if holder.ended is None and client not in living:
                    holder.ended = number

    def reported(self, beats: Sequence[ServerBeat]) -> None:
        """All shards have said what is in the values.

        Args:
            beats: the newest one of every shard.
        """
        told = [_marks(beat) for beat in beats]
        held = {client for beat in beats for group in beat.groups for _, client in group.held}
        members = min(beat.members for beat in beats)
        for turn in self._turns():
            for client, holder in list(turn.holders.items()):
                marks = [each.get(client, NO_MARK) for each in told]
                turn.finished(client, min(marks))
                if holder.ended is not None and holder.ended <= members and client not in held:
                    turn.release(client, max(marks))

    def reports(self) -> tuple[LeaseReport, ...]:
        """What became of each loader's samples."""
        return tuple(
            LeaseReport(
                name,
                tuple((r, n, each.finished.get(r, 0)) for r, n in sorted(each.given.items())),
                each.repeated,
                each.left_over,
            )
            for name, each in ((name, loader.tally) for name, loader in self._loaders.items())
        )

    def _turns(self) -> list[Leases]:
        return [turn for loader in self._loaders.values() for turn in loader.turns.values()]

    def _finished(self, client: int, mark: Mark) -> None:
        for turn in self._turns():
            turn.finished(client, mark)


def check_plan(message: Lease) -> None:
    """Raise `ParamServeError` for what no client of ours sends."""
    plan = message.plan
    counts = (plan.size, plan.epochs, plan.batch, plan.low, plan.batches_per_step)
    bounds = plan.low <= plan.high and plan.steps >= 0 and message.turn >= 0
    if min(counts) < 1 or not bounds or not 0.0 <= message.speed < math.inf:
        raise ParamServeError(
            f"the plan of loader {message.loader!r} is impossible: {_described(plan)}; turn "
            f"{message.turn}, speed {message.speed}",
            fix="run the same version on all ranks",
        )


def _described(plan: LeasePlan) -> str:
    given: Mapping[str, int] = structs.asdict(plan)
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _marks(beat: ServerBeat) -> dict[int, Mark]:
    """By client: how far its samples are in one shard's values."""
    found: dict[int, Mark] = {}
    for group in beat.groups:
        for client, lease, samples in group.marks:
            found[client] = max(found.get(client, NO_MARK), (lease, samples))
    return found
