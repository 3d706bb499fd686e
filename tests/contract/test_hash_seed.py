"""Python's own hash of a string is equal in all workers of a run, and in all runs of one seed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import paramserve as ps


def hashes(worker: ps.Worker) -> tuple[int, list[str]]:
    """Of a string, and the order of a set, which follows from such hashes."""
    return hash("anna"), [*{f"user_{number}" for number in range(20)}]


def test_workers_hash_alike_in_each_run_with_that_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")  # means none, as Python has it
    found: list[object] = []
    for threads in (1, 2):  # with other ones than the servers', another process forks them
        engine = ps.Local(threads_per_worker=threads)
        found += ps.run(hashes, workers=2, seed=2**40 + 5, engine=engine).returns.values()
    assert found == found[:1] * 4
    assert os.environ["PYTHONHASHSEED"] == "random"


def test_workers_have_the_hash_seed_that_the_driver_was_started_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    alone = subprocess.check_output([sys.executable, "-c", "print(hash('anna'))"], text=True)
    assert ps.run(hashes, workers=1, seed=5).returns[0][0] == int(alone)
