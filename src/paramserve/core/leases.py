"""Which worker gets which samples, by lease: parts of an epoch's common order.

A range goes to a worker when it asks, smaller ones towards the end of an epoch: guided
self-scheduling (Polychronopoulos and Kuck, IEEE Transactions on Computers C-36(12), 1987), with
each worker's share by its measured speed. What a worker that ended had not finished goes back,
once all shards have said how much of it is in the values.

The book hears of a checkpoint's cut after that was taken. So while one is under way, what goes from
the book is kept in its `Past`. What is done in the cut, the cut's own marks say; all else is to do
when the run goes on.

Nothing here knows what the samples are, or reads a clock.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct, structs

from paramserve.core.shares import batch_sizes, shares
from paramserve.errors import Overloaded, ParamServeError
from paramserve.messages import (
    DatasetSize,
    GiveBack,
    Lease,
    Leased,
    LeasePlan,
    LeaseReport,
    SameSize,
    ServerBeat,
)

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
    """A lease that is not finished; `done`: how many of its samples are, and `before`: were when
    the checkpoint under way began. `final`: its client has sent, or will, all that is left of it
    before any step with a later lease, of whatever loader."""

    number: int
    span: Span
    done: int = 0
    before: int = 0
    final: bool = False

    @property
    def samples(self) -> int:
        return self.span.stop - self.span.start

    def reached(self, mark: Mark, own: bool) -> int:
        """How many of its samples a mark of its client says are done.

        Args:
            own: whether the mark is of a lease of this turn. One of another loader says nothing of
                what the client may still give back.
        """
        if self.number == mark[0]:
            return min(mark[1], self.samples)
        if self.number > mark[0]:
            return 0
        return self.samples if own or self.final else self.done

    def part(self, start: int, stop: int) -> Span:
        """Span of these samples of the grant."""
        return Span(self.span.epoch, self.span.start + start, self.span.start + stop)


@dataclass
class Holder:
    """What one client holds; `ended`: number of the membership in which it has ended."""

    rank: int
    grants: deque[Grant] = field(default_factory=deque)
    last: Leased | None = None
    """What it was given last, for the case that the reply was lost."""
    idle: bool = False
    ended: int | None = None

    def owns(self, mark: Mark) -> bool:
        """Whether a mark is of one of these grants."""
        return any(grant.number == mark[0] for grant in self.grants)

    @property
    def open(self) -> int:
        """Samples that are not finished."""
        return sum(grant.samples - grant.done for grant in self.grants)


@dataclass
class SampleCounts:
    """Counts of a loader's samples, by rank and outcome."""

    given: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    repeated: int = 0
    left_over: int = 0


STEPS_MAX = 8
"""Steps' worth of samples in one lease: few, so that little is lost with a worker."""
FIRST_STEPS_MAX = 2
"""Most first steps of a lease while a worker's speed is unknown."""
LOADERS_MAX = 256
"""Names of loaders in one cluster."""
TURNS_MAX = 64
"""Turns of one loader that are under way at one time."""


class Marks:
    """How much of each client's leased samples is in a cut: what each shard says.

    Args:
        by_shard: by shard, (client, lease, samples).
        unfinished: the same with calls that are not over in the cut, of clients that have some.
    """

    def __init__(
        self,
        by_shard: Sequence[Iterable[tuple[int, int, int]]],
        unfinished: Sequence[Iterable[tuple[int, int, int]]] = (),
    ) -> None:
        self._by_shard = [_by_client(shard) for shard in by_shard]
        self._begun = _by_client(mark for shard in unfinished for mark in shard)

    def lowest(self, client: int) -> Mark:
        """What all shards have of a client."""
        return min((each.get(client, NO_MARK) for each in self._by_shard), default=NO_MARK)

    def highest(self, client: int) -> Mark:
        """What some shard has of it."""
        return max((each.get(client, NO_MARK) for each in self._by_shard), default=NO_MARK)

    def begun(self, client: int) -> Mark:
        """What all have, with the call that is not over."""
        return max(self.lowest(client), self._begun.get(client, NO_MARK))


def _by_client(marks: Iterable[tuple[int, int, int]]) -> dict[int, Mark]:
    by_client: dict[int, Mark] = {}
    for client, *mark in marks:
        by_client[client] = max(by_client.get(client, NO_MARK), (mark[0], mark[1]))
    return by_client


class TurnRecord(Struct, frozen=True):
    """One turn of a loader as it is saved, with nothing leased: samples that were never leased,
    where they begin, and the spans (epoch, start, stop) that are to be done again. `begun`: (rank,
    *span) of those that the rank is to do, in one call, since it has begun a call with them."""

    number: int
    fresh: int
    epoch: int
    position: int
    back: tuple[tuple[int, int, int], ...]
    begun: tuple[tuple[int, int, int, int], ...] = ()


class LoaderRecord(Struct, frozen=True):
    """A loader as it is saved. `over`: turns from `first` on that are; `given` and `finished` by
    rank."""

    name: str
    plan: LeasePlan
    samples: int
    first: int
    over: tuple[int, ...]
    turns: tuple[TurnRecord, ...]
    given: dict[int, int]
    finished: dict[int, int]
    repeated: int
    left_over: int


class LeasesRecord(Struct, frozen=True):
    """The lease book as it is saved, by loader; `next`: the number of the next lease."""

    next: int
    loaders: tuple[LoaderRecord, ...]


class Holding(NamedTuple):
    """A grant that a client has, or had."""

    client: int
    rank: int
    grant: Grant


class Past:
    """What has gone from the book since the checkpoint under way began; `on`: whether one is."""

    def __init__(self) -> None:
        self.on = False
        self.grants: defaultdict[Leases, list[Holding]] = defaultdict(list)
        """Holdings by turn of clients that have finished them, or ended."""
        self.turns: defaultdict[_Loader, dict[int, Leases]] = defaultdict(dict)
        """Turns that have ended, by loader."""
        self.tallies: dict[_Loader, SampleCounts] = {}
        """Sample counts when the checkpoint began; those of a later loader were empty."""


def _samples(span: Span) -> int:
    return span.stop - span.start


def without(spans: Iterable[Span], done: Iterable[Span]) -> list[Span]:
    """The positions of the first that are in none of the others."""
    remaining = []
    ahead = deque(sorted(done))
    for epoch, start, stop in sorted(spans):
        while ahead and (ahead[0].epoch, ahead[0].stop) <= (epoch, start):
            ahead.popleft()
        at = start
        for each in ahead:
            if (each.epoch, each.start) >= (epoch, stop):
                break
            if at < each.start:
                remaining.append(Span(epoch, at, each.start))
            at = max(at, each.stop)
        if at < stop:
            remaining.append(Span(epoch, at, stop))
    return remaining


def joined(spans: Iterable[Span]) -> list[Span]:
    """Spans without common positions in their order, neighbours as one."""
    merged: list[Span] = []
    for each in sorted(spans):
        if merged and merged[-1].epoch == each.epoch and merged[-1].stop == each.start:
            merged[-1] = merged[-1]._replace(stop=each.stop)
        else:
            merged.append(each)
    return merged


def _uses(holdings: Collection[Holding], marks_of: Callable[[int], Mark]) -> list[tuple[int, Span]]:
    """(rank, span): what clients have used of these grants up to their marks, and had not when the
    checkpoint began."""
    numbers = {(client, grant.number) for client, _, grant in holdings}
    marks = {client: marks_of(client) for client, _, _ in holdings}
    uses = []
    for client, rank, grant in holdings:
        mark = marks[client]
        reached = grant.reached(mark, (client, mark[0]) in numbers)
        if reached > grant.before:
            uses.append((rank, grant.part(grant.before, reached)))
    return uses


class Leases:
    """One turn of one loader: `samples` samples, epoch after epoch.

    Args:
        first_epoch: number of its first epoch.
        tally: is counted on.
        past: gets the grants that go from here.
    """

    def __init__(
        self, plan: LeasePlan, samples: int, first_epoch: int, tally: SampleCounts, past: Past
    ) -> None:
        self.plan = plan
        self.over = False
        self.holders: dict[int, Holder] = {}
        """Holders by client."""
        self._tally = tally
        self._past = past
        self._fresh = samples
        """Samples that were never leased."""
        self._epoch = first_epoch
        self._position = 0
        self._back: list[Span] = []
        """What was given back, in order."""
        self._begun: dict[int, list[Span]] = {}
        """Spans by rank that it is to do first, in one call: begun when this was saved."""
        self._reserved: dict[int, deque[Span]] = {}
        """What of that is still to be given out."""

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
        self._free_kept(speeds)
        if rank in self._reserved:
            span_taken, batch = self._take_reserved(rank)
        else:
            span = self._next_span()
            if span is None:
                holder.idle = message.idle
                self.over = self.over or self._nothing_to_come()
                return Leased(message.call, over=True) if self.over else None
            mine, every, plan = list(speeds).index(rank), list(speeds.values()), self.plan
            batch = batch_sizes(plan.batch * len(every), every, plan.low, plan.high)[mine]
            unit = batch * plan.batches_per_step
            few = FIRST_STEPS_MAX if message.speed == 0 else STEPS_MAX
            remaining = self._left_in(span.epoch)
            steps = min(max(math.ceil(remaining * shares(every)[mine] / unit), 1), few)
            span_taken = Span(span.epoch, span.start, min(span.start + steps * unit, span.stop))
            self._remove(span_taken)
        grant = Grant(number, span_taken)
        holder.grants.append(grant)
        holder.idle = False
        holder.last = Leased(message.call, number, *span_taken, batch)
        self._tally.given[rank] = self._tally.given.get(rank, 0) + grant.samples
        return holder.last

    def _take_reserved(self, rank: int) -> tuple[Span, int]:
        """What a rank had begun, and the batch that makes one call of it."""
        reserved, whole = self._reserved[rank], sum(map(_samples, self._begun[rank]))
        first = reserved.popleft()
        if not reserved:
            del self._reserved[rank]
        return first, -(-whole // self.plan.batches_per_step)

    def _free_kept(self, ranks: Collection[int]) -> None:
        """What ranks had begun that are not among these is any rank's."""
        for rank in [each for each in self._reserved if each not in ranks]:
            del self._begun[rank]
            for span in self._reserved.pop(rank):
                self._put(span)

    def finished(self, client: int, mark: Mark) -> None:
        """All that a client was given up to this mark is in the values."""
        holder = self.holders.get(client)
        if holder is None:
            return
        own = holder.owns(mark)
        for grant in list(holder.grants):
            more = grant.reached(mark, own) - grant.done
            if more > 0:
                grant.done += more
                count = self._tally.finished.get(holder.rank, 0)
                self._tally.finished[holder.rank] = count + more
            if grant.done == grant.samples:
                holder.grants.remove(grant)
                self._let_go(client, holder, grant)

    def give_back(self, client: int, mark: Mark) -> None:
        """A client will not take what is beyond this mark."""
        holder = self.holders.get(client)
        if holder is None:
            return
        holder.last = None
        remaining: deque[Grant] = deque()
        for grant in holder.grants:
            end = max(grant.done, grant.reached(mark, own=True))
            self._put(grant.part(end, grant.samples))
            grant.span, grant.final = grant.part(0, end), True
            if grant.done < end:
                remaining.append(grant)
            else:
                self._let_go(client, holder, grant)
        holder.grants = remaining

    def release(self, client: int, highest: Mark) -> None:
        """A client has ended, and `finished` has had its mark: what is beyond goes back.

        Args:
            highest: mark up to which some shard has had its steps.
        """
        holder = self.holders.pop(client)
        own = holder.owns(highest)
        for grant in holder.grants:
            self._let_go(client, holder, grant)
            self._tally.repeated += max(grant.reached(highest, own) - grant.done, 0)
            if grant.span in self._begun.get(holder.rank, ()) and not grant.done:
                self._reserved.setdefault(holder.rank, deque()).append(grant.span)
            else:
                self._put(grant.part(grant.done, grant.samples))

    def _let_go(self, client: int, holder: Holder, grant: Grant) -> None:
        """A client has this grant no longer."""
        if self._past.on:
            self._past.grants[self].append(Holding(client, holder.rank, grant))

    def record_at_cut(
        self, number: int, marks: Marks
    ) -> tuple[TurnRecord, list[tuple[int, Span]], int]:
        """This turn as of a cut with these marks of clients; (rank, span) of what was used in it
        since the checkpoint began; and how many of other samples some shards have."""
        past = self._past.grants.get(self, [])
        present = [
            Holding(client, holder.rank, grant)
            for client, holder in self.holders.items()
            for grant in holder.grants
        ]
        low, high, calls = (
            _uses([*past, *present], marks_of)
            for marks_of in (marks.lowest, marks.highest, marks.begun)
        )
        done = [span for _, span in low]
        free = [*self._back, *(span for spans in self._reserved.values() for span in spans)]
        free += [grant.part(grant.before, grant.done) for _, _, grant in past]
        free += [grant.part(grant.before, grant.samples) for _, _, grant in present]
        back = joined(without(free, done))
        more = {*calls} - {*low}
        unfinished = {(rank, *each) for rank, span in more for each in without([span], done)}
        # What was begun at an earlier cut, and is still to be done.
        unfinished |= {
            (r, *s) for r in self._begun for s in self._begun[r] if not without([s], back)
        }
        place = self._fresh, self._epoch, self._position
        record = TurnRecord(number, *place, tuple(back), tuple(sorted(unfinished)))
        return record, low, sum(_samples(span) for _, span in high) - sum(map(_samples, done))

    def restore(self, record: TurnRecord) -> None:
        """Nothing is leased; this is what is left."""
        self._fresh, self._epoch, self._position = record.fresh, record.epoch, record.position
        for rank, *span in record.begun:
            self._begun.setdefault(rank, []).append(Span(*span))
        self._reserved = {rank: deque(spans) for rank, spans in self._begun.items()}
        unfinished = [span for spans in self._begun.values() for span in spans]
        self._back = joined(without(map(Span._make, record.back), unfinished))

    def go_on_with(self, plan: LeasePlan, more: int) -> None:
        """Apply this plan from now on, with so many more samples."""
        self.plan = plan
        self._fresh += more

    def close(self) -> None:
        """Nothing more of this turn will be done: what is left filled no step."""
        self._tally.left_over += sum(holder.open for holder in self.holders.values())

    def _nothing_to_come(self) -> bool:
        """Whether all holders wait for more samples, as this one does."""
        return not self._reserved and all(
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

    def _remove(self, span: Span) -> None:
        """Take the beginning of `_next_span()` away."""
        if self._back:
            epoch, _, stop = self._back.pop(0)
            self._put(Span(epoch, span.stop, stop))
            return
        self._fresh -= span.stop - span.start
        self._position = span.stop
        if self._position == self.plan.size:
            self._epoch, self._position = self._epoch + 1, 0

    def _put(self, span: Span) -> None:
        """Add what is to be done again, joined with its neighbours."""
        if span.start == span.stop:
            return
        self._back = joined([*self._back, span])


class _Loader:
    """All turns of one loader. Those below `first`, and those in `over`, are over."""

    def __init__(self, plan: LeasePlan, workers: int, past: Past) -> None:
        self.plan = plan
        self.samples = plan.steps * plan.batch * workers if plan.steps else plan.epochs * plan.size
        self.turns: dict[int, Leases] = {}
        self.first = 0
        self.over: set[int] = set()
        self.speeds: dict[int, float] = {}
        self.of_before = False
        """Whether the plan is that of a checkpoint, and no rank has come with its own since."""
        self.tally = SampleCounts()
        self._past = past

    @classmethod
    def restored(cls, record: LoaderRecord, past: Past) -> _Loader:
        """A loader as it was saved."""
        loader = cls(record.plan, 1, past)
        loader.samples, loader.first, loader.over = record.samples, record.first, set(record.over)
        loader.of_before = True
        loader.tally = SampleCounts(
            dict(record.given), dict(record.finished), record.repeated, record.left_over
        )
        for each in record.turns:
            turn = loader.turns[each.number] = Leases(
                loader.plan, loader.samples, 0, loader.tally, past
            )
            turn.restore(each)
        return loader

    def record_at_cut(self, name: str, marks: Marks) -> LoaderRecord:
        """This loader as of a cut with these marks of clients."""
        before, ended = self._past.tallies.get(self, SampleCounts()), self._past.turns.get(self, {})
        finished, repeated, turns = dict(before.finished), before.repeated, []
        for number, turn in sorted({**ended, **self.turns}.items()):
            record, uses, some = turn.record_at_cut(number, marks)
            turns.append(record)
            repeated += some
            for rank, span in uses:
                finished[rank] = finished.get(rank, 0) + _samples(span)
        first = min([self.first, *ended])
        return LoaderRecord(
            name,
            self.plan,
            self.samples,
            first,
            tuple(sorted({*range(first, self.first), *self.over} - ended.keys())),
            tuple(turns),
            dict(self.tally.given),
            finished,
            repeated,
            before.left_over,
        )

    def go_on_with(self, plan: LeasePlan, workers: int) -> None:
        """Take over the plan of a run that goes on, where it shares out the same order: other
        batches, or more samples of an only turn. Any other one changes nothing."""
        old_plan, self.of_before = self.plan, False
        samples = type(self)(plan, workers, self._past).samples
        more, size = samples - self.samples, plan.size
        turns = {*self.turns, *self.over, *range(self.first)}
        same_order = (old_plan.size, old_plan.order) == (size, plan.order)
        if not same_order or more < 0 or (more and not turns <= {0}):
            return
        if more and self.first:  # the only turn was over
            self.first = 0
            self.turns[0] = turn = Leases(plan, 0, 0, self.tally, self._past)
            turn.restore(TurnRecord(0, 0, self.samples // size, self.samples % size, ()))
        for turn in self.turns.values():
            turn.go_on_with(plan, more)
        self.plan, self.samples = plan, samples

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
            turn = Leases(self.plan, self.samples, number * epochs, self.tally, self._past)
            self.turns[number] = turn
        return turn

    def end(self, number: int) -> None:
        turn = self.turns.pop(number)
        turn.close()
        if self._past.on:
            self._past.turns[self][number] = turn
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
        self._sizes: dict[str, tuple[int, int]] = {}
        """First rank and dataset length of each loader without leases."""
        self._next = 1
        self._past = Past()
        self._saved: frozenset[str] = frozenset()
        """Loaders of the checkpoint that the cluster has gone on from."""

    def restore(self, record: LeasesRecord) -> None:
        """Go on as it was saved: nothing is leased."""
        self._next = record.next
        self._loaders = {each.name: _Loader.restored(each, self._past) for each in record.loaders}
        self._saved = frozenset(self._loaders)

    def keep_past(self, on: bool = True) -> None:
        """A checkpoint begins, whose cut is to come; or one is over."""
        past, loaders = self._past, self._loaders.values()
        past.on = on
        past.grants.clear()
        past.turns.clear()
        past.tallies = {each: copy.deepcopy(each.tally) for each in loaders} if on else {}
        for turn in self._turns() if on else ():
            for holder in turn.holders.values():
                for grant in holder.grants:
                    grant.before = grant.done

    def record_at_cut(self, marks: Marks) -> LeasesRecord:
        """The book as of the cut with these marks, which was taken since `keep_past`: as if all
        clients had ended there."""
        assert self._past.on, "no checkpoint has begun"
        loaders = self._loaders.items()
        return LeasesRecord(
            self._next, tuple(each.record_at_cut(name, marks) for name, each in loaders)
        )

    def compare_size(self, message: DatasetSize, rank: int) -> SameSize:
        """Which rank made a loader first, and over how many samples; of more loaders than are kept
        each one is the first."""
        here = (rank, message.size)
        if len(self._sizes) < LOADERS_MAX:
            self._sizes.setdefault(message.loader, here)
        return SameSize(message.call, *self._sizes.get(message.loader, here))

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
        """Find or begin the loader that a lease names. Raises where the rank came with another plan
        than ranks before it."""
        check_plan(message)
        name, plan = message.loader, message.plan
        if message.known and name not in self._saved:
            raise ParamServeError(
                f"the steps of rank {rank} in the checkpoint were made with loaders of equal "
                f'shares, and it came with shards="dynamic" (loader {name!r}): which samples are '
                "done cannot be told",
                fix="go on with the loaders and the number of workers of before; or begin anew in "
                "another folder, ps.Checkpoint(folder, load_state=...) for the values",
            )
        loader = self._loaders.get(name)
        if loader is None:
            if len(self._loaders) >= LOADERS_MAX:
                raise Overloaded(
                    f"rank {rank} began loader {name!r}, and {LOADERS_MAX} others are known",
                    fix="make the loader once, and iterate over it again",
                )
            loader = self._loaders[name] = _Loader(plan, workers, self._past)
        if loader.of_before:
            loader.go_on_with(plan, workers)
        if loader.plan.size != plan.size:
            raise ParamServeError(
                f"rank {rank} came with {plan.size} samples for loader {name!r}, and a rank before "
                f"it with {loader.plan.size}",
                fix="give worker.loader and worker.sampler the same dataset on all ranks, and make "
                "them in the same order; where each rank has a part of its own, give "
                'worker.loader(..., shards="own")',
            )
        if loader.plan != plan:
            raise ParamServeError(
                f"rank {rank} came with another plan for loader {name!r} than a rank before: "
                f"{_described(plan)}; known: {_described(loader.plan)}",
                fix="give worker.loader and worker.sampler the same arguments, and make them in "
                "the same order, on all ranks",
            )
        return loader

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
        marks = Marks([(mark for group in beat.groups for mark in group.marks) for beat in beats])
        waiting = {client for beat in beats for group in beat.groups for _, client in group.held}
        members = min(beat.members for beat in beats)
        for turn in self._turns():
            for client, holder in list(turn.holders.items()):
                turn.finished(client, marks.lowest(client))
                if holder.ended is not None and holder.ended <= members and client not in waiting:
                    turn.release(client, marks.highest(client))

    def reports(self) -> tuple[LeaseReport, ...]:
        """Counts of each loader's samples."""
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
    options: Mapping[str, int] = structs.asdict(plan)
    return ", ".join(f"{name}={value}" for name, value in options.items())
