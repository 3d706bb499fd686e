"""Steps with leased batches: which samples a step says that it has taken, also where it is one of
several own steps between two exchanges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.pytorch.test_loader_leased import (
    DYNAMIC,
    SEED,
    FakeCluster,
    FakeOwnSteps,
    alone,
    samples,
    tensors,
    train,
)

from paramserve.messages import LeasePlan
from paramserve.pytorch.batches import order
from paramserve.pytorch.loader import load, sampler
from paramserve.training.leases import LeasedWork

# --- own steps between two exchanges --------------------------------------------------------------


@pytest.mark.parametrize("make", [load, sampler])
def test_step_without_a_told_number_takes_what_the_optimizers_policy_says(make: Any) -> None:
    worker = alone()
    batches = make(worker, tensors(40), batch_size=5, **DYNAMIC)
    own = FakeOwnSteps(worker, every=3)  # adopted after the loader was made
    for _ in batches:
        own.step()
    assert worker.client.marks == [(1, 15), (1, 30), (2, 10)]
    assert worker.client.weights == [15.0, 15.0, 10.0]


@pytest.mark.parametrize("make", [load, sampler])
def test_own_steps_that_are_left_are_exchanged_before_the_turn_ends(make: Any) -> None:
    worker = alone()
    batches = make(worker, tensors(20), batch_size=5, epochs=2, **DYNAMIC)
    own = FakeOwnSteps(worker, every=3)
    for _ in batches:
        own.step()
    assert worker.events[-4:] == ["exchange", "drain", "suspend model", "idle"]
    (report,) = worker.client.control.cluster.book.reports()
    assert (report.ranks, report.left_over) == (((0, 40, 40),), 0)


def test_own_steps_of_a_worker_that_retires_are_exchanged_before_it_gives_back() -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    own = FakeOwnSteps(one, every=3)
    two.optimizers.batches_per_step = 3
    found = []
    for (batch,) in load(one, tensors(40), batch_size=5, **DYNAMIC):
        found.append(batch.tolist())
        own.step()
        one.client.retiring = len(found) == 2
    assert one.client.marks == [(1, 10)]
    cluster.meanwhile = lambda: cluster.book._finished(10, (1, 10))
    rest = train(two, load(two, tensors(40), batch_size=5, **DYNAMIC))
    assert samples(found + rest) == Counter(range(40))


@pytest.mark.parametrize("make", [load, sampler])
@pytest.mark.parametrize("then", ["the run ends", "another loader", "it goes on"])
def test_own_steps_of_a_loop_that_is_left_are_not_given_back(make: Any, then: str) -> None:
    cluster = FakeCluster(2)
    one, two = cluster.workers
    own = FakeOwnSteps(one, every=3)
    two.optimizers.batches_per_step = 3
    batches = make(one, tensors(40), batch_size=5, **DYNAMIC)
    loop = iter(batches)
    for _ in range(4):
        next(loop)
        own.step()
    next(loop)  # and no step with this one
    loop.close()
    assert one.client.marks == [(1, 15)]
    if then == "the run ends":
        own.settle()
        one.optimizers.finish()
    else:
        next(
            iter(
                batches if then == "it goes on" else load(one, tensors(5), batch_size=5, **DYNAMIC)
            )
        )
    assert one.client.marks == [(1, 15), (1, 20)]
    if then == "the run ends":
        rest = train(two, load(two, tensors(40), batch_size=5, shuffle=True, **DYNAMIC))
        assert samples(rest) == Counter(order(40, SEED, 0)[20:].tolist())


@pytest.mark.parametrize("until_done", [False, True])
def test_own_steps_with_batches_that_were_drawn_ahead_count(until_done: bool) -> None:
    worker = alone()
    own = FakeOwnSteps(worker, every=3)
    mine = sampler(worker, tensors(10), batch_size=5, **DYNAMIC)  # they fill no step

    class DrawsAhead:
        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(mine))

    ahead = DrawsAhead()
    for _ in mine.until_done(ahead) if until_done else ahead:
        own.step()
    assert worker.events.count("idle") == until_done
    own.settle()  # as at the end of the run
    assert worker.client.marks == [(1, 10)]
    worker.optimizers.finish()
    assert worker.client.control.cluster.book.reports()[0].ranks == ((0, 10, 10),)


def test_scaled_own_steps_take_the_batches_that_they_were_made_with() -> None:
    """Though more were drawn ahead: were these taken too, they would be lost with the worker."""
    worker = alone()
    own = FakeOwnSteps(worker, every=3, count=2)
    mine = sampler(worker, tensors(40), batch_size=5, **DYNAMIC)
    loop = iter(mine)
    drawn = [next(loop) for _ in range(3)]
    for _ in drawn[:2]:
        own.step()
    assert worker.client.marks == [(1, 10)]
    assert worker.client.weights == [10.0]


# --- what a step says -----------------------------------------------------------------------------


def test_step_carries_the_mark_of_all_that_was_delivered() -> None:
    worker = alone()
    for i, _ in enumerate(load(worker, tensors(40), batch_size=5, batches_per_step=3, **DYNAMIC)):
        if i % 3 == 2:
            worker.client.train()
    # Leases of two steps, 30 samples, then the rest of the epoch; 2 batches fill no step.
    assert worker.client.marks == [(1, 15), (1, 30)]
    assert worker.client.weights == [15.0, 15.0]
    assert worker.leases.present is not None
    assert worker.leases.step_samples == 10.0


def test_step_of_a_second_optimizer_has_the_same_samples_and_no_mark() -> None:
    worker = alone()
    for _ in load(worker, tensors(7), batch_size=4, **DYNAMIC):
        worker.client.train()
        worker.client.train()
    assert worker.client.marks == [(1, 4), None, (1, 7), None]
    assert worker.client.weights == [4.0, 4.0, 3.0, 3.0]


def test_step_after_a_leased_loader_is_not_of_its_samples() -> None:
    worker = alone()
    train(worker, load(worker, tensors(8), batch_size=4, **DYNAMIC))
    worker.client.train()
    for _ in load(worker, tensors(8), batch_size=8):
        worker.client.train()
    assert worker.client.weights[2:] == [None, None]
    assert worker.client.marks[2:] == [None, None]


def test_speed_counts_own_compute_only() -> None:
    cluster = FakeCluster(1)
    (worker,) = cluster.workers
    now = [0.0]
    plan = LeasePlan(1000, 1, 0, 5, 5, 5, 1, SEED)
    work = LeasedWork(worker.leases, "w", plan, reports_delivery=False, clock=lambda: now[0])
    work.begin()
    speeds = []
    for compute_s, waited_s in [(9.0, 0.0), (0.5, 3.0), (0.5, 0.0), (1.0, 7.0)]:
        work.draw()
        now[0] += compute_s + waited_s
        worker.client.waited_s += waited_s
        worker.client.train()
        speeds.append(work.speed)
    # The first step begins at no known time; a step of 1 s counts 0.3.
    assert speeds == pytest.approx([0.0, 10.0, 10.0, 5 / (0.7 * 0.5 + 0.3 * 1.0)])


def test_adaptive_batches_go_by_the_speeds_that_steps_had() -> None:
    cluster = FakeCluster(2)
    now = [0.0]
    plan = LeasePlan(10_000, 1, 0, 20, 2, 100, 1, SEED)
    works = [
        LeasedWork(worker.leases, "w", plan, reports_delivery=False, clock=lambda: now[0])
        for worker in cluster.workers
    ]
    sizes: list[list[int]] = [[], []]
    for work in works:
        work.begin()
    for _ in range(30):
        for rank, work in enumerate(works):
            drawn = work.draw()
            assert drawn is not None
            sizes[rank].append(drawn.stop - drawn.start)
            now[0] += sizes[rank][-1] * (0.01, 0.03)[rank]
            for other in works:  # Sync: the other one waits meanwhile
                if other is not work:
                    other._client.waited_s += sizes[rank][-1] * (0.01, 0.03)[rank]
            cluster.workers[rank].client.train()
    assert sizes[0][0] == sizes[1][0] == 20
    assert (sizes[0][-1], sizes[1][-1]) == (30, 10)
