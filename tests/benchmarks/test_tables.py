"""The rivals' tables compute Adagrad, and the check that says so can fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.tables_load import (
    Array,
    Ballast,
    Batches,
    Keys,
    TableLoad,
    adagrad,
    check,
    keys_of,
    stream,
)
from tests.needs import needs
from tests.suites import each_case

from benchmarks import bench_tables, tables_redis

LOAD = TableLoad(rows=3_000, dim=4, batch=400, zipf_keys=100, calls=3, fill=1_000)

needs_redis = pytest.mark.skipif(
    tables_redis.server_program() is None,
    reason="THE RIVAL ON REDIS IS NOT TESTED: redis-server, or valkey-server, has to be in PATH",
)


class InMemory:
    """A table in a dict."""

    def __init__(self) -> None:
        self.values = {int(key): np.full(4, 0.1 * (key % 7), np.float32) for key in ALL}
        self.state = {int(key): np.zeros(4, np.float32) for key in ALL}

    def pull(self, keys: Keys) -> Array:
        return np.array([self.values[int(key)] for key in keys])

    def push(self, keys: Keys, gradients: Array) -> None:
        for key in np.unique(keys):
            summed = gradients[keys == key].sum(axis=0)[None]
            adagrad(LOAD, self.values[int(key)][None], self.state[int(key)][None], summed)

    def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
        self.push(keys, gradients)
        return lambda: None


ALL = keys_of(np.arange(LOAD.rows))


class AppliesEachDuplicate(InMemory):
    def push(self, keys: Keys, gradients: Array) -> None:
        for key, gradient in zip(keys, gradients, strict=True):
            super().push(np.array([key]), gradient[None])


class ForgetsItsState(InMemory):
    def push(self, keys: Keys, gradients: Array) -> None:
        super().push(keys, gradients)
        for state in self.state.values():
            state.fill(0)


class IgnoresPushes(InMemory):
    def push(self, keys: Keys, gradients: Array) -> None:
        return None


class SwapsRows(InMemory):
    def pull(self, keys: Keys) -> Array:
        return super().pull(keys)[::-1]


def test_check_right_table_passes() -> None:
    check(LOAD, InMemory(), Batches(LOAD))


@each_case("wrong", [AppliesEachDuplicate, ForgetsItsState, IgnoresPushes, SwapsRows])
def test_check_wrong_table_fails(wrong: type[InMemory]) -> None:
    with pytest.raises(AssertionError):
        check(LOAD, wrong(), Batches(LOAD))


def test_check_row_wise_is_another_rule() -> None:
    with pytest.raises(AssertionError, match="Adagrad"):
        check(LOAD, InMemory(), Batches(LOAD), row_wise=True)


def test_keys_of_ids_differ_and_are_not_negative() -> None:
    keys = keys_of(np.arange(200_000))
    assert np.unique(keys).size == keys.size
    assert keys.min() >= 0
    assert keys.max() > 2**62
    assert abs(float((keys % 2).mean()) - 0.5) < 0.01


def test_batches_of_keys_and_of_ids_are_the_same() -> None:
    keyed, dense = Batches(LOAD), Batches(LOAD, dense=True)
    for name in ("uniform", "zipf", "distinct", "uniform"):
        keys, ids = getattr(keyed, name)(), getattr(dense, name)()
        assert np.array_equal(keys, keys_of(ids)), name
        assert 0 <= ids.min() <= ids.max() < LOAD.rows


def test_distinct_batch_has_each_key_once_in_no_order() -> None:
    keys = Batches(LOAD, dense=True).distinct()
    assert np.unique(keys).size == keys.size == LOAD.batch
    assert (np.diff(keys) < 0).any()


def test_zipf_first_rank_is_as_frequent_as_its_law_says() -> None:
    batches = Batches(LOAD, dense=True)
    seen = Counter(np.concatenate([batches.zipf() for _ in range(200)]).tolist())
    weights = np.arange(1, LOAD.rows + 1) ** -LOAD.exponent
    (first, count), (second, _) = seen.most_common(2)
    assert (first, second) == (0, 2_654_435_761 % LOAD.rows)
    assert count / 20_000 == pytest.approx(weights[0] / weights.sum(), rel=0.1)


def test_stream_keeps_window_pushes_on_their_way() -> None:
    under_way, most = 0, 0

    class Slow(InMemory):
        def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)

            def wait() -> None:
                nonlocal under_way
                under_way -= 1

            return wait

    stream(LOAD, Slow(), [ALL[:2]] * 5, np.zeros((2, 4)))
    assert (most, under_way) == (LOAD.window, 0)


def test_ray_index_finds_what_was_added() -> None:
    needs("ray")
    from benchmarks.tables_ray import Index

    index = Index(LOAD.rows)
    for begin, end in LOAD.parts():
        index.add(ALL[begin:end], begin)
    order = np.random.default_rng(0).permutation(LOAD.rows)
    assert np.array_equal(index.find(ALL[order]), order)
    assert (index.find(keys_of(np.arange(LOAD.rows, 2 * LOAD.rows))) == -1).all()
    assert index.find(np.zeros(0, np.int64)).size == 0


class InProcess:
    """A rival's server without messages: one server has all rows."""

    def __init__(self, pull: Callable[[Any], Any], push: Callable[[Any, Any], Any]) -> None:
        self.pull, self.push = pull, push

    def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
        self.push(keys, gradients)
        return lambda: None


def test_ray_server_is_adagrad() -> None:
    needs("ray")
    from benchmarks.tables_ray import TableServer

    server = TableServer(TableLoad(rows=LOAD.rows, dim=4, servers=1), 0)
    for begin, end in LOAD.parts():
        server.create(ALL[begin:end])
    check(LOAD, InProcess(server.pull, server.push), Batches(LOAD))
    with pytest.raises(KeyError, match="no row for key"):
        server.pull(keys_of(np.array([LOAD.rows])))


@each_case("how", ["push", "push_optim"])
def test_rpc_server_is_adagrad(how: str) -> None:
    from benchmarks.tables_rpc import TableServer

    server = TableServer(TableLoad(rows=LOAD.rows, dim=4, servers=1))

    def pull(ids: Keys) -> Array:
        found: Array = server.embedding.weight.detach()[torch.from_numpy(ids)].numpy()
        return found

    def push(ids: Keys, gradients: Array) -> None:
        getattr(server, how)(torch.from_numpy(ids), torch.from_numpy(gradients))

    check(LOAD, InProcess(pull, push), Batches(LOAD, dense=True))


@needs_redis
def test_redis_client_is_adagrad(tmp_path: Path) -> None:
    figures = tables_redis.table(LOAD, tmp_path)
    assert all(value > 0 for value in figures.values())


@needs_redis
def test_redis_unknown_key_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables_redis, "ANSWER_S", 0.5)
    with tables_redis.servers(1, tmp_path) as sockets:
        client = tables_redis.Client(LOAD, [tables_redis.Connection(sockets[0], 4)])
        client.create(ALL[:3], np.ones((3, 4), np.float32))
        assert (client.pull(ALL[[2, 0, 2]]) == 1).all()
        with pytest.raises((KeyError, TimeoutError)):
            client.pull(ALL[:5])


def test_loads_other_rows_change_every_size() -> None:
    load, sizes = bench_tables.loads(tiny=False, rows=800_000)
    assert load.rows == 800_000
    assert sizes.sizes == (100_000, 800_000, 2_400_000)
    assert sizes.rows == 2_400_000


def test_ballast_gives_back_all_of_its_memory_and_no_more() -> None:
    ballast = Ballast(5 << 20)
    assert ballast.left == 6 << 20  # whole huge pages
    ballast.give(1)
    assert ballast.left == 4 << 20
    ballast.give(1 << 30)
    assert ballast.left == 0
    ballast.give(1)
    assert ballast.left == 0
