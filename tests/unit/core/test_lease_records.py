"""A lease book goes on from a checkpoint: every sample once, whatever happened around its cut."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.test_leases import (
    NAME,
    Table,
    World,
    all_of,
    mark_of,
    plan,
    positions,
    span,
    switched,
)

from paramserve.core import leases as module
from paramserve.core.leases import (
    Holding,
    LeaseBook,
    Leases,
    LeasesRecord,
    Mark,
    Marks,
    Span,
    joined,
    without,
)
from paramserve.errors import ParamServeError
from paramserve.messages import GiveBack, Leased, ServerBeat


def saved(
    book: LeaseBook, *marks: dict[int, Mark], begun: dict[int, Mark] | None = None
) -> LeaseBook:
    """The book as it is read again, with the marks of each shard's cut.

    Args:
        begun: marks of calls that are not over in it.
    """
    told = [[(client, *mark) for client, mark in each.items()] for each in marks]
    also = [[(client, *mark) for client, mark in (begun or {}).items()]]
    data = msgspec.msgpack.encode(book.record_at_cut(Marks(told, also)))
    book.keep_past(False)
    again = LeaseBook()
    again.restore(msgspec.msgpack.decode(data, type=LeasesRecord))
    return again


def test_without_leaves_what_is_in_none_of_the_others() -> None:
    spans = [Span(0, 0, 10), Span(1, 0, 10)]
    done = [Span(0, 2, 4), Span(0, 8, 12), Span(1, 0, 3), Span(1, 3, 10)]
    assert without(spans, done) == [Span(0, 0, 2), Span(0, 4, 8)]


def test_what_is_used_by_the_cut_is_not_given_again_and_all_else_is() -> None:
    table = Table(plan(40))
    first = table.given(0)
    table.report(0, {0: (first.lease, 5)})
    table.book.keep_past()
    second = table.given(1)
    marks = {10: (first.lease, 5), 11: (second.lease, 5)}
    table.report(0, {0: (first.lease, 10), 1: (second.lease, 10)})  # after the cut
    table.given(1)
    again = Table(table.plan, book=saved(table.book, marks))
    left = positions(all_of(again))
    used = {*range(first.start, first.start + 5), *range(second.start, second.start + 5)}
    assert sorted(at for _, at in left) == sorted(set(range(40)) - used)
    ((_, finished, _),) = [each for each in again.book.reports()[0].ranks if each[0] == 1][:1]
    assert finished >= 5


def places(spans: list[Span]) -> list[tuple[int, int]]:
    return sorted((epoch, at) for epoch, start, stop in spans for at in range(start, stop))


def test_without_and_joined_keep_each_position_once() -> None:
    """Of any spans; what is done may be so twice, and what is left is in order."""
    dice = random.Random(7)
    for _ in range(500):
        cuts = sorted(dice.sample(range(20), 2 * dice.randint(0, 5)))
        spans = [
            Span(epoch, *each)
            for epoch in (0, 1)
            for each in zip(cuts[::2], cuts[1::2], strict=True)
        ]
        dice.shuffle(spans)
        starts = [dice.randrange(20) for _ in range(dice.randint(0, 5))]
        done = [Span(dice.randint(0, 1), at, at + dice.randint(0, 6)) for at in starts]
        left = without(spans, done)
        assert places(left) == sorted({*places(spans)} - {*places(done)})
        assert places(joined(left)) == places(left)
        ends = [(each.epoch, each.stop) for each in joined(left)]
        assert not {*ends} & {(each.epoch, each.start) for each in joined(left)}


@each_case("begins", ["before", "after"])
@each_case("gave_back", [True, False])
def test_mark_of_another_loader_counts_in_a_cut(gave_back: bool, begins: str) -> None:
    """Whether the checkpoint begins before the worker has stepped, or after."""
    table, mark = switched(gave_back=gave_back)
    table.book.keep_past()
    if begins == "after":
        table.report(0, {0: mark})
        table.book.keep_past()
    again = Table(table.plan, book=saved(table.book, {10: mark}))
    used = 5 if gave_back else 0
    assert sorted(positions(all_of(again))) == [(0, at) for at in range(used, 20)]


def test_turn_that_ended_after_the_cut_is_open_again() -> None:
    table = Table(plan(10), ranks=(0,))
    table.book.keep_past()
    given = all_of(table)
    assert len(given) == 1
    assert table.ask(0, turn=0).over  # type: ignore[union-attr]
    again = Table(table.plan, ranks=(0,), book=saved(table.book, {10: (given[0].lease, 5)}))
    assert sorted(positions(all_of(again))) == [(0, at) for at in range(5, 10)]
    assert table.given(0, turn=1)


def test_what_was_given_back_is_not_used_by_a_later_mark() -> None:
    table = Table(plan(40))
    table.book.keep_past()
    first = table.given(0)
    table.book.give_back(GiveBack(1, NAME, 0, (first.lease, 5)), 10)
    theirs, later = table.given(1), table.given(0)
    again = Table(table.plan, book=saved(table.book, {10: (later.lease, 5)}))
    left = {at for _, at in positions(all_of(again))}
    assert left == set(range(40)) - {*range(5), *range(later.start, later.start + 5)}
    assert set(range(theirs.start, theirs.stop)) <= left


def begun(**changes: int) -> tuple[Table, Leased]:
    """A book that goes on from a cut in which rank 1 has begun a call with the second batch of its
    lease; and that."""
    table = Table(plan(40, **changes))
    table.book.keep_past()
    table.given(0)
    lease = table.given(1)
    unit = 5 * table.plan.batches_per_step
    marks, more = {11: (lease.lease, unit)}, {11: (lease.lease, 2 * unit)}
    again = Table(table.plan, book=saved(table.book, marks, marks, begun=more))
    return again, structs.replace(lease, start=lease.start + unit, stop=lease.start + 2 * unit)


@each_case("batches", [1, 2])
def test_rank_gets_what_it_has_begun_as_one_call(batches: int) -> None:
    table, call = begun(batches_per_step=batches)
    others = table.given(0)
    assert others.stop <= call.start or call.stop <= others.start
    own = table.given(1)
    assert span(own) == span(call)
    assert own.batch == 5
    table.finish(0, others)
    table.finish(1, own)
    assert sorted(positions([others, own, *all_of(table, 1)])) == [
        (0, at) for at in range(40) if not call.start - 5 * batches <= at < call.start
    ]


def test_turn_is_not_over_before_a_rank_has_what_it_has_begun() -> None:
    table, call = begun()
    found = [table.given(0)]
    while (reply := table.ask(0, idle=True, taken=mark_of(found))) is not None:
        found.append(reply)
    assert set(positions([call])).isdisjoint(positions(found))
    assert span(table.given(1)) == span(call)


def test_what_a_rank_has_begun_that_does_not_come_again_is_free() -> None:
    table, call = begun()
    table.ranks = (0,)
    assert set(positions([call])) <= set(positions(all_of(table)))


def test_rank_that_ends_again_gets_once_more_what_it_has_begun() -> None:
    table, call = begun()
    table.given(1)
    table.end(1, 1)
    table.report(1, {}, {})
    assert span(table.given(0)) != span(call)
    assert span(table.given(1)) == span(call)


@each_case("given", [False, True])
def test_next_cut_keeps_what_a_rank_has_begun_until_it_is_done(given: bool) -> None:
    table, call = begun()
    table.book.keep_past()
    own = table.given(1) if given else None
    again = Table(table.plan, book=saved(copy.deepcopy(table.book), {}, {}))
    assert span(again.given(1)) == span(call)
    if own is not None:
        done = {11: (own.lease, 5)}
        again = Table(table.plan, book=saved(table.book, done, done))
        assert set(positions([call])).isdisjoint(positions(all_of(again, 1)))


@each_case("follows", [False, True])
@each_case("ended", [False, True])
def test_longer_plan_of_a_run_that_goes_on_gives_what_it_has_more(
    ended: bool, follows: bool
) -> None:
    """Also in other batches; and also where a checkpoint is under way when it comes."""
    table = Table(plan(20), ranks=(0,))
    table.book.keep_past()
    given = all_of(table) if ended else [table.given(0)]
    if ended:
        assert table.ask(0).over  # type: ignore[union-attr]
    book = saved(table.book, {10: (given[-1].lease, given[-1].stop - given[-1].start)})
    book = book if ended else saved_again(book)
    if follows:
        book.keep_past()
    longer = plan(20, epochs=3, batch=4)
    again = Table(longer, ranks=(0,), book=book)
    if follows:
        again.given(0)
        again = Table(longer, ranks=(0,), book=saved(again.book, {}))
    left = positions(all_of(again))
    done = {at for one in given for at in range(one.start, one.stop)}
    expected = [(0, at) for at in range(20) if at not in done]
    expected += [(epoch, at) for epoch in (1, 2) for at in range(20)]
    assert sorted(left) == expected


def saved_again(book: LeaseBook) -> LeaseBook:
    """After a checkpoint of which nothing was made before the next one."""
    book.keep_past()
    return saved(book, {})


@each_case("changes", [{"size": 30}, {"order": 8}, {"epochs": 1}])
def test_other_plan_of_a_run_that_goes_on_is_refused(changes: dict[str, int]) -> None:
    table = Table(plan(20, epochs=2), ranks=(0,))
    table.book.keep_past()
    table.given(0)
    other = plan(**{"size": 20, "epochs": 2, **changes})
    with pytest.raises(ParamServeError, match=r"than a rank before|and a rank before"):
        Table(other, ranks=(0,), book=saved(table.book, {})).given(0)


class Interrupted(World):
    """Whose shards and lease book fall back to a checkpoint, with new workers."""

    def keep_past(self) -> None:
        self.book.keep_past()

    def cut(self) -> list[dict[int, Mark]]:
        """All shards execute what one of them has, as far as it comes to them; each one's marks
        then."""
        told: list[dict[int, Mark]] = [{} for _ in range(self.shards)]
        for client in self.all:
            for shard in range(self.shards):
                while client.reached[shard] < max(client.reached):
                    if not self.sync and self.fenced(shard, client):
                        break
                    for epoch, start, stop, _ in client.sent[client.reached[shard]]:
                        self.applied[shard].update((epoch, at) for at in range(start, stop))
                    client.reached[shard] += 1
                    client.arrived[shard] = max(client.arrived[shard], client.reached[shard])
                if client.reached[shard]:
                    told[shard][client.id] = client.sent[client.reached[shard] - 1][-1][3]
        self.in_cut = copy.deepcopy(self.applied)
        self.partly = self.partly_applied()
        return told

    def fall_back(self, marks: list[dict[int, Mark]]) -> None:
        self.book = saved(self.book, *marks)
        self.applied = self.in_cut
        self.workers, self.all = {}, []
        self.beats = [ServerBeat(shard, (), members=1) for shard in range(self.shards)]
        for rank in range(self.dice.randint(1, 4)):
            self.join(rank)

    def some(self, most: int) -> None:
        for _ in range(self.dice.randint(0, most)):
            self.event(calm=False)

    def check(self) -> None:
        (report,) = self.book.reports()
        wanted = {(e, at) for e in range(self.plan.epochs) for at in range(self.plan.size)}
        for applied in self.applied:
            assert len(wanted) - len(applied) <= report.left_over
            assert set(applied) <= wanted
            if self.sync:
                assert set(applied.values()) <= {1}
                assert len(applied) + report.left_over == len(wanted)
        assert sum(done for _, _, done in report.ranks) + report.left_over == len(wanted)
        assert report.repeated == self.partly + self.partly_applied()


def interrupted(seed: int, *, sync: bool) -> None:
    """Run one order of events with a checkpoint in it, and fall back to that."""
    world = Interrupted(seed, sync=sync)
    try:
        world.some(120)
        world.keep_past()
        world.some(30)
        marks = world.cut()
        world.some(120)
        world.fall_back(marks)
        world.run()
        world.check()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, sync {sync}: {error}") from error


@each_case("sync", [True, False], ids=["sync", "async"])
@each_case("part", range(5))
def test_any_order_of_events_around_a_cut_shares_every_sample(sync: bool, part: int) -> None:
    for seed in range(part * 40, part * 40 + 40):
        interrupted(seed, sync=sync)


def marks_of_after_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used is what the book knows when it is saved."""

    def latest(holdings: list[Holding], marks_of: Callable[[int], Mark]) -> Any:
        known = [(each.client, (each.grant.number, each.grant.done)) for each in holdings]
        return whole(
            holdings,
            lambda client: max(marks_of(client), *(mark for c, mark in known if c == client)),
        )

    whole = module._uses
    monkeypatch.setattr(module, "_uses", latest)


def finished_grants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes from the book before it is saved is done in the cut."""
    monkeypatch.setattr(Leases, "_let_go", lambda turn, client, holder, grant: None)


def turns_that_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that ends before the book is saved is over in the cut."""
    whole = LeaseBook.record_at_cut

    def record(book: LeaseBook, marks: Marks) -> LeasesRecord:
        book._past.turns.clear()
        return whole(book, marks)

    monkeypatch.setattr(LeaseBook, "record_at_cut", record)


def uses_of_before_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grant had done when the checkpoint began counts as used since."""
    whole = LeaseBook.record_at_cut

    def record(book: LeaseBook, marks: Marks) -> LeasesRecord:
        for turn in book._turns():
            for holder in turn.holders.values():
                for grant in holder.grants:
                    grant.before = 0
        return whole(book, marks)

    monkeypatch.setattr(LeaseBook, "record_at_cut", record)


@each_case(
    "plant",
    [
        marks_of_after_the_cut,
        finished_grants_are_forgotten,
        turns_that_end_are_forgotten,
        uses_of_before_count_again,
    ],
)
def test_bug_of_a_saved_lease_book_is_found(plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)  # type: ignore[operator]
    for seed in range(400):
        for sync in (True, False):
            try:
                interrupted(seed, sync=sync)
            except AssertionError:
                return
    pytest.fail(f"{plant} was not found")
