from __future__ import annotations

from itertools import product

import numpy as np
from tests.contract.table_model import splitmix64
from tests.unit.core.table.rig import keys_of

from paramserve.core.table.compiled import prepare
from paramserve.core.table.hashing import hashes, shard_of, stream_of
from paramserve.core.table.index import Index

EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63)]


def test_hashes_are_those_of_splitmix64() -> None:
    assert hashes(keys_of(EXTREMES)).tolist() == [splitmix64(key) for key in EXTREMES]
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # as published


def test_shards_share_ids_that_follow_each_other() -> None:
    for shards, step in product([1, 2, 3, 7, 10, 16, 100], [1, -1, 8, 1000, 1 << 32]):
        many = 2000 * shards
        counts = np.bincount(shard_of(np.arange(many) * step, shards), minlength=shards)
        assert counts.size == shards
        assert 0.85 * 2000 < counts.min() <= counts.max() < 1.15 * 2000, (shards, step)


def test_keys_of_one_shard_are_spread_over_its_index() -> None:
    keys = np.arange(80_000)
    mine = keys[shard_of(keys, 8) == 5]
    prepare()
    index = Index()
    index.insert(mine, np.arange(mine.size))
    taken = np.flatnonzero(index._new[:, 1])
    counts = np.bincount(taken * 16 // index._new.shape[0], minlength=16)
    assert 0.8 < counts.min() / counts.mean() <= counts.max() / counts.mean() < 1.2


def test_stream_depends_on_seed_and_name() -> None:
    streams = {stream_of(seed, name) for seed in range(5) for name in ("a", "b", "1/a")}
    assert len(streams) == 15
    assert all(0 <= stream < 2**64 for stream in streams)
    assert stream_of(1, "a") == stream_of(1, "a")
