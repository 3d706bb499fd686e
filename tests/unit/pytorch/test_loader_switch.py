"""A worker leaves the loop of one leased loader, and goes on with another one."""

from __future__ import annotations

from tests.unit.pytorch.test_loader_leased import DYNAMIC, alone, sampler, tensors


def test_loop_that_is_left_with_nothing_to_give_back_says_so() -> None:
    """So the mark of its next step, with another loader's samples, tells of the last one, too."""
    worker = alone()
    cluster = worker.client.control.cluster
    first = iter(sampler(worker, tensors(40), batch_size=5, **DYNAMIC))
    for _ in range(2):  # all of its first lease
        next(first)
        worker.client.train()
    first.close()
    assert cluster.given_back == ["posted"]
    second = iter(sampler(worker, tensors(5), batch_size=5, **DYNAMIC))
    next(second)
    worker.client.train()
    assert cluster.given_back == ["posted"], "it is said once"
    assert worker.client.marks == [(1, 5), (1, 10), (2, 5)]
    cluster.book._finished(10, (2, 5))
    assert [each.ranks for each in cluster.book.reports()] == [((0, 10, 10),), ((0, 5, 5),)]
