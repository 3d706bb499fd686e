"""Each rank's part of a dataset: disjoint, equally long, in an order that all agree on."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.pytorch.hosts import host
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paramserve.client.loop_progress import LoopProgress
from paramserve.consistency.built_in import LocalSteps, Sync
from paramserve.observe.history import History
from paramserve.pytorch.loader import load, sampler
from paramserve.worker import Worker


class Squares(Dataset[int]):
    """A dataset without tensors in memory: it is fetched one by one and collated."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index * index


class Endless(IterableDataset[int]):
    def __iter__(self):
        return iter(int, 1)


def worker(
    rank: int = 0, workers: int = 1, seed: int = 3, steps_before: int = 0, before: int = 0
) -> Any:
    """Args:
    before: workers of the checkpoint that the run has gone on from.
    """
    client: Any = SimpleNamespace(
        rank=rank,
        connection=SimpleNamespace(before=before, restarts=False, incarnation=1),
        steps=SimpleNamespace(loop=LoopProgress(), clocks={}, missed_by={}),
    )
    made = host(client, rank=rank, workers=workers, seed=seed)
    made.course.steps_left = steps_before
    return made


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size), torch.arange(size).float().view(-1, 1) / 2)


def indices(loader: Any) -> list[list[int]]:
    """The samples of each batch, for `numbers` and `Squares`."""
    return [
        (batch[0] if isinstance(batch, list) else batch.double().sqrt().long()).tolist()
        for batch in loader
    ]


@pytest.mark.parametrize("make", [numbers, Squares])
@pytest.mark.parametrize(("size", "workers", "batch"), [(60, 3, 5), (61, 2, 7), (47, 4, 11)])
def test_loader_ranks_are_disjoint_and_equally_long(make, size, workers, batch) -> None:
    parts = [
        indices(load(worker(rank, workers), make(size), batch_size=batch))
        for rank in range(workers)
    ]
    assert {len(part) for part in parts} == {size // (workers * batch)}
    assert all(len(one) == batch for part in parts for one in part)
    taken = [i for part in parts for one in part for i in one]
    assert len(set(taken)) == len(taken)


def test_loader_tensor_dataset_gives_what_a_dataloader_gives() -> None:
    dataset = numbers(20)
    (batch, *_) = load(worker(), dataset, batch_size=4, shuffle=False)
    (expected, *_) = DataLoader(dataset, batch_size=4)
    assert type(batch) is type(expected)
    for got, wanted in zip(batch, expected, strict=True):
        assert torch.equal(got, wanted)


def test_loader_joined_batches_do_not_depend_on_the_number_of_workers() -> None:
    def joined(workers: int) -> list[set[int]]:
        parts = [
            indices(load(worker(rank, workers), numbers(48), batch_size=12 // workers))
            for rank in range(workers)
        ]
        return [{i for one in step for i in one} for step in zip(*parts, strict=True)]

    assert joined(1) == joined(2) == joined(3)


def test_loader_order_depends_on_seed_and_epoch_only() -> None:
    def run(seed: int, epochs: int = 2) -> list[list[int]]:
        return indices(load(worker(0, 2, seed), numbers(40), batch_size=5, epochs=epochs))

    assert run(1) == run(1)
    assert run(1) != run(2)
    assert run(1)[:4] != run(1)[4:]
    assert run(1)[4:] != run(2)[:4]
    assert run(1, epochs=3)[:8] == run(1)


def test_loader_iterated_again_goes_on_with_the_next_epoch() -> None:
    whole = indices(load(worker(), numbers(40), batch_size=5, epochs=2))
    loader = load(worker(), numbers(40), batch_size=5)
    assert indices(loader) + indices(loader) == whole


@pytest.mark.parametrize(("steps", "epochs"), [(3, 1), (8, 1), (19, 1), (3, 5)])
def test_loader_steps_cut_or_add_epochs(steps, epochs) -> None:
    loader = load(worker(), numbers(40), batch_size=5, steps=steps, epochs=epochs)
    got = indices(loader)
    assert len(loader) == len(got) == steps
    assert got == indices(load(worker(), numbers(40), batch_size=5, epochs=5))[:steps]


def test_loader_without_shuffle_keeps_the_order() -> None:
    parts = [
        indices(load(worker(rank, 2), numbers(13), batch_size=3, shuffle=False))
        for rank in range(2)
    ]
    assert parts == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]


def test_loader_passes_options_to_the_dataloader() -> None:
    loader = load(worker(), numbers(8), batch_size=4, collate_fn=len)
    assert list(loader) == [4, 4]


def test_loader_worker_processes_give_the_same_batches() -> None:
    expected = indices(load(worker(), numbers(8), batch_size=4))
    assert indices(load(worker(), numbers(8), batch_size=4, num_workers=1)) == expected


# --- a worker that was started again --------------------------------------------------------------


class Counted(Squares):
    """Knows which samples were loaded."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [numbers, Squares])
def test_restart_yields_what_would_have_come_from_there_on(make) -> None:
    options: dict[str, Any] = {"batch_size": 5, "epochs": 3}
    whole = indices(load(worker(1, 2), make(80), **options))
    assert len(whole) == 24
    for clock in (0, 1, 7, 8, 9, 16, 23, 24, 30):
        again = worker(1, 2, steps_before=clock)
        assert indices(load(again, make(80), **options)) == whole[clock:], clock
        assert again.course.steps_left == max(0, clock - 24), clock


class Augmented(Squares):
    """Draws from the generators of Python, numpy and torch for each sample."""

    def __getitem__(self, index: int) -> Any:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(1))]
        return torch.tensor([super().__getitem__(index), *drawn], dtype=torch.float64)


def test_restart_finds_what_processes_of_the_loader_draw() -> None:
    options: dict[str, Any] = {"batch_size": 5, "num_workers": 1, "epochs": 2}

    def drawn(rank: int, steps_before: int = 0) -> torch.Tensor:
        me = worker(rank, 2, steps_before=steps_before)
        before = random.getstate()
        found = torch.stack([*load(me, Augmented(40), **options)])
        assert random.getstate() == before, "the worker's own generators are left alone"
        return found

    whole = drawn(1)
    assert torch.equal(drawn(1, steps_before=3), whole[3:])
    assert len(whole[..., 1:].unique()) == whole[..., 1:].numel(), "other numbers each time"
    assert not torch.isin(drawn(0)[..., 1:], whole[..., 1:]).any()


def test_restart_loads_nothing_that_it_leaves_out() -> None:
    dataset = Counted(40)
    batches = indices(load(worker(steps_before=6), dataset, batch_size=5))
    assert dataset.loaded == [i for one in batches for i in one]
    assert len(batches) == 2


@pytest.mark.parametrize("clock", [3, 8, 11, 16])
def test_restart_goes_on_in_the_right_pass_of_a_loader_that_is_iterated_again(clock: int) -> None:
    def passes(loader: Any) -> list[list[int]]:
        return indices(loader) + indices(loader) + indices(loader)

    whole = passes(load(worker(), numbers(40), batch_size=5))
    again = worker(steps_before=clock)
    assert passes(load(again, numbers(40), batch_size=5)) == whole[clock:]


def test_restart_goes_on_in_the_right_one_of_two_loaders() -> None:
    def both(me: Any) -> list[list[int]]:
        first = load(me, numbers(40), batch_size=5, steps=11)
        second = load(me, numbers(60), batch_size=5, epochs=2)
        return indices(first) + indices(second)

    assert both(worker(steps_before=14)) == both(worker())[14:]


def test_restart_evaluation_leaves_out_nothing() -> None:
    again = worker(steps_before=6)
    every = indices(load(worker(), numbers(40), batch_size=5))
    before = indices(load(again, numbers(40), batch_size=5, resume=False))
    training = indices(load(again, numbers(40), batch_size=5))
    after = indices(load(again, numbers(40), batch_size=5))
    assert (before, training, after) == (every, every[6:], every)


@pytest.mark.parametrize(("clock", "first"), [(1, 3), (2, 6), (3, 11), (4, 14)])
def test_restart_with_several_batches_to_a_step(clock: int, first: int) -> None:
    """8 batches in a pass are 2 steps of 3, and 2 that belong to no step."""

    def passes(me: Any) -> list[list[int]]:
        loader = load(me, numbers(40), batch_size=5, batches_per_step=3)
        return indices(loader) + indices(loader)

    assert passes(worker(steps_before=clock)) == passes(worker())[first:]


def test_restart_goes_by_the_policy_that_holds_when_the_iteration_begins() -> None:
    me = worker(steps_before=2)
    loader = load(me, numbers(40), batch_size=5)
    me.optimizers.batches_per_step = 3  # the optimizer is adopted after the loader was made
    assert indices(loader) == indices(load(worker(), numbers(40), batch_size=5))[6:]


def test_loader_that_is_made_before_the_optimizer_goes_by_the_optimizers_policy() -> None:
    policies = {"lm": LocalSteps(every=3)}
    client = SimpleNamespace(
        rank=0,
        connection=SimpleNamespace(workers=1, incarnation=2, restarts=False, before=0),
        saving=SimpleNamespace(
            older=lambda name: None, latest=lambda name: b"", ask=lambda name, function: None
        ),
        steps=SimpleNamespace(
            missed_by={},
            retiring=False,
            clocks={"model": 2, "lm": 2},
            loop=LoopProgress(),
            terms=lambda group: SimpleNamespace(policy=policies.get(group, Sync())),
        ),
    )
    me = Worker(client, seed=3)  # a fake
    loader = me.loader(numbers(40), batch_size=5)
    me.optimizers.adopt("lm", [], History(), lambda: None)
    assert indices(loader) == indices(load(worker(), numbers(40), batch_size=5))[6:]


# --- clocks that went on without this worker, and the wish that it ends ------------------------


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("batches_per_step", [1, 2])
@pytest.mark.parametrize("make", [numbers, Squares])
def test_missed_clocks_take_their_batches_along(make, batches_per_step: int, told: bool) -> None:
    whole = indices(load(worker(), make(40), batch_size=2, epochs=2))
    me = worker()
    missed = me.client.steps.missed_by
    missed["model"] = 7  # before this loop
    got = []
    options: dict[str, Any] = {"batches_per_step": batches_per_step} if told else {}
    loader = load(me, make(40), batch_size=2, epochs=2, **options)
    me.optimizers.batches_per_step = 5 if told else batches_per_step
    for i, batch in enumerate(loader):
        got += indices([batch])
        missed["model"] += {1: 1, 5: 3}.get(i, 0)
    n = batches_per_step
    assert got == whole[:2] + whole[2 + n : 6 + n] + whole[6 + 4 * n :]


def test_missed_more_clocks_than_are_left_end_the_loop() -> None:
    me = worker()
    got = 0
    for _ in load(me, numbers(40), batch_size=5):
        got += 1
        me.client.steps.missed_by["model"] = 100
    assert got == 1


def test_retiring_worker_gets_no_further_batch() -> None:
    me = worker()
    got = 0
    for _ in load(me, numbers(40), batch_size=5, epochs=3):
        got += 1
        me.retiring = got == 11
    assert got == 11


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 2, "shards": "some"}, ValueError, "static"),
        ({"batch_size": 2, "name": "x"}, ValueError, "name"),
        ({"batch_size": 2, "shards": "static", "adaptive_batch": (1, 4)}, ValueError, "dynamic"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": 2.5}, TypeError, "batch_size"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"batch_size": 2, "epochs": 0}, ValueError, "epochs"),
        ({"batch_size": 2, "steps": 0}, ValueError, "steps"),
        ({"batch_size": 2, "steps": "3"}, TypeError, "steps"),
        ({"batch_size": 2, "batches_per_step": 0}, ValueError, "batches_per_step"),
        ({"batch_size": 6}, ValueError, "need 12"),
        ({"batch_size": 2, "drop_last": False}, TypeError, "drop_last"),
        ({"batch_size": 2, "sampler": [1]}, TypeError, r"worker\.sampler"),
        ({"batch_size": 2, "colour": "red"}, TypeError, "unexpected keyword argument 'colour'$"),
        ({"batch_size": 2, "epoch": 3}, TypeError, r"'epoch': did you mean epochs\?$"),
        ({"batch_size": 2, "workers": 3}, TypeError, r"'workers': did you mean num_workers\?$"),
    ],
)
def test_loader_bad_option_is_refused_at_once(options, error, text) -> None:
    with pytest.raises(error, match=text):
        load(worker(0, 2), numbers(11), **options)


@pytest.mark.parametrize("dataset", [Endless(), iter([1, 2])], ids=["iterable", "iterator"])
def test_loader_dataset_without_length_is_refused(dataset) -> None:
    with pytest.raises(TypeError, match="no length"):
        load(worker(), dataset, batch_size=1)


def test_sampler_serves_a_dataloader_of_your_own() -> None:
    parts = []
    for rank in range(3):
        mine = sampler(worker(rank, 3), numbers(20))
        loader = DataLoader(numbers(20), batch_size=4, sampler=mine)
        first = indices(loader)
        second = indices(loader)
        assert second != first
        mine.set_epoch(0)
        assert indices(loader) == first
        assert indices(loader) == second
        parts.append(first)
        assert len(mine) == 6
    assert [len(one) for part in parts for one in part] == [4, 2] * 3
    assert len({i for part in parts for one in part for i in one}) == 18


def test_sampler_bad_use_is_refused() -> None:
    with pytest.raises(ValueError, match="2 samples for 3 workers"):
        sampler(worker(0, 3), numbers(2))
    with pytest.raises(ValueError, match="epoch"):
        sampler(worker(), numbers(2)).set_epoch(-1)


def test_loader_that_shares_alike_refuses_what_other_workers_had_begun() -> None:
    for before in (0, 2):
        load(worker(workers=2, before=before), numbers(40), batch_size=5)
    refused = worker(workers=2, steps_before=3, before=3)
    with pytest.raises(ValueError, match=r"of 3 workers with 2: .*dynamic.* resume=False"):
        load(refused, numbers(40), batch_size=5)
    anew = load(refused, numbers(40), batch_size=5, resume=False)
    assert indices(anew) == indices(load(worker(workers=2), numbers(40), batch_size=5))


# --- how far the loop is, for reports ------------------------------------------------------------


def test_loader_tells_how_much_of_its_loop_is_done() -> None:
    me = worker(steps_before=2)
    done = [me.client.steps.loop.done for _ in load(me, numbers(40), batch_size=10, epochs=2)]
    assert done == [each / 8 for each in range(2, 8)], "what a restart leaves out is done"
    assert me.client.steps.loop.done == 1.0


def test_evaluation_leaves_what_is_told_of_the_loop() -> None:
    me = worker()
    me.client.steps.loop.take_batch(1, 4)
    with torch.no_grad():
        for _ in load(me, numbers(40), batch_size=10):
            pass
    assert me.client.steps.loop.done == 0.25
