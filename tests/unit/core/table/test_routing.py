"""Keys are numbered in the order in which they come, and laid out by shard."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.table.rig import Keys, keys_of

from paramserve.compiling import load_routing
from paramserve.core.table import routing
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.parts import gradient_at, keys_at

load_routing()
FEW_KEYS = st.lists(st.integers(-30, 30) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=200)
SHARDS = st.integers(1, 5)


def laid(nbytes: int) -> Keys:
    """Memory that is larger than it has to be by nothing."""
    return np.full(nbytes // 8, -1, np.int64)


@settings(max_examples=30)
@given(FEW_KEYS)
def test_distinct_keys_are_numbered_as_they_first_come(keys: list[int]) -> None:
    found, numbers = routing.distinct(keys_of(keys))
    order = list(dict.fromkeys(keys))
    assert found.tolist() == order
    assert numbers.tolist() == [order.index(key) for key in keys]


@settings(max_examples=30)
@given(FEW_KEYS, SHARDS)
def test_each_shard_has_its_keys_and_their_places(keys: list[int], shards: int) -> None:
    flat = keys_of(keys)
    words = laid(routing.keys_bytes_max(flat.size, shards))
    owner = shard_of(flat, shards)
    for shard, (count, offset) in enumerate(routing.lay_keys(flat, shards, words)):
        own, places = keys_at(words.view(np.uint8), offset, count)
        assert offset % 64 == 0
        assert places.tolist() == np.flatnonzero(owner == shard).tolist()
        assert own.tolist() == flat[places].tolist()


@settings(max_examples=30)
@given(FEW_KEYS, SHARDS, st.integers(1, 20))
def test_each_shard_has_its_keys_once_with_the_sums(keys: list[int], shards: int, dim: int) -> None:
    flat = keys_of(keys)
    values = np.arange(flat.size * dim, dtype=np.float32).reshape(flat.size, dim)
    found, numbers = routing.distinct(flat)
    words = laid(routing.gradient_bytes_max(found.size, dim, shards))
    bad, parts = routing.lay_gradient(found, numbers, values, shards, words)
    assert bad == -1
    owner = shard_of(found, shards)
    for shard, (count, offset) in enumerate(parts):
        own, sums = gradient_at(words.view(np.uint8), offset, count, dim)
        assert own.tolist() == found[owner == shard].tolist()
        for key, row in zip(own, sums, strict=True):
            assert (row == values[flat == key].sum(0)).all()
