"""Leased samples in real processes: how often each is in the values when a rank dies or is slow."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.learning.leased_training import SIZE, count, count_in_turn

import paramserve as ps
from paramserve.launch.entries import Key

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
        engine=ps.Local(threads_per_worker=1),
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


@pytest.mark.slow
def test_sync_every_sample_counts_once_an_epoch_across_resumes(tmp_path: Path) -> None:
    """A server is lost; and other numbers of workers and servers go on from the middle."""
    folder, epochs = tmp_path / "runs", 4
    options: dict[str, Any] = {
        "kwargs": {"epochs": epochs, "seconds": (0.01,) * 3, "batch_size": 3},
        "consistency": SUM,
        "engine": ps.Local(threads_per_worker=1),
    }
    checkpoint = ps.Checkpoint(folder, every_s=0.1, keep=100)
    with ps.start(count, workers=3, servers=2, checkpoint=checkpoint, **options) as job:
        while (told := job.status().checkpoints) is None or told.clocks.get("model", 0) < 5:
            time.sleep(0.01)
        processes = {key: each.pid for each, key in job._supervisor._processes.items()}
        os.kill(processes[Key("server", 1)], signal.SIGKILL)
        result = job.wait()
    assert len(result.rollbacks) == 1
    assert result.state_dict()["seen"].tolist() == [float(epochs)] * SIZE
    again = ps.run(count, workers=2, servers=3, resume=told.path, **options)
    assert 0 < sum(map(sum, again.returns.values())) < epochs * SIZE
    assert again.state_dict()["seen"].tolist() == [float(epochs)] * SIZE


def test_async_every_sample_counts_though_a_worker_dies(tmp_path: Path) -> None:
    options = {"dies_at": 4, "overlap": True, "others_wait_for": str(tmp_path / "dies")}
    result, seen = counted(ps.Async(), workers=3, on_worker_death="continue", **options)
    assert set(result.failures) == {1}
    assert min(seen) >= 2.0
    assert sum(seen) <= 2 * SIZE + 4 * 4, "more than the steps that may have been on their way"


CASES: dict[str, dict[str, Any]] = {
    "slow": {"consistency": ps.Async(), "epochs": 4, "seconds": (0.005, 0.025)},
    "own": {"own": True, "num_workers": 2},
    "adaptive": {
        "epochs": 8,
        "seconds": (0.002, 0.01),
        "batch_size": 6,
        "adaptive_batch": (1, 12),
        "weighted": True,
    },
}


@pytest.fixture(scope="module")
def alive() -> ps.Result:
    """Of a run in which no worker dies."""
    return ps.run(
        count_in_turn,
        args=(CASES,),
        workers=2,
        servers=2,
        consistency=SUM,
        seed=3,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=150,
    )


def test_async_slow_worker_gets_well_less_than_an_even_share(alive: ps.Result) -> None:
    assert alive.state_dict("slow")["seen"].tolist() == [4.0] * SIZE
    fast, slow = (sum(alive.returns[rank]["slow"]) for rank in range(2))
    assert fast + slow == 4 * SIZE
    assert slow < 0.6 * 4 * SIZE / 2


def test_dataloader_workers_draw_ahead_and_every_sample_counts_once(alive: ps.Result) -> None:
    assert alive.state_dict("own")["seen"].tolist() == [2.0] * SIZE


def test_adaptive_batches_are_smaller_for_the_slow_worker(alive: ps.Result) -> None:
    assert alive.state_dict("adaptive")["seen"].tolist() == pytest.approx([8.0] * SIZE)
    fast, slow = (alive.returns[rank]["adaptive"] for rank in range(2))
    assert fast[0] == slow[0] == 6
    assert sum(slow) / len(slow) < 0.7 * sum(fast) / len(fast)
