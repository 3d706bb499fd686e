"""A loader that asks for rows ahead: when, for which batches, and how the rest is released."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.pytorch.hosts import host
from tests.unit.pytorch.test_loader import indices, numbers
from tests.unit.pytorch.test_loader_leased import FakeCluster, in_turns, samples, stepping, tensors

from paramserve.client.loop_progress import LoopProgress
from paramserve.client.row_reads import TableRead
from paramserve.client.table import Table
from paramserve.compiling import load_routing
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.messages.blocks import TableSpec
from paramserve.pytorch.embedding import Embedding
from paramserve.pytorch.loader import load


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    load_routing()


class Asked:
    """What a client was asked for ahead, in order, and whether it was released."""

    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []
        self.reads: list[list[TableRead]] = []
        self.held: list[Any] = []
        self.known: dict[str, Table] = {}
        self.keyed: Any = SimpleNamespace(reads=None)
        self.connection = SimpleNamespace(before=0, restarts=False, incarnation=1)
        self.steps = SimpleNamespace(loop=LoopProgress(), clocks={}, missed_by={})

    def table(self, name: str) -> Table:
        block: Any = SimpleNamespace(
            group_name=name, table=TableSpec(2, "float32", 0, TableOptions(init=Zeros()).to_spec())
        )
        return self.known.setdefault(name, Table(self, self.keyed, block))

    def prefetch_tables(self, reads: Any) -> list[Any]:
        self.reads.append([TableRead(*each) for each in reads])
        keys = [int(key) for read in self.reads[-1] for key in np.ravel(np.asarray(read.keys))]
        self.events.append(("asks", keys))
        self.held.append(keys)
        return [SimpleNamespace(drop=lambda: self.held.remove(keys))]


def worker(**about: Any) -> Any:
    made = host(Asked(), rank=about.get("rank", 0), workers=about.get("workers", 1))
    made.course.steps_left = about.get("steps_before", 0)
    return made


def keys_of(batch: Any) -> dict[str, torch.Tensor]:
    return {"users": batch[0]}


def loaded(me: Any, **options: Any) -> list[list[int]]:
    """The batches, noted beside what was asked for."""
    found = []
    for batch in load(me, numbers(12), batch_size=3, prefetch=keys_of, **options):
        found.append(batch[0].tolist())
        me.client.events.append(("gets", found[-1]))
    return found


def test_loader_asks_for_the_next_batch_before_it_gives_this_one() -> None:
    me = worker()
    batches = loaded(me, shuffle=False)
    first, second, third, fourth = batches
    assert batches == indices(load(worker(), numbers(12), batch_size=3, shuffle=False))
    assert me.client.events == [
        ("asks", first),
        ("asks", second),
        ("gets", first),
        ("asks", third),
        ("gets", second),
        ("asks", fourth),
        ("gets", third),
        ("gets", fourth),
    ]
    assert me.client.held == []


@pytest.mark.parametrize("options", [{"epochs": 3}, {"steps": 1}, {"steps": 4}, {"steps": 9}])
def test_loader_asks_for_what_it_gives_and_no_more(options: dict[str, Any]) -> None:
    for steps_before in (0, 3, 4, 30):
        me, other = (worker(steps_before=steps_before) for _ in range(2))
        batches = loaded(me, **options)
        assert batches == indices(load(other, numbers(12), batch_size=3, **options)), steps_before
        assert [keys for what, keys in me.client.events if what == "asks"] == batches, steps_before
        assert (me.client.held, me.course.steps_left) == ([], other.course.steps_left)


def test_loader_that_is_left_at_an_epochs_end_goes_on_with_the_next() -> None:
    whole = indices(load(worker(), numbers(12), batch_size=3, epochs=4))
    me = worker()
    loader = load(me, numbers(12), batch_size=3, epochs=2, prefetch=keys_of)
    for number, _ in enumerate(loader):
        if number == 3:
            break
    assert me.client.held == []
    assert indices(loader) == whole[4:12]


def test_missed_batches_are_left_out_and_their_rows_let_go() -> None:
    me, whole = worker(), indices(load(worker(), numbers(12), batch_size=3))
    got, held = [], []
    for batch in load(me, numbers(12), batch_size=3, prefetch=keys_of):
        got += indices([batch])
        held.append(list(me.client.held))
        me.client.steps.missed_by["model"] = 1
    assert got == [whole[0], *whole[2:]]
    assert [*held, me.client.held] == [whole[:2], whole[2:], whole[3:], []]


def test_retiring_worker_lets_go_of_what_was_asked_for() -> None:
    me = worker()
    for _ in load(me, numbers(12), batch_size=3, prefetch=keys_of):
        me.retiring = True
    assert (len(me.client.reads), me.client.held) == (3, [])


def test_error_of_the_function_ends_the_loop_and_lets_go() -> None:
    me = worker()

    def fails(batch: Any) -> Any:
        if len(me.client.reads) == 2:
            raise ZeroDivisionError
        return keys_of(batch)

    batches = iter(load(me, numbers(12), batch_size=3, prefetch=fails))
    next(batches)
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert me.client.held == []


@pytest.mark.parametrize("told", [None, 3, ["users"], [(1, 2, 3)], [("users",)]])
def test_function_that_gives_no_pairs_is_told_what_to_give(told: Any) -> None:
    with pytest.raises(TypeError, match="gives a mapping from tables"):
        next(iter(load(worker(), numbers(12), batch_size=3, prefetch=lambda batch: told)))


def test_function_that_names_something_else_is_told_what_to_name() -> None:
    linear = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"by a table, its name or a module on it, not by Linear"):
        next(iter(load(worker(), numbers(12), batch_size=3, prefetch=lambda b: {linear: b[0]})))


def test_modules_rows_are_asked_for_as_their_forward_pulls_them() -> None:
    me = worker()
    table = me.client.table("users")
    module, frozen = Embedding(table, padding_idx=7), Embedding(me.client.table("films"))
    frozen.rows.requires_grad = False
    ids = torch.tensor([[5, 7], [3, 5], [9, 3]], dtype=torch.int32)

    pairs = [(module, ids), (frozen, ids[0]), (table, ids), ("films", [4, 4])]
    next(iter(load(me, numbers(3), batch_size=3, prefetch=lambda batch: pairs)))
    (*_, reads) = me.client.reads
    assert [(read.table.name, np.ravel(np.asarray(read.keys)).tolist()) for read in reads] == [
        ("users", [5, 3, 9]),
        ("films", [5, 7]),
        ("users", ids.ravel().tolist()),
        ("films", [4, 4]),
    ]


# --- leased ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "workers", "batch"), [(60, 3, 5), (61, 2, 7), (5, 4, 2)])
def test_leased_every_sample_is_asked_for_and_comes_once_an_epoch(
    monkeypatch: pytest.MonkeyPatch, size: int, workers: int, batch: int
) -> None:
    cluster = FakeCluster(workers)
    loops, asked = [], []
    for each in cluster.workers:
        asked.append(Asked())
        for name in ("table", "prefetch_tables"):
            monkeypatch.setattr(each.client, name, getattr(asked[-1], name), raising=False)
        options: dict[str, Any] = {"epochs": 3, "shards": "dynamic", "prefetch": keys_of}
        loops.append(stepping(each, load(each, tensors(size), batch_size=batch, **options)))
    found = in_turns(cluster, loops)
    assert samples(found) == dict.fromkeys(range(size), 3)
    wanted = [keys for each in asked for _, keys in each.events]
    assert samples(wanted) == samples(found)
    assert [each.held for each in asked] == [[]] * workers


def test_leased_loop_that_is_left_gives_back_what_was_only_asked_for() -> None:
    cluster = FakeCluster(2)
    first, second = cluster.workers
    asked: Any = Asked()
    for name in ("table", "prefetch_tables"):
        setattr(first.client, name, getattr(asked, name))
    loader = load(first, tensors(12), batch_size=2, shards="dynamic", prefetch=keys_of)
    mine = []
    for (ids,) in loader:
        mine.append(ids.tolist())
        first.client.train()
        break
    assert (len(asked.reads), asked.held) == (2, [])
    cluster.meanwhile = lambda: cluster.book._finished(10, (1, 2))
    others = list(stepping(second, load(second, tensors(12), batch_size=2, shards="dynamic")))
    assert samples(mine + others) == dict.fromkeys(range(12), 1)
