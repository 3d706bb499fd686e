"""examples/sharded_100mb.py: the arithmetic of sharding over machines."""

from __future__ import annotations

import sharded_100mb


def test_arithmetic_few_workers_wait_for_their_own_links() -> None:
    text = sharded_100mb.arithmetic(4, 100)
    assert "bring 400 MB to the servers in one step. One server takes 320.0 ms" in text
    assert "100 shards on 100 machines receive 4 MB each, in 3.2 ms. 80.0 ms is" in text
    assert "a worker's own link sets the pace: a step is 4.0 times as fast" in text


def test_arithmetic_many_workers_wait_for_the_servers_links() -> None:
    text = sharded_100mb.arithmetic(200, 100)
    assert "receive 200 MB each, in 160.0 ms" in text
    assert "the servers' links set the pace: a step is 100.0 times as fast" in text
