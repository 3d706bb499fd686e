"""Ranges by lease: every sample exactly once an epoch, in any order and when ranks end."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs
from tests.suites import each_case

from paramserve.core import leases as module
from paramserve.core.leases import LeaseBook
from paramserve.errors import Overloaded, ParamServeError
from paramserve.messages import GiveBack, GroupReport, Lease, Leased, LeasePlan, ServerBeat

NAME = "loader"
PLAN = LeasePlan(100, 1, 0, 5, 5, 5, 1, 7)


def plan(size: int = 100, **changes: int) -> LeasePlan:
    batch = changes.get("batch", 5)
    return structs.replace(PLAN, **{"size": size, "low": batch, "high": batch, **changes})


@dataclass
class Table:
    """A lease book whose askers are ranks; client ids are ranks + 10."""

    plan: LeasePlan
    ranks: tuple[int, ...] = (0, 1)
    book: LeaseBook = field(default_factory=LeaseBook)
    seen: dict[int, int] = field(default_factory=dict)

    def ask(self, rank: int, turn: int = 0, **options: Any) -> Leased | None:
        seen = options.pop("seen", self.seen.get(rank, 0))
        plan = options.pop("plan", self.plan)
        message = Lease(3, NAME, plan, turn, seen, 1.0, **options)
        reply = self.book.take(message, rank + 10, rank, self.ranks, 2)
        if reply is not None:
            assert reply.call == 3
            self.seen[rank] = max(self.seen.get(rank, 0), reply.lease)
        return reply

    def given(self, rank: int, **options: Any) -> Leased:
        reply = self.ask(rank, **options)
        assert reply is not None
        assert reply.lease
        return reply

    def end(self, rank: int, number: int) -> None:
        self.book.changed({r + 10 for r in range(10) if r != rank}, number)

    def report(self, members: int, *marks: Any, held: tuple[int, ...] = ()) -> None:
        """One argument for each shard: {rank: mark}."""
        beats = [
            ServerBeat(
                shard,
                (
                    GroupReport(
                        "model",
                        0,
                        (),
                        0,
                        (),
                        tuple((rank, rank + 10) for rank in held),
                        marks=tuple((rank + 10, *mark) for rank, mark in each.items()),
                    ),
                ),
                members=members,
            )
            for shard, each in enumerate(marks)
        ]
        self.book.reported(beats)

    def finish(self, rank: int, reply: Leased) -> None:
        self.report(0, {rank: (reply.lease, reply.stop - reply.start)})


def span(reply: Leased | None) -> tuple[int, int, int]:
    assert reply is not None
    return reply.epoch, reply.start, reply.stop


def all_of(table: Table, rank: int = 0, turn: int = 0, **options: Any) -> list[Leased]:
    """What a worker gets that takes all and does it at once."""
    found: list[Leased] = []
    while True:
        reply = table.ask(rank, turn, idle=True, taken=mark_of(found), **options)
        assert reply is not None
        if reply.over:
            return found
        found.append(reply)


def mark_of(found: list[Leased]) -> tuple[int, int] | None:
    return (found[-1].lease, found[-1].stop - found[-1].start) if found else None


def positions(replies: list[Leased]) -> list[tuple[int, int]]:
    return [(each.epoch, at) for each in replies for at in range(each.start, each.stop)]


# --- ranges ---------------------------------------------------------------------------------------


def test_take_all_epochs_come_in_order_and_whole() -> None:
    table = Table(plan(23, epochs=3))
    assert positions(all_of(table)) == [(epoch, at) for epoch in range(3) for at in range(23)]


@each_case(("steps", "size"), [(3, 100), (7, 20), (10, 100)])
def test_take_by_steps_gives_their_mean_for_all_workers(steps: int, size: int) -> None:
    found = positions(all_of(Table(plan(size, steps=steps))))
    assert found == [divmod(i, size) for i in range(steps * 5 * 2)]


def test_take_chunks_are_batches_and_shrink_towards_the_end_of_an_epoch() -> None:
    table = Table(plan(203), (0, 1))
    sizes = [each.stop - each.start for each in all_of(table, speed=1.0)]
    assert sizes[0] == 40  # 8 batches at most
    assert all(size % 5 == 0 for size in sizes[:-1])
    assert sizes[-1] == 3
    for i, size in enumerate(sizes[:-1]):
        half = sum(sizes[i:]) / 2  # one of two workers
        assert size == 40 or half <= size < half + 5
    assert sizes == sorted(sizes, reverse=True)


def test_take_chunk_holds_whole_steps() -> None:
    sizes = [each.stop - each.start for each in all_of(Table(plan(200, batches_per_step=3)))]
    assert all(size % 15 == 0 for size in sizes[:-1])


def test_take_slow_worker_gets_less_at_a_time() -> None:
    table = Table(plan(100))
    table.given(0, speed=40.0)
    slow, fast = table.given(1, speed=10.0), table.given(0, speed=40.0)
    assert slow.stop - slow.start == 15  # a fifth of 60 is 12: 3 batches
    assert fast.stop - fast.start == 40


def test_take_unknown_speed_gets_little() -> None:
    reply = Table(plan(1000)).given(0)
    assert reply.stop - reply.start == 10


def test_take_nothing_left_waits_for_the_holder() -> None:
    table = Table(plan(5))
    mine = table.given(0)
    assert table.ask(1, idle=True) is None
    table.finish(0, mine)
    assert table.ask(1, idle=True) == Leased(3, over=True)


def test_take_holder_that_is_idle_has_nothing_to_give() -> None:
    table = Table(plan(5, batches_per_step=2))
    table.given(0)
    assert table.ask(1, idle=True) is None
    reply = table.ask(0, idle=True)  # its batch fills no step
    assert reply is not None
    assert reply.over
    assert table.ask(1) == reply
    assert table.book.reports()[0].left_over == 5


def test_take_prefetching_holder_is_waited_for() -> None:
    table = Table(plan(5))
    mine = table.given(0)
    assert table.ask(0) is None
    assert table.ask(1, idle=True) is None
    reply = table.ask(0, idle=True, taken=(mine.lease, 5))
    assert reply is not None
    assert reply.over


def test_take_lost_reply_is_given_again() -> None:
    table = Table(plan())
    first = table.given(0)
    assert table.ask(0, seen=first.lease - 1) == first
    assert table.given(0).start == first.stop


def test_take_next_turn_begins_with_the_next_epochs() -> None:
    table = Table(plan(20, epochs=2))
    assert {epoch for epoch, _ in positions(all_of(table))} == {0, 1}
    later = all_of(table, turn=1)
    assert Counter(positions(later)) == Counter((e, at) for e in (2, 3) for at in range(20))
    again = table.ask(1)
    assert again is not None
    assert again.over, "an older turn is over for who comes late"


def test_take_lease_numbers_grow_over_loaders() -> None:
    table = Table(plan())
    first = table.given(0)
    other = Lease(3, "other", plan(), 0, 0, 1.0)
    reply = table.book.take(other, 10, 0, (0, 1), 2)
    assert reply is not None
    assert reply.lease == first.lease + 1


# --- what goes back -------------------------------------------------------------------------------


def test_release_waits_for_every_shards_word() -> None:
    table = Table(plan(10), (0,))
    mine = table.given(0)
    table.end(0, number=4)
    for members, held in [(3, ()), (4, (0,))]:
        table.report(members, {0: (mine.lease, 5)}, {0: (mine.lease, 5)}, held=held)
        assert table.ask(1, idle=True) is None
    table.report(4, {0: (mine.lease, 5)}, {0: (mine.lease, 5)})
    assert span(table.ask(1, idle=True)) == (0, 5, 10)
    assert table.book.reports()[0].repeated == 0


def test_release_takes_the_smallest_mark_and_counts_repeats() -> None:
    table = Table(plan(20), (0,))
    first, second = table.given(0), table.given(0)
    table.end(0, number=4)
    table.report(4, {0: (second.lease, 5)}, {0: (first.lease, 5)}, {0: (first.lease, 10)})
    assert span(table.ask(1)) == (0, 5, 15)
    (report,) = table.book.reports()
    assert report.repeated == 10
    assert report.ranks == ((0, 20, 5), (1, 10, 0))


def test_release_shard_that_knows_no_mark_gives_all_back() -> None:
    table = Table(plan(20), (0,))
    mine = table.given(0)
    table.end(0, number=4)
    table.report(4, {0: (mine.lease, 10)}, {})
    assert span(table.ask(1)) == (0, 0, 10)
    assert table.book.reports()[0].repeated == 10


def test_release_trusts_what_the_worker_knew_before_it_ended() -> None:
    table = Table(plan(10), (0,))
    mine = table.given(0)
    table.report(1, {0: (mine.lease, 5)}, {0: (mine.lease, 5)})
    table.end(0, number=4)
    table.report(4, {}, {})
    assert span(table.ask(1)) == (0, 5, 10)


def test_release_earlier_epoch_comes_first() -> None:
    table = Table(plan(10, epochs=2), (0,))
    table.given(0)
    assert table.given(1).epoch == 1
    table.end(0, number=4)
    table.report(4, {})
    assert [span(table.ask(1)) for _ in range(3)] == [(0, 0, 5), (0, 5, 10), (1, 5, 10)]


def test_release_rest_of_an_idle_worker_that_ended_is_waited_for() -> None:
    table = Table(plan(15, batches_per_step=2))
    mine = table.given(0)
    assert span(table.ask(1)) == (0, 10, 15)
    assert table.ask(1, idle=True) is None
    table.end(1, number=4)
    assert table.ask(0, idle=True, taken=(mine.lease, 10)) is None
    table.report(4, {})
    assert span(table.ask(0, idle=True)) == (0, 10, 15)


def test_release_new_incarnation_does_not_inherit() -> None:
    table = Table(plan(10), (0,))
    table.given(0)
    table.end(0, number=4)
    message = Lease(3, NAME, table.plan, 0, 0, 1.0, idle=True)
    assert table.book.take(message, 99, 0, (0, 1), 2) is None
    table.report(5, {})
    assert span(table.book.take(message, 99, 0, (0,), 2)) == (0, 0, 10)


def test_give_back_returns_what_is_beyond_the_mark() -> None:
    table = Table(plan(30), (0,))
    first, second = table.given(0), table.given(0)
    for _ in range(2):
        table.book.give_back(GiveBack(1, NAME, 0, (first.lease, 5)), 10)
    assert span(table.ask(1)) == (0, 5, 15)
    assert [span(table.ask(1)) for _ in range(2)] == [(0, 15, 20), (0, 20, 25)]
    assert span(table.ask(1)) == (0, 25, 30)
    assert table.ask(1, idle=True) is None, "the step of the first 5 may still fail"
    assert second.stop == 20
    assert table.book.holders(Lease(3, NAME, table.plan, 0, 0, 1.0)) == ((0, 5), (1, 25))


def test_give_back_lost_reply_is_not_repeated_after_it() -> None:
    table = Table(plan(10), (0,))
    first = table.given(0)
    table.book.give_back(GiveBack(1, NAME, 0, (0, 0)), 10)
    reply = table.ask(0, seen=first.lease - 1)
    assert reply is not None
    assert reply.lease > first.lease


def switched(*, gave_back: bool) -> tuple[Table, tuple[int, int]]:
    """A worker has stepped with 5 samples of its lease, then with another loader's. The shards keep
    a client's newest mark: that one."""
    table = Table(plan(20))
    lease = table.given(0)
    if gave_back:
        table.book.give_back(GiveBack(1, NAME, 0, (lease.lease, 5)), 10)
    message = Lease(3, "other", table.plan, 0, lease.lease, 1.0)
    other = table.book.take(message, 10, 0, (0, 1), 2)
    assert other is not None
    return table, (other.lease, 5)


@each_case("gave_back", [True, False])
def test_mark_of_another_loader_says_that_all_is_done_that_was_not_given_back(
    gave_back: bool,
) -> None:
    """Where the message is lost that gives back, it says nothing, and the samples are used again:
    none is lost."""
    table, mark = switched(gave_back=gave_back)
    table.end(0, 1)
    table.report(1, {0: mark})
    used = 5 if gave_back else 0
    assert sorted(positions(all_of(table, 1))) == [(0, at) for at in range(used, 20)]
    assert table.book.reports()[0].ranks[0] == (0, 10, used)
    assert table.book.reports()[0].repeated == 0


def test_mark_of_another_loader_that_some_shards_have_says_what_is_repeated() -> None:
    table, mark = switched(gave_back=True)
    table.end(0, 1)
    table.report(1, {0: mark}, {})
    assert sorted(positions(all_of(table, 1))) == [(0, at) for at in range(20)]
    assert table.book.reports()[0].repeated == 5


def test_give_back_joins_neighbours() -> None:
    table = Table(plan(20), (0,))
    table.given(0)
    table.given(1)
    for client in (10, 11):
        table.book.give_back(GiveBack(1, NAME, 0, (0, 0)), client)
    assert span(table.given(0, speed=1.0, seen=9)) == (0, 0, 15)


# --- batches by speed -----------------------------------------------------------------------------


def test_take_adaptive_batch_follows_the_speed_of_the_ranks_that_are_there() -> None:
    table = Table(plan(10_000, batch=20, low=2, high=35))
    assert table.given(0).batch == table.given(1).batch == 20
    assert table.given(0, speed=300.0).batch == 20
    assert table.given(1, speed=100.0).batch == 10
    assert table.given(0, speed=300.0).batch == 30
    table.ranks = (1,)
    assert table.given(1, speed=100.0).batch == 20


# --- bad input ------------------------------------------------------------------------------------


def test_take_other_plan_is_refused_and_names_both() -> None:
    table = Table(plan())
    table.given(0)
    with pytest.raises(ParamServeError, match=r"rank 1 .*batch=6, .* known: .*batch=5") as caught:
        table.ask(1, plan=plan(batch=6))
    assert caught.value.applied == "no"
    assert table.given(1).start == 10


@each_case(
    "changes",
    [
        {"size": 0},
        {"epochs": 0},
        {"steps": -1},
        {"batch": 0},
        {"low": 0},
        {"low": 6},
        {"batches_per_step": -2},
    ],
)
def test_take_impossible_plan_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ParamServeError, match="impossible"):
        Table(plan()).ask(0, plan=structs.replace(PLAN, **changes))


@each_case("options", [{"speed": math.nan}, {"speed": -1.0}, {"turn": -1}])
def test_take_impossible_question_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ParamServeError, match="impossible"):
        Table(plan()).ask(0, **options)


def test_take_limits_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(plan())
    with pytest.raises(Overloaded, match="at most 64 turns"):
        table.ask(0, turn=64)
    monkeypatch.setattr(module, "LOADERS_MAX", 1)
    table.given(0)
    with pytest.raises(Overloaded, match="1 others"):
        table.book.take(Lease(3, "two", PLAN, 0, 0, 1.0), 10, 0, (0,), 2)


def test_turns_that_are_over_are_forgotten() -> None:
    table = Table(plan(5))
    for turn in range(200):
        assert len(all_of(table, turn=turn)) == 1
    assert table.book.reports()[0].ranks == ((0, 1000, 1000),)


def test_wrong_marks_do_no_harm() -> None:
    table = Table(plan(10), (0,))
    mine = table.given(0)
    for mark in [(mine.lease + 50, 3), (0, 0), (-1, 5)]:
        table.report(0, {0: mark, 7: (mine.lease, 5)})
        table.book.give_back(GiveBack(1, "other", 0, mark), 10)
        table.book.give_back(GiveBack(1, NAME, 9, mark), 10)
    table.report(0, {0: (mine.lease, 10_000)})
    assert table.book.reports()[0].ranks == ((0, 10, 10),)


# --- any order of events --------------------------------------------------------------------------

Piece = tuple[int, int, int, tuple[int, int]]
"""Epoch, start, stop and mark of a batch."""


@dataclass
class Client:
    """A worker's process. `sent`: steps, in order; `reached`: how many are in each shard's values.

    Sync: `arrived`: how many each shard has had; `decided`: how many are decided.
    """

    id: int
    rank: int
    reached: list[int]
    drawn: deque[Piece] = field(default_factory=deque)
    sent: list[list[Piece]] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    decided: int = 0
    seen: int = 0
    over: bool = False
    dead: int | None = None

    def undone(self) -> bool:
        return any(count < len(self.sent) for count in self.reached)


class World:
    """Workers and shards that do everything in any order, and an account of every sample.

    In Sync a step is held by each shard, decided once all have it, and committed by each shard
    later; one that cannot come to all any more is dropped. In Async each shard applies on its own.
    Nothing comes from a dead client to a shard that knows it.
    """

    def __init__(self, seed: int, *, sync: bool) -> None:
        self.dice = dice = random.Random(seed)
        self.sync = sync
        self.shards = dice.randint(1, 3)
        self.batches_per_step = dice.choice((1, 1, 1, 2))
        batch = dice.randint(1, 7)
        self.plan = plan(
            dice.randint(batch, 30),
            epochs=dice.randint(1, 2),
            batch=batch,
            low=dice.randint(1, batch),
            high=batch + dice.randint(0, 5),
            batches_per_step=self.batches_per_step,
        )
        self.book = LeaseBook()
        self.number = 1
        self.next_client = 1
        self.workers: dict[int, Client] = {}
        self.all: list[Client] = []
        self.known = [1] * self.shards
        """The membership that each shard knows."""
        self.applied: list[Counter[tuple[int, int]]] = [Counter() for _ in range(self.shards)]
        self.beats = [ServerBeat(shard, (), members=1) for shard in range(self.shards)]
        for rank in range(dice.randint(1, 4)):
            self.join(rank)

    def join(self, rank: int) -> None:
        client = Client(self.next_client, rank, [0] * self.shards, arrived=[0] * self.shards)
        self.next_client += 1
        self.workers[rank] = client
        self.all.append(client)
        self.member_change()

    def member_change(self) -> None:
        self.number += 1
        living = {client.id for client in self.workers.values()}
        self.book.changed(living, self.number)

    def die(self, rank: int) -> None:
        client = self.workers.pop(rank)
        self.number += 1
        client.dead = self.number
        self.book.changed({each.id for each in self.workers.values()}, self.number)

    def ask(self, client: Client) -> None:
        idle = len(client.drawn) < self.batches_per_step and not client.undone()
        idle = idle and self.dice.random() < 0.8
        taken = client.sent[-1][-1][3] if idle and client.sent else None
        speed = self.dice.choice((0.0, 1.0, 9.0)) * (client.rank + 1)
        message = Lease(1, NAME, self.plan, 0, client.seen, 0.0, speed, idle, taken)
        reply = self.book.take(message, client.id, client.rank, sorted(self.workers), 2)
        if reply is None:
            return
        client.over = reply.over
        if not reply.lease or self.dice.random() < 0.1:  # or the reply was lost
            return
        client.seen = reply.lease
        for start in range(reply.start, reply.stop, reply.batch):
            stop = min(start + reply.batch, reply.stop)
            mark = (reply.lease, stop - reply.start)
            client.drawn.append((reply.epoch, start, stop, mark))

    def send(self, client: Client) -> None:
        if len(client.drawn) >= self.batches_per_step:
            step = [client.drawn.popleft() for _ in range(self.batches_per_step)]
            client.sent.append(step)

    def give_back(self, client: Client) -> None:
        client.drawn.clear()
        mark = client.sent[-1][-1][3] if client.sent else (0, 0)
        self.book.give_back(GiveBack(1, NAME, 0, mark), client.id)

    def move(self, shard: int, client: Client) -> None:
        """One shard goes on with one client's next step, if it may."""
        step = client.reached[shard]
        if self.sync:
            self.collect(shard, client)
            if step == client.decided:
                return
        elif step == len(client.sent) or self.fenced(shard, client):
            return
        client.reached[shard] += 1
        for epoch, start, stop, _ in client.sent[step]:
            self.applied[shard].update((epoch, at) for at in range(start, stop))

    def fenced(self, shard: int, client: Client) -> bool:
        return client.dead is not None and self.known[shard] >= client.dead

    def collect(self, shard: int, client: Client) -> None:
        """Sync: a step arrives, is decided by the lead, or is dropped."""
        arrived, decided = client.arrived, client.decided
        if self.dice.random() < 0.5 and not self.fenced(shard, client):
            arrived[shard] = min(arrived[shard] + 1, len(client.sent))
        elif min(arrived) > decided:
            client.decided += self.dice.random() < 0.5
        elif any(arrived[s] == decided and self.fenced(s, client) for s in range(self.shards)):
            arrived[shard] = decided

    def beat(self, shard: int) -> None:
        marks, held = [], []
        for client in self.all:
            step = client.reached[shard]
            if step:
                marks.append((client.id, *client.sent[step - 1][-1][3]))
            if self.sync and step < client.arrived[shard]:
                held.append((client.rank, client.id))
        report = GroupReport("m", 0, (), 0, (), tuple(held), marks=tuple(marks))
        self.beats[shard] = ServerBeat(shard, (report,), members=self.known[shard])
        self.book.reported(self.beats)

    def learn(self, shard: int) -> None:
        """A shard hears of the membership."""
        self.known[shard] = self.number

    def event(self, *, calm: bool) -> None:
        dice = self.dice
        shard = dice.randrange(self.shards)
        kind = dice.random()
        if kind < 0.03 and not calm and len(self.workers) > 1:
            self.die(dice.choice(sorted(self.workers)))
        elif kind < 0.05 and not calm and len(self.workers) < 5:
            gone = set(range(5)) - set(self.workers)
            self.join(dice.choice(sorted(gone)))
        elif kind < 0.07 and not calm:
            self.give_back(self.workers[dice.choice(sorted(self.workers))])
        elif kind < 0.3:
            self.ask(self.workers[dice.choice(sorted(self.workers))])
        elif kind < 0.55:
            self.send(self.workers[dice.choice(sorted(self.workers))])
        elif kind < 0.85:
            self.move(shard, dice.choice(self.all))
        elif kind < 0.93:
            self.beat(shard)
        else:
            self.learn(shard)

    def run(self) -> None:
        for _ in range(self.dice.randint(0, 200)):
            self.event(calm=False)
        for _ in range(20_000):
            if all(client.over for client in self.workers.values()):
                return
            self.event(calm=True)
        raise AssertionError("the turn does not end")

    def check(self) -> None:
        (report,) = self.book.reports()
        wanted = {(e, at) for e in range(self.plan.epochs) for at in range(self.plan.size)}
        for applied in self.applied:
            assert len(wanted) - len(applied) <= report.left_over
            assert set(applied) <= wanted
            if self.sync:
                assert set(applied.values()) <= {1}
                assert len(applied) + report.left_over == len(wanted)
        finished = sum(done for _, _, done in report.ranks)
        assert finished + report.left_over == len(wanted)
        assert report.repeated == self.partly_applied()
        if self.batches_per_step == 1:
            assert report.left_over == 0

    def partly_applied(self) -> int:
        """Samples of ended clients that some shards have had from them, and others have not."""
        count = 0
        for client in self.all:
            if client.dead is not None:
                for step in client.sent[min(client.reached) : max(client.reached)]:
                    count += sum(stop - start for _, start, stop, _ in step)
        return count


@each_case("sync", [True, False], ids=["sync", "async"])
@each_case("part", range(50))
def test_any_order_of_events_shares_every_sample(sync: bool, part: int) -> None:
    for seed in range(part * 20, part * 20 + 20):
        world = World(seed, sync=sync)
        try:
            world.run()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, sync {sync}: {error}") from error
