"""Whichever way epochs are written, each sample is used once in each: all of them, or those that
the documented rule leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.pytorch.test_loader import indices, numbers, worker
from tests.unit.pytorch.test_loader_leased import FakeCluster, in_turns, samples, stepping
from torch.utils.data import DataLoader, TensorDataset

from paramserve.pytorch.loader import load, sampler

Way = Callable[..., Iterator[list[int]]]


def epochs_told(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    yield from indices(load(me, data, epochs=epochs, **how))


def steps_told(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    one = len(load(worker(me.rank, me.workers), data, **how))
    yield from indices(load(me, data, steps=epochs * one, **how))


def iterated_again(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    loader = load(me, data, **how)
    for _ in range(epochs):
        yield from indices(loader)


def made_in_the_loop(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    for _ in range(epochs):
        yield from indices(load(me, data, **how))


def made_of_the_same_tensors(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    for _ in range(epochs):
        yield from indices(load(me, type(data)(*data.tensors), **how))


def made_beside_evaluation(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    other = numbers(len(data))
    for _ in range(epochs):
        yield from indices(load(me, data, **how))
        list(load(me, data, resume=False, **how))
        list(load(me, other, **how))


def sampler_in_the_loop(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    for _ in range(epochs):
        mine = sampler(me, data, shuffle=how["shuffle"])
        yield from indices(DataLoader(data, how["batch_size"], sampler=mine))


def sampler_without_set_epoch(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    mine = sampler(me, data, shuffle=how["shuffle"])
    for _ in range(epochs):
        yield from indices(DataLoader(data, how["batch_size"], sampler=mine))


def sampler_with_set_epoch(me: Any, data: Any, epochs: int, **how: Any) -> Iterator[list[int]]:
    mine = sampler(me, data, shuffle=how["shuffle"])
    loader = DataLoader(data, how["batch_size"], sampler=mine)
    for epoch in range(epochs):
        mine.set_epoch(epoch)
        yield from indices(loader)


LOADERS: tuple[Way, ...] = (
    epochs_told,
    steps_told,
    iterated_again,
    made_in_the_loop,
    made_of_the_same_tensors,
    made_beside_evaluation,
)
SAMPLERS: tuple[Way, ...] = (
    sampler_in_the_loop,
    sampler_without_set_epoch,
    sampler_with_set_epoch,
)
plans = st.fixed_dictionaries(
    {
        "size": st.integers(4, 40),
        "workers": st.integers(1, 4),
        "batch": st.integers(1, 6),
        "epochs": st.integers(1, 4),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 3),
    }
)
Plan = dict[str, Any]


def used(plan: Plan, way: Way) -> Counter[int]:
    """How often each sample came, on all ranks together."""
    data = numbers(plan["size"])
    found: Counter[int] = Counter()
    for rank in range(plan["workers"]):
        me = worker(rank, plan["workers"], plan["seed"])
        batches = way(me, data, plan["epochs"], batch_size=plan["batch"], shuffle=plan["shuffle"])
        found.update(chain.from_iterable(batches))
    return found


def expected(plan: Plan, kept: int) -> Counter[int]:
    """The first `kept` samples of each epoch's order, once."""
    size = plan["size"]
    found: Counter[int] = Counter()
    for epoch in range(plan["epochs"]):
        order = np.random.default_rng((plan["seed"], epoch)).permutation(size)
        found.update((order if plan["shuffle"] else np.arange(size))[:kept].tolist())
    return found


def check_loader(plan: Plan, way: Way) -> None:
    together = plan["workers"] * plan["batch"]
    if plan["size"] >= together:
        assert used(plan, way) == expected(plan, plan["size"] // together * together)


def check_sampler(plan: Plan, way: Way) -> None:
    assert used(plan, way) == expected(plan, plan["size"] // plan["workers"] * plan["workers"])


def check_leased(plan: Plan, way: str) -> None:
    """Of samples that are shared by lease none is left out, and orders do not repeat."""
    if plan["size"] < plan["batch"]:
        return
    cluster = FakeCluster(workers=plan["workers"])
    data = TensorDataset(torch.arange(plan["size"]))
    how = {"batch_size": plan["batch"], "shuffle": plan["shuffle"], "shards": "dynamic"}

    def batches(me: Any) -> Iterator[list[int]]:
        epochs = plan["epochs"]
        if way == "epochs told":
            yield from stepping(me, load(me, data, epochs=epochs, **how))
        elif way == "iterated again":
            loader = load(me, data, **how)
            for _ in range(epochs):
                yield from stepping(me, loader)
        elif way == "sampler in the loop":
            for _ in range(epochs):
                drawn = sampler(me, data, **how)
                loader = DataLoader(data, batch_sampler=drawn)
                yield from stepping(me, drawn.until_done(loader))
        else:
            name = "train" if way == "made with a name" else None
            for _ in range(epochs):
                yield from stepping(me, load(me, data, name=name, **how))

    found = in_turns(cluster, [batches(me) for me in cluster.workers])
    assert samples(found) == dict.fromkeys(range(plan["size"]), plan["epochs"])
    if plan["workers"] == 1 and plan["shuffle"] and plan["size"] > 20 and plan["epochs"] > 1:
        flat = list(chain.from_iterable(found))
        size = plan["size"]
        assert flat[:size] != flat[size : 2 * size]


LEASED = (
    "epochs told",
    "iterated again",
    "made in the loop",
    "made with a name",
    "sampler in the loop",
)
QUICK, LONG = 60, 500


@settings(max_examples=QUICK, deadline=None)
@given(plan=plans, way=st.sampled_from(LOADERS))
def test_loader_every_epoch_has_every_sample_that_the_rule_keeps(plan: Plan, way: Way) -> None:
    check_loader(plan, way)


@settings(max_examples=QUICK, deadline=None)
@given(plan=plans, way=st.sampled_from(SAMPLERS))
def test_sampler_every_epoch_has_every_sample_that_the_rule_keeps(plan: Plan, way: Way) -> None:
    check_sampler(plan, way)


@settings(max_examples=QUICK, deadline=None)
@given(plan=plans, way=st.sampled_from(LEASED))
def test_leased_every_epoch_has_every_sample(plan: Plan, way: str) -> None:
    check_leased(plan, way)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=LONG, deadline=None)
@given(plan=plans, loader=st.sampled_from(LOADERS), other=st.sampled_from(SAMPLERS))
def test_every_way_of_writing_epochs_at_length(plan: Plan, loader: Way, other: Way) -> None:
    check_loader(plan, loader)
    check_sampler(plan, other)
    for way in LEASED:
        check_leased(plan, way)


@pytest.mark.parametrize("way", [*LOADERS, *SAMPLERS])
def test_every_sample_comes_at_last(way: Way) -> None:
    """Of 100 samples two workers with batches of 32 leave out 36, other ones in each epoch."""
    plan = {"size": 100, "workers": 2, "batch": 32, "epochs": 12, "shuffle": True, "seed": 3}
    found = used(plan, way)
    assert len(found) == 100
    assert max(found.values()) <= 12


@pytest.mark.parametrize("way", [*LOADERS, *SAMPLERS])
def test_every_sample_is_used_once_in_each_epoch_where_counts_divide(way: Way) -> None:
    """As in `for epoch in range(3): for batch in worker.loader(...)`, which new users write."""
    for shuffle in (True, False):
        plan = {"size": 96, "workers": 2, "batch": 16, "epochs": 3, "shuffle": shuffle, "seed": 3}
        assert used(plan, way) == dict.fromkeys(range(96), 3), shuffle
