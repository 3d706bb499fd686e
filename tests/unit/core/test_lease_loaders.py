"""Workers change between two leased loaders: whatever the order, a cut knows what is done."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from tests.suites import each_case
from tests.unit.core.test_leases import plan

from paramserve.core import leases as module
from paramserve.core.leases import Grant, LeaseBook, LeasesRecord, Mark, Marks
from paramserve.messages import GiveBack, GroupReport, Lease, Leased, ServerBeat

Place = tuple[int, int, int]
"""Loader, epoch, position."""


@dataclass
class Client:
    """A worker's process. `steps`: mark and samples of each, in order; `reached`: how many are in
    each shard's values."""

    id: int
    rank: int
    reached: list[int]
    loader: int = 0
    drawn: list[tuple[Mark, list[Place]]] = field(default_factory=list)
    steps: list[tuple[Mark, list[Place]]] = field(default_factory=list)
    taken: dict[int, Mark] = field(default_factory=dict)
    turns: Counter[int] = field(default_factory=Counter)
    unsaid: dict[int, GiveBack] = field(default_factory=dict)
    """What was lost on its way, by loader: it is told again before more is asked for."""
    seen: int = 0
    dead: int | None = None


class TwoLoaders:
    """Async workers that step with samples of one of two loaders, leave it, and go on with the
    other one; a shard keeps the newest mark of each client."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.plans = [
            plan(dice.randint(5, 30), epochs=dice.randint(1, 2), batch=dice.randint(1, 5))
            for _ in range(2)
        ]
        self.shards = dice.randint(1, 3)
        self.known = [1] * self.shards
        self.beats = [ServerBeat(shard, (), members=1) for shard in range(self.shards)]
        self.book = LeaseBook()
        self.number = 1
        self.lost = False
        """Whether some message that gives back was."""
        self.clients: list[Client] = []
        self.living: list[Client] = []
        for rank in range(dice.randint(1, 3)):
            self.join(rank)

    def join(self, rank: int) -> None:
        client = Client(len(self.clients) + 1, rank, [0] * self.shards)
        self.clients.append(client)
        self.living.append(client)
        self.change()

    def change(self) -> None:
        self.number += 1
        self.book.changed({each.id for each in self.living}, self.number)

    def die(self, client: Client) -> None:
        self.living.remove(client)
        self.change()
        client.dead = self.number

    def leave(self, client: Client) -> None:
        """A loop is broken off."""
        client.drawn.clear()
        turn, mark = client.turns[client.loader], client.taken.get(client.loader, (0, 0))
        message = GiveBack(1, str(client.loader), turn, mark)
        if self.dice.random() < 0.05:
            client.unsaid[client.loader], self.lost = message, True
        else:
            self.book.give_back(message, client.id)
        client.loader = self.dice.randint(0, 1)

    def ask(self, client: Client) -> None:
        loader, turn = client.loader, client.turns[client.loader]
        if loader in client.unsaid:
            self.book.give_back(client.unsaid.pop(loader), client.id)
        idle = not client.drawn and client.reached == [len(client.steps)] * self.shards
        taken = client.taken.get(loader) if idle else None
        plan = self.plans[loader]
        message = Lease(1, str(loader), plan, turn, client.seen, 0.0, 0.0, idle, taken)
        ranks = sorted(each.rank for each in self.living)
        reply = self.book.take(message, client.id, client.rank, ranks, 2)
        if reply is not None and reply.over:
            client.turns[loader] += 1
            client.taken.pop(loader, None)
        elif reply is not None and reply.lease:
            self.draw(client, reply)

    def draw(self, client: Client, reply: Leased) -> None:
        client.seen = reply.lease
        for start in range(reply.start, reply.stop, reply.batch):
            stop = min(start + reply.batch, reply.stop)
            places = [(client.loader, reply.epoch, at) for at in range(start, stop)]
            client.drawn.append(((reply.lease, stop - reply.start), places))

    def step(self, client: Client) -> None:
        if client.drawn:
            client.steps.append(client.drawn.pop(0))
            client.taken[client.loader] = client.steps[-1][0]

    def apply(self, client: Client, shard: int) -> None:
        if client.dead is None or self.known[shard] < client.dead:
            client.reached[shard] = min(client.reached[shard] + 1, len(client.steps))

    def marks(self, shard: int) -> list[tuple[int, int, int]]:
        reached = [(each, each.reached[shard]) for each in self.clients if each.reached[shard]]
        return [(each.id, *each.steps[count - 1][0]) for each, count in reached]

    def beat(self, shard: int) -> None:
        report = GroupReport("m", 0, (), 0, (), marks=tuple(self.marks(shard)))
        self.beats[shard] = ServerBeat(shard, (report,), members=self.known[shard])
        self.book.reported(self.beats)

    def some(self, most: int) -> None:
        for _ in range(self.dice.randint(0, most)):
            self.event()

    def event(self) -> None:
        dice = self.dice
        kind, shard, client = dice.random(), dice.randrange(self.shards), dice.choice(self.living)
        if kind < 0.03 and len(self.living) > 1:
            self.die(client)
        elif kind < 0.05 and len(self.living) < 4:
            self.join(dice.choice(sorted({*range(4)} - {each.rank for each in self.living})))
        elif kind < 0.1:
            self.leave(client)
        elif kind < 0.35:
            self.ask(client)
        elif kind < 0.6:
            self.step(client)
        elif kind < 0.87:
            self.apply(dice.choice(self.clients), shard)
        elif kind < 0.95:
            self.beat(shard)
        else:
            self.known[shard] = self.number

    def cut(self) -> tuple[Marks, list[Client]]:
        """Every shard has the same steps of who lives; the marks, and the clients as of then."""
        for client in self.living:
            client.reached = [max(client.reached)] * self.shards
        return Marks([self.marks(shard) for shard in range(self.shards)]), copy.deepcopy(
            self.clients
        )

    def check(self, marks: Marks, clients: list[Client]) -> None:
        """What is to do after the cut is what was not done in it; where a message was lost, no
        less."""
        data = msgspec.msgpack.encode(self.book.record_at_cut(marks))
        record = msgspec.msgpack.decode(data, type=LeasesRecord)
        done = {at for c in clients for _, places in c.steps[: min(c.reached)] for at in places}
        for loader in record.loaders:
            size, samples = loader.plan.size, loader.samples
            epochs = -(-samples // size)
            for turn in loader.turns:
                every = range(turn.number * epochs * size, turn.number * epochs * size + samples)
                rest = turn.epoch * size + turn.position
                free = {*range(rest, rest + turn.fresh)}
                free |= {e * size + at for e, start, stop in turn.back for at in range(start, stop)}
                used = {e * size + at for each, e, at in done if each == int(loader.name)}
                missing, again = {*every} - used - free, free & used
                assert not missing, f"loader {loader.name} lacks {sorted(missing)}"
                assert self.lost or not again, f"loader {loader.name} has {sorted(again)} again"


def run(seed: int) -> None:
    world = TwoLoaders(seed)
    try:
        world.some(200)
        world.book.keep_past()
        world.some(60)
        cut = world.cut()
        world.some(100)
        world.check(*cut)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


@each_case("part", range(5))
def test_any_order_of_events_with_two_loaders_has_a_cut_of_what_is_done(part: int) -> None:
    for seed in range(part * 100, part * 100 + 100):
        run(seed)


def what_was_given_back_is_not_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark of another loader says nothing."""
    never = property(lambda grant: False, lambda grant, value: None)
    monkeypatch.setattr(Grant, "final", never, raising=False)


def all_marks_are_of_this_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark of another loader says that all older leases are done, also those that are open."""
    whole = Grant.reached
    monkeypatch.setattr(Grant, "reached", lambda grant, mark, own: whole(grant, mark, own=True))


def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is finished between the cut and the record is done in the cut."""
    monkeypatch.setattr(module.Leases, "_let_go", lambda turn, client, holder, grant: None)


@each_case("plant", [what_was_given_back_is_not_final, all_marks_are_of_this_turn, nothing_is_kept])
def test_bug_of_two_loaders_is_found(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(400):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail(f"{plant.__name__} was not found")
