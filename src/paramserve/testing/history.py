"""What happened in a run, as the checkers see it: who asked what, who was told what, what is left.

It holds no reference to a cluster: a simulation records it, and so can a test of real processes.
Order is a number that grows with each thing recorded; times do not matter to the checkers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


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


@dataclass
class Call:
    """One operation of one client.

    Attributes:
        writer: the client's number, of its own for each incarnation.
        number: among the writer's calls, from 0.
        push: number of the push among the writer's, or None.
        blocks: what it pushes to.
        rank: the writer's; -1 for none.
        clock: the writer's clock before it.
        tick: whether it ends its clock.
        state: if its reads show a synchronous clock as a whole, how many clocks they contain.
        error: kind of the refusal; `applied` is what the error said.
        reads: what it read, if it was answered with values.
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
    answered: int | None = None
    error: str = ""
    applied: str = ""
    skipped: bool = False
    reads: dict[Part, Row] = field(default_factory=dict)

    @property
    def acknowledged(self) -> bool:
        """Whether its push was reported as applied."""
        return self.answered is not None and not self.error and not self.skipped

    @property
    def rejected(self) -> bool:
        """Whether its push was reported as not applied."""
        return self.answered is not None and (self.skipped or self.applied == "no")


class Decided(NamedTuple):
    """A synchronous clock that was decided: who is in it, as (rank, writer); nobody if it was
    skipped or refused."""

    clock: int
    order: int
    contributors: tuple[tuple[int, int], ...]
    empty: bool


@dataclass
class History:
    """A recorded run.

    Attributes:
        ranks: all that the cluster has.
        collects: whether a clock is all or nothing over the shards (`Sync`).
        final: what the shards hold in the end.
        arrivals: (shard, writer, push) to the order in which the push first reached the shard.
        fences: (shard, writer) to the order from which that shard knew the writer as ended.
        decided: the synchronous clocks, in order.
        away: (order, rank, whether) of each change: a rank has ended for good, or is back.
        backwards: clocks that went back on a shard, one text for each.
        ended: writers that were killed or declared dead.
        unfinished: what was still waiting when time was up, one text for each.
        slow: who moved too late after the network had healed, one text for each.
    """

    collects: bool
    ranks: tuple[int, ...] = ()
    calls: list[Call] = field(default_factory=list)
    final: dict[Part, Row] = field(default_factory=dict)
    arrivals: dict[tuple[int, int, int], int] = field(default_factory=dict)
    fences: dict[tuple[int, int], int] = field(default_factory=dict)
    decided: list[Decided] = field(default_factory=list)
    away: list[tuple[int, int, bool]] = field(default_factory=list)
    backwards: list[str] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    unfinished: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    _order: int = 0

    def next(self) -> int:
        """The order of what happens now."""
        self._order += 1
        return self._order

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
    ) -> Call:
        """A client asks for something."""
        call = Call(writer, number, self.next(), push, blocks, state, rank, clock, tick)
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
        before = next((is_away for _, r, is_away in reversed(self.away) if r == rank), False)
        if before is not ended:
            self.away.append((self.next(), rank, ended))

    def was_away(self, rank: int, after: int, before: int) -> bool:
        """Whether a rank counted as ended at any time between two orders."""
        state = False
        for order, who, ended in self.away:
            if who != rank or order >= before:
                continue
            if order <= after:
                state = ended
            elif ended:
                return True
        return state

    def by_writer(self) -> dict[int, list[Call]]:
        """Calls in the order of their numbers."""
        found: dict[int, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.writer, []).append(call)
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
