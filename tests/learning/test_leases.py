"""Leased samples in real processes: how often each is in the values, whoever dies or is slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learning.leased_training import SIZE, count

import paramserve as ps

SUM = ps.Sync(reduce="sum")


def counted(consistency: Any = SUM, *, workers: int = 2, **options: Any) -> tuple[Any, list[float]]:
    """The result, and how often each sample was in a step."""
    death = options.pop("on_worker_death", "stop")
    result = ps.run(
        count,
        kwargs=options,
        workers=workers,
        servers=2,
        consistency=consistency,
        seed=3,
        threads_per_worker=1,
        on_worker_death=death,
        timeout_s=150,
    )
    seen: torch.Tensor = result.state_dict()["seen"]
    return result, seen.tolist()


@pytest.mark.parametrize(
    ("death", "overlap", "workers", "epochs"),
    [("continue", False, 3, 2), (ps.Restart(1), True, 2, 1)],
    ids=["continue", "restart overlap"],
)
def test_sync_every_sample_counts_once_an_epoch_though_a_worker_dies(
    death: Any, overlap: bool, workers: int, epochs: int
) -> None:
    options = {"dies_at": 4, "overlap": overlap, "epochs": epochs, "weighted": True}
    _, seen = counted(workers=workers, on_worker_death=death, **options)
    assert seen == pytest.approx([float(epochs)] * SIZE)


def test_async_every_sample_counts_though_a_worker_dies(tmp_path: Path) -> None:
    options = {"dies_at": 4, "overlap": True, "others_wait_for": str(tmp_path / "dies")}
    result, seen = counted(ps.Async(), workers=3, on_worker_death="continue", **options)
    assert set(result.failures) == {1}
    assert min(seen) >= 2.0
    assert sum(seen) <= 2 * SIZE + 4 * 4, "more than the steps that may have been on their way"


def test_async_slow_worker_gets_well_less_than_an_even_share() -> None:
    result, seen = counted(ps.Async(), epochs=4, seconds=(0.005, 0.025))
    assert seen == [4.0] * SIZE
    fast, slow = sum(result.returns[0]), sum(result.returns[1])
    assert fast + slow == 4 * SIZE
    assert slow < 0.6 * 4 * SIZE / 2


def test_dataloader_workers_draw_ahead_and_every_sample_counts_once() -> None:
    _, seen = counted(own=True, num_workers=2)
    assert seen == [2.0] * SIZE


def test_adaptive_batches_are_smaller_for_the_slow_worker() -> None:
    result, seen = counted(
        epochs=8, seconds=(0.002, 0.01), batch_size=6, adaptive_batch=(1, 12), weighted=True
    )
    assert seen == pytest.approx([8.0] * SIZE)
    fast, slow = result.returns[0], result.returns[1]
    assert fast[0] == slow[0] == 6
    assert sum(slow) / len(slow) < 0.7 * sum(fast) / len(fast)
