"""Loader and sampler over leases: ranks take what they have the time for, and miss nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.pytorch.hosts import FakeOptimizers
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paramserve.client.loop_progress import LoopProgress
from paramserve.core.leases import LeaseBook
from paramserve.errors import CoordinatorGone, ParamServeError, Timeout, UnknownName
from paramserve.messages import GiveBack, Lease, Leased, LeasePlan, Ok
from paramserve.pytorch.batches import order
from paramserve.pytorch.loader import load, sampler
from paramserve.training.course import Course
from paramserve.training.leases import LeasedWork, Leases

SEED = 3
DYNAMIC: dict[str, Any] = {"shards": "dynamic"}


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def tensors(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class FakeCluster:
    """A coordinator without time: who would wait lets `meanwhile` happen, and asks again."""

    def __init__(self, workers: int = 2) -> None:
        self.book = LeaseBook()
        self.ranks = tuple(range(workers))
        self.workers = [FakeWorker(self, rank) for rank in self.ranks]
        self.meanwhile: Callable[[], None] = self.stuck
        self.gone = self.loses_posts = False
        self.given_back: list[str] = []

    def stuck(self) -> None:
        raise AssertionError("a rank waits, and nothing else will happen")


class FakeControl:
    def __init__(self, cluster: FakeCluster, worker: FakeWorker) -> None:
        self.cluster = cluster
        self.worker = worker

    def call(self, message: Any, kind: type, *, timeout_s: float, slack_s: float = 5.0) -> Any:
        book = self.cluster.book
        if self.cluster.gone or self.worker.dead:
            raise CoordinatorGone("gone", fix="none")
        if isinstance(message, GiveBack):
            self.cluster.given_back.append("called")
            book.give_back(message, self.worker.number)
            reply: Any = Ok(0)
        else:
            assert isinstance(message, Lease)
            self.worker.events.append("idle" if message.idle else "ask")
            found = self.take(message)
            if found is None and message.wait_s:
                self.cluster.meanwhile()
                found = self.take(message)
            reply = found if found is not None else Leased(0, holders=book.holders(message))
        assert isinstance(reply, kind)
        return reply

    def post(self, message: Any) -> int:
        self.cluster.given_back.append("posted")
        if self.cluster.gone or self.worker.dead:
            return 0
        if not self.cluster.loses_posts:
            self.cluster.book.give_back(message, self.worker.number)
        return 1

    def answer(self, number: int) -> Any:
        return None if self.cluster.loses_posts else Ok(number)

    def take(self, message: Lease) -> Leased | None:
        worker, ranks = self.worker, self.cluster.ranks
        return self.cluster.book.take(message, worker.number, worker.rank, ranks, len(ranks))


class FakeClient:
    """Counts what it is asked to do; a step is answered at once."""

    def __init__(self, cluster: FakeCluster, worker: FakeWorker) -> None:
        self.connection = self.steps = self
        self.control = FakeControl(cluster, worker)
        self._worker = worker
        self.next_mark: Callable[[], tuple[int, int] | None] | None = None
        self.before, self.restarts, self.added_late, self.epochs = 0, False, False, 0
        self.incarnation, self.rank, self.workers = 1, worker.rank, len(cluster.ranks)
        self.pending = False
        self.retiring = False
        self.missed_by: dict[str, int] = {}
        self.clocks: dict[str, int] = {}
        self.loop = LoopProgress()
        self.waited_s = 0.0
        self.patience_s = 60.0
        self.waits = self
        self.marks: list[tuple[int, int] | None] = []
        self.weights: list[float | None] = []

    def drain(self) -> None:
        self._worker.events.append("drain")

    def rest(self, group: str) -> None:
        self._worker.events.append(f"suspend {group}")
        if group == "unknown":
            raise UnknownName("nothing defined", fix="define it")

    def enter(self, group: str) -> bool:
        """Whether this rank was pending; it has joined."""
        if group == "unknown":
            raise UnknownName("nothing defined", fix="define it")
        self._worker.events.append(f"join {group}")
        return self.pending

    def train(self) -> None:
        """As `worker.optimizer` does: the weight is asked for before the step is sent."""
        self.weights.append(self._worker.leases.step_samples)
        self.marks.append(self.next_mark() if self.next_mark is not None else None)


class FakeWorker:
    def __init__(self, cluster: FakeCluster, rank: int) -> None:
        self.rank = rank
        self.number = rank + 10
        """Of its client."""
        self.dead = False
        self.seed = SEED
        self.events: list[str] = []
        self.client = FakeClient(cluster, self)
        client: Any = self.client
        self.optimizers: Any = FakeOptimizers(client)
        self.optimizers.refresh_by(lambda: self.events.append("refresh"))
        self.leases = Leases(client, self.optimizers)
        self.workers = len(cluster.ranks)
        self.course = Course(client, self.optimizers)
        self.passes: Any = {}
        self.compare_size = lambda arguments, size: None
        self.trains_alone = False
        self.go_on_drawing = lambda: None
        self.loop_with_gradients = lambda: None

    @property
    def retiring(self) -> bool:
        return self.client.retiring

    @property
    def incarnation(self) -> int:
        return self.client.incarnation


class FakeOwnSteps:
    """An optimizer of `ps.LocalSteps(every)`: an exchange is a step of the worker's client.

    `count`: own steps before one, where they are scaled by the worker's speed.
    """

    def __init__(self, worker: FakeWorker, every: int, count: int | None = None) -> None:
        self.worker = worker
        self.every = worker.optimizers.batches_per_step = every
        self.count = count if count is not None else every
        self.since = 0
        worker.optimizers.step_alone(self)

    def step(self) -> None:
        self.since += 1
        if self.since == self.count:
            self.settle()

    def settle(self) -> None:
        if self.since:
            self.worker.events.append("exchange")
            self.worker.client.train()
            self.since = 0


def alone() -> FakeWorker:
    return FakeCluster(workers=1).workers[0]


def train(worker: FakeWorker, batches: Any, *, steps: int | None = None) -> list[list[int]]:
    """The samples of each batch; each is stepped with."""
    found = []
    for batch in islice(batches, steps):
        (batch,) = batch if isinstance(batch, list) else (batch,)
        found.append(batch.tolist())
        worker.client.train()
    return found


def in_turns(cluster: FakeCluster, loops: list[Iterator[list[int]]]) -> list[list[int]]:
    """All batches of all ranks, one after the other. Who waits lets the others work."""
    found: list[list[int]] = []
    running = dict(enumerate(loops))
    busy: list[int] = []

    def go_on(rank: int) -> None:
        busy.append(rank)
        batch = next(running[rank], None)
        busy.remove(rank)
        if batch is None:
            del running[rank]
        else:
            found.append(batch)

    def meanwhile() -> None:
        for rank in list(running):
            if rank in running and rank not in busy:
                go_on(rank)

    cluster.meanwhile = meanwhile
    while running:
        for rank in list(running):
            if rank in running:
                go_on(rank)
    return found


def stepping(worker: FakeWorker, loader: Any) -> Iterator[list[int]]:
    for batch in loader:
        (batch,) = batch if isinstance(batch, list) else (batch,)
        yield batch.tolist()
        worker.client.train()


def samples(batches: list[list[int]]) -> Counter[int]:
    return Counter(i for batch in batches for i in batch)


# --- loader ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tensors, Numbers])
@pytest.mark.parametrize(("size", "workers", "batch"), [(60, 3, 5), (61, 2, 7), (5, 4, 2)])
def test_leased_every_sample_comes_once_an_epoch(make, size, workers, batch) -> None:
    cluster = FakeCluster(workers)
    loops = [
        stepping(worker, load(worker, make(size), batch_size=batch, epochs=3, **DYNAMIC))
        for worker in cluster.workers
    ]
    found = in_turns(cluster, loops)
    assert samples(found) == Counter(dict.fromkeys(range(size), 3))
    assert all(len(one) <= batch for one in found)


def test_leased_order_is_the_common_one() -> None:
    worker = alone()
    found = train(worker, load(worker, tensors(20), batch_size=5, epochs=2, **DYNAMIC))
    joined = [i for batch in found for i in batch]
    assert joined == [*order(20, SEED, 0).tolist(), *order(20, SEED, 1).tolist()]
    plain = train(worker, load(worker, tensors(6), batch_size=4, shuffle=False, **DYNAMIC))
    assert plain == [[0, 1, 2, 3], [4, 5]]


def test_leased_steps_are_the_mean_of_all_ranks() -> None:
    cluster = FakeCluster(2)
    loops = [
        stepping(worker, load(worker, tensors(20), batch_size=4, steps=7, **DYNAMIC))
        for worker in cluster.workers
    ]
    assert sum(samples(in_turns(cluster, loops)).values()) == 2 * 7 * 4


def test_leased_batches_are_what_a_dataloader_gives() -> None:
    worker = alone()
    (got,) = load(worker, tensors(8), batch_size=8, shuffle=False, **DYNAMIC)
    (expected,) = DataLoader(tensors(8), batch_size=8)
    assert type(got) is type(expected)
    assert torch.equal(got[0], expected[0])
    assert list(load(worker, Numbers(8), batch_size=4, collate_fn=len, **DYNAMIC)) == [4, 4]


def test_leased_worker_process_loads_ahead_and_marks_what_was_delivered() -> None:
    worker = alone()
    loader = load(worker, Numbers(12), batch_size=4, num_workers=1, shuffle=False, **DYNAMIC)
    assert train(worker, loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert worker.client.marks == [(1, 4), (1, 8), (2, 4)]


def test_leased_iterated_again_goes_on_with_the_next_epochs() -> None:
    worker = alone()
    loader = load(worker, tensors(20), batch_size=5, **DYNAMIC)
    found = [train(worker, loader) for _ in range(3)]
    for epoch, part in enumerate(found):
        assert [i for batch in part for i in batch] == order(20, SEED, epoch).tolist()


def test_leased_restarted_worker_finds_what_was_done() -> None:
    cluster = FakeCluster(1)
    (worker,) = cluster.workers
    train(worker, load(worker, tensors(20), batch_size=5, **DYNAMIC))
    again = FakeWorker(cluster, 0)
    loader = load(again, tensors(20), batch_size=5, **DYNAMIC)
    assert train(again, loader) == []
    assert len(train(again, loader)) == 4


def test_leased_loop_that_is_left_gives_the_rest_to_others() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    first = train(one, load(one, tensors(40), batch_size=5, **DYNAMIC), steps=1)
    loader = load(two, tensors(40), batch_size=5, **DYNAMIC)
    cluster.meanwhile = lambda: cluster.book._finished(10, (1, 5))
    assert samples(first + train(two, loader)) == Counter(range(40))


def test_leased_worker_that_ends_tells_how_far_it_came_in_a_loop_that_it_left() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    loader = load(one, tensors(40), batch_size=5, **DYNAMIC)
    found = train(one, loader, steps=1)
    found += train(one, loader, steps=2)
    one.client.train()  # a last exchange, with nothing of the loader in it
    one.optimizers.finish()
    assert one.events[-2:] == ["drain", "idle"]
    assert cluster.book.reports()[0].ranks[0][2] == 15
    cluster.meanwhile = cluster.stuck
    found += train(two, load(two, tensors(40), batch_size=5, **DYNAMIC))
    assert samples(found) == Counter(range(40)), "it holds nothing any more"
    one.optimizers.finish()
    assert one.events[-2:] == ["drain", "idle"]


def test_leased_worker_that_ends_says_nothing_of_a_turn_that_is_over_or_was_not_stepped_with() -> (
    None
):
    worker = alone()
    train(worker, load(worker, tensors(40), batch_size=5, **DYNAMIC))
    train(worker, load(worker, tensors(40), batch_size=5, **DYNAMIC), steps=0)
    next(iter(load(worker, tensors(40), batch_size=5, **DYNAMIC)))
    told = list(worker.events)
    worker.optimizers.finish()
    assert worker.events == told


def test_leased_loop_that_was_left_can_go_on() -> None:
    worker = alone()
    loader = load(worker, tensors(40), batch_size=5, **DYNAMIC)
    first = train(worker, loader, steps=3)
    assert samples(first + train(worker, loader)) == Counter(range(40))


def test_leased_error_in_the_loop_is_not_hidden_where_the_coordinator_is_gone() -> None:
    cluster = FakeCluster(1)
    (worker,) = cluster.workers

    def fail() -> None:
        for _ in load(worker, tensors(40), batch_size=5, **DYNAMIC):
            cluster.gone = True
            raise KeyError

    with pytest.raises(KeyError):
        fail()


@pytest.mark.parametrize("lost", [False, True])
def test_leased_loop_that_is_left_waits_for_no_answer(lost: bool) -> None:
    """Its generator is released there: an interrupt would be lost. What the link has lost is told
    again before more is asked for."""
    cluster = FakeCluster(1)
    cluster.loses_posts = lost
    (worker,) = cluster.workers
    loader = load(worker, tensors(40), batch_size=5, **DYNAMIC)
    batches = iter(loader)
    first = next(batches)[0].tolist()
    worker.client.train()
    batches.close()
    assert cluster.given_back == ["posted"]
    assert samples([first, *train(worker, loader)]) == Counter(range(40))
    assert cluster.given_back == ["posted", *["called"] * lost]


class Killed(BaseException):
    """Ends a rank after one of its steps."""


def one_loop(worker: Any, **options: Any) -> Iterator[Any]:
    yield from load(worker, tensors(20), epochs=3, **options)


def steps_told(worker: Any, **options: Any) -> Iterator[Any]:
    yield from load(worker, tensors(20), steps=5 * 3, **{**options, "batch_size": 2})


def over_range(worker: Any, **options: Any) -> Iterator[Any]:
    loader = load(worker, tensors(20), **options)
    for _ in range(3):
        yield from loader


def over_range_anew(worker: Any, **options: Any) -> Iterator[Any]:
    dataset = tensors(20)
    for _ in range(3):
        yield from load(worker, dataset, **options)


def over_epochs(worker: Any, **options: Any) -> Iterator[Any]:
    loader = load(worker, tensors(20), **options)
    for _ in loader.epochs(3):
        yield from loader


def dying(cluster: FakeCluster, form: Any, optimizers: int, dies_after: int) -> list[list[int]]:
    """The batches of the steps of two ranks, of which the second is killed once after so many."""
    found: list[list[int]] = []

    def program(worker: FakeWorker) -> Iterator[None]:
        for made, (batch,) in enumerate(form(worker, batch_size=3, **DYNAMIC), 1):
            for _ in range(optimizers):  # the second one's step is with the same batch
                worker.client.train()
            found.append(batch.tolist())
            if (worker.rank, worker.incarnation, made) == (1, 1, dies_after):
                worker.dead = True
                raise Killed
            yield

    def again(dead: FakeWorker) -> Iterator[list[int]]:
        worker = FakeWorker(cluster, dead.rank)
        worker.number, worker.client.incarnation = dead.number + 10, 2
        cluster.book.changed([10, worker.number], 1)
        last = [mark for mark in dead.client.marks if mark is not None][-1]
        group = SimpleNamespace(marks=[(dead.number, *last)], held=[])
        cluster.book.reported([SimpleNamespace(groups=[group], members=1)])
        yield from over_program(worker)

    def over_program(worker: FakeWorker) -> Iterator[list[int]]:
        try:
            for _ in program(worker):
                yield []
        except Killed:
            yield from again(worker)

    in_turns(cluster, [over_program(worker) for worker in cluster.workers])
    return found


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("form", [one_loop, steps_told, over_range, over_range_anew, over_epochs])
def test_leased_loop_whose_rank_is_killed_takes_every_sample_once(
    form: Any, optimizers: int
) -> None:
    """In every form of loop, wherever it dies."""
    for dies_after in range(1, 10):
        found = dying(FakeCluster(2), form, optimizers, dies_after)
        assert samples(found) == Counter(dict.fromkeys(range(20), 3)), dies_after


def test_leased_retiring_worker_ends_and_gives_back() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    found = []
    for (batch,) in load(one, tensors(40), batch_size=5, **DYNAMIC):
        found.append(batch.tolist())
        one.client.train()
        one.client.retiring = True
    assert len(found) == 1
    cluster.meanwhile = lambda: cluster.book._finished(10, (1, 5))
    rest = train(two, load(two, tensors(40), batch_size=5, **DYNAMIC))
    assert samples(found + rest) == Counter(range(40))
    assert train(one, load(one, tensors(40), batch_size=5, name="x", **DYNAMIC)) == []


def test_leased_idle_rank_suspends_its_membership_before_it_waits() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    one.optimizers.groups = ("model", "unknown", "second")
    loops = [
        stepping(worker, load(worker, tensors(10), batch_size=5, **DYNAMIC))
        for worker in cluster.workers
    ]
    in_turns(cluster, loops)
    joins = ["join model", "join second"]
    suspends = ["drain", "suspend model", "suspend unknown", "suspend second"]
    assert one.events[:9] == [*joins, "ask", "ask", *suspends, "idle"]
    assert two.events.count("drain") <= 1


def test_leased_worker_that_was_pending_takes_the_present_values() -> None:
    cluster = FakeCluster(1)
    (one,) = cluster.workers
    one.client.pending = True
    for _ in load(one, tensors(5), batch_size=5, **DYNAMIC):
        one.client.train()
    assert one.events[:2] == ["join model", "refresh"]


def test_leased_idle_rank_takes_what_comes_back() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    theirs = iter(load(two, tensors(20), batch_size=5, **DYNAMIC))
    next(theirs)
    cluster.meanwhile = lambda: theirs.close()
    found = train(one, load(one, tensors(20), batch_size=5, **DYNAMIC))
    assert samples(found) == Counter(range(20))


def test_leased_holder_that_does_not_go_on_is_named() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    theirs = iter(load(two, tensors(40), batch_size=5, **DYNAMIC))
    for _ in range(2):  # a step with one of two batches: it goes on once
        next(theirs)
    now = [0.0]
    plan = LeasePlan(40, 1, 0, 5, 5, 5, 1, SEED)
    work = LeasedWork(one.leases, "loader-1", plan, reports_delivery=False, clock=lambda: now[0])
    work.begin()
    while work.draw():
        one.client.train()

    def meanwhile() -> None:
        now[0] += 50.0
        if now[0] == 50.0:
            cluster.book._finished(11, (1, 5))

    cluster.meanwhile = meanwhile
    who = r"rank 0 waits .* rank 1 \(5 samples\) .*"
    knob = r"deadlines=ps\.Deadlines\(busy_s=\.\.\.\) of the engine or ps\.connect"
    told = rf"{who} for 50 s; it waits up to 60 s \(change it with {knob}\)$"
    with (
        pytest.warns(UserWarning, match=told) as said,
        pytest.raises(Timeout, match=rf"{who} for 100 s\. .*{knob}"),
    ):
        work.more()
    assert now[0] == 150.0
    assert len(said) == 1


def test_leased_two_loops_at_once_are_refused() -> None:
    worker = alone()
    first = load(worker, tensors(20), batch_size=5, **DYNAMIC)
    second = load(worker, tensors(20), batch_size=5, **DYNAMIC)
    loop = iter(first)
    next(loop)
    with pytest.raises(ParamServeError, match=r"loader-2.*loader-1"):
        next(iter(second))
    del loop
    assert len(train(worker, second)) == 4


# --- sampler for a DataLoader of your own ---------------------------------------------------------


def test_sampler_serves_a_dataloader_of_your_own() -> None:
    cluster = FakeCluster(2)
    loops = []
    for worker in cluster.workers:
        mine = sampler(worker, tensors(30), batch_size=4, epochs=2, **DYNAMIC)
        loops.append(stepping(worker, DataLoader(tensors(30), batch_sampler=mine)))
    assert samples(in_turns(cluster, loops)) == Counter(dict.fromkeys(range(30), 2))


@pytest.mark.parametrize("until_done", [False, True])
def test_sampler_that_draws_ahead_ends_when_nothing_is_left_and_goes_on(until_done: bool) -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    theirs = iter(load(two, tensors(20), batch_size=5, **DYNAMIC))
    next(theirs)
    mine = sampler(one, tensors(20), batch_size=5, **DYNAMIC)
    cluster.meanwhile = lambda: theirs.close()

    class DrawsAhead:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.tensor(batch) for batch in list(mine))

    ahead = DrawsAhead()
    found = train(one, mine.until_done(ahead) if until_done else ahead)
    if not until_done:
        assert len(found) == 2
        assert "drain" not in one.events
        found += train(one, ahead)
    assert samples(found) == Counter(range(20))
    assert one.client.marks == [(2, 5), (3, 5), (4, 5), (5, 5)]


def test_sampler_next_turn_does_not_begin_with_the_rest_of_the_last() -> None:
    worker = alone()
    mine = sampler(worker, tensors(15), batch_size=5, batches_per_step=2, shuffle=False, **DYNAMIC)
    for epoch in range(2):
        for i, batch in enumerate(mine):
            if i % 2:
                worker.client.train()
            assert batch == list(range(i * 5, i * 5 + 5))
        assert i == 2, epoch
    assert worker.client.marks == [(1, 10), (2, 10)]


def test_sampler_loop_that_is_left_gives_back() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    mine = sampler(one, tensors(40), batch_size=5, **DYNAMIC)
    found = train(one, DataLoader(tensors(40), batch_sampler=mine), steps=1)
    cluster.meanwhile = lambda: cluster.book._finished(10, (1, 5))
    found += train(two, load(two, tensors(40), batch_size=5, **DYNAMIC))
    assert samples(found) == Counter(range(40))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 12}, ValueError, "11 samples, less than one batch of 12"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 2.0}, TypeError, "batch_size"),
        ({"batch_size": 2, "epochs": 0}, ValueError, "epochs"),
        ({"batch_size": 2, "steps": 0}, ValueError, "steps"),
        ({"batch_size": 2, "batches_per_step": True}, TypeError, "batches_per_step"),
        ({"batch_size": 2, "name": ""}, TypeError, "name"),
        ({"batch_size": 2, "name": 3}, TypeError, "name"),
        ({"batch_size": 2, "sampler": [1]}, TypeError, "sampler"),
        ({"batch_size": 2, "in_order": False}, ValueError, "in_order"),
        ({"batch_size": 2, "colour": "red"}, TypeError, "colour"),
        ({"batch_size": 2, "adaptive": (1, 4)}, TypeError, r"did you mean adaptive_batch\?"),
        ({"batch_size": 2, "adaptive_batch": (0, 4)}, ValueError, "smallest"),
        ({"batch_size": 2, "adaptive_batch": (3, 2)}, ValueError, r"\(3, 2\)"),
        ({"batch_size": 2, "adaptive_batch": (3, 9)}, ValueError, "batch_size=2"),
        ({"batch_size": 2, "adaptive_batch": (1, 4.0)}, TypeError, "largest"),
        ({"batch_size": 2, "adaptive_batch": (True, 4)}, TypeError, "smallest"),
        ({"batch_size": 2, "adaptive_batch": 4}, TypeError, "pair"),
        ({"batch_size": 2, "adaptive_batch": (1, 2, 3)}, TypeError, "pair"),
    ],
)
def test_leased_bad_option_is_refused_at_once(options, error, text) -> None:
    worker = FakeCluster(2).workers[0]
    with pytest.raises(error, match=text):
        load(worker, tensors(11), **DYNAMIC, **options)
    assert worker.events == []


def test_adaptive_batch_implies_dynamic() -> None:
    worker = alone()
    train(worker, load(worker, tensors(20), batch_size=5, adaptive_batch=(1, 9)))
    assert worker.client.marks[0] == (1, 5)


def test_sampler_bad_use_is_refused() -> None:
    worker = alone()
    with pytest.raises(TypeError, match="give batch_size"):
        sampler(worker, tensors(20), **DYNAMIC)
    with pytest.raises(TypeError, match=r"worker\.sampler got .* 'epoch': did you mean epochs\?"):
        sampler(worker, tensors(20), batch_size=4, epoch=2, **DYNAMIC)
    with pytest.raises(TypeError, match=r"'shufle': did you mean shuffle\?"):
        sampler(worker, tensors(20), shufle=False)
    with pytest.raises(TypeError, match=r"batch_size, epochs goes with"):
        sampler(worker, tensors(20), batch_size=2, epochs=3)
    with pytest.raises(ValueError, match="static"):
        sampler(worker, tensors(20), shards="other")


def test_leased_other_plan_on_another_rank_is_refused() -> None:
    one, two = FakeCluster(2).workers
    train(one, load(one, tensors(20), batch_size=5, **DYNAMIC), steps=1)
    with pytest.raises(ParamServeError, match="rank 1 came with another plan"):
        next(iter(load(two, tensors(20), batch_size=4, **DYNAMIC)))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"epochs": 2}, 13),  # 2 x 100 samples for 2 workers in batches of 8: 12.5
        ({"steps": 7}, 7),
        ({"adaptive_batch": (4, 12)}, 7),
    ],
)
def test_length_is_an_equal_share_of_the_batches(plan: dict[str, Any], expected: int) -> None:
    cluster = FakeCluster(workers=2)
    how = {"batch_size": 8, "shards": "dynamic", **plan}
    loaders = [load(me, tensors(100), **how) for me in cluster.workers]
    drawn = sampler(cluster.workers[0], tensors(100), **how)
    assert [len(each) for each in loaders] == [expected] * 2
    assert len(DataLoader(tensors(100), batch_sampler=drawn)) == expected
    came = in_turns(
        cluster, [stepping(*each) for each in zip(cluster.workers, loaders, strict=True)]
    )
    slack = 0 if "adaptive_batch" not in plan else 2  # measured sizes: 4 to 12, about 8
    assert expected - slack <= len(came) / 2 <= expected + 1 + slack
