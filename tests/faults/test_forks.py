"""Forked processes of whole runs: what they share, what they draw at random, and 1,000 of them."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.faults.leftovers import nothing_left

import paramserve as ps

RUNS = 250
THREADS = 2


class Seen(NamedTuple):
    """What a rank sees of itself and of the processes of its run."""

    drawn: tuple[float, float, float]
    """By Python, numpy and torch."""
    threads: int
    environment: str
    files: dict[int, list[str]]
    """Of each child of the processes that fork, by pid, as rank 0 sees them."""
    tasks: dict[int, int]


def look(worker: ps.Worker) -> Seen:
    import torch

    client = worker.client
    client.define("w", np.zeros(10, np.float32), rule=ps.SGD(lr=0.1))
    client.push("w", np.ones(10, np.float32)).result()
    worker.all_reduce(1)  # both are up
    # One rank looks: what it has open meanwhile the other would see.
    found = [pid for parent in preparing() for pid in children_of(parent)]
    children = [pid for pid in found if of_a_run(pid)] if worker.rank == 0 else []
    files = {pid: files_of(pid) for pid in children}
    tasks = {pid: len(os.listdir(f"/proc/{pid}/task")) for pid in children}
    worker.all_reduce(1)  # both have looked
    drawn = random.random(), float(np.random.random()), float(torch.rand(1))
    return Seen(drawn, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], files, tasks)


def preparing() -> list[int]:
    """The processes that the driver has started: each forks."""
    driver = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])
    found = Path(f"/proc/{driver}/task").glob("*/children")
    return [int(pid) for each in found for pid in each.read_text().split()]


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def of_a_run(pid: int) -> bool:
    """Whether it is a process of a run: the driver of other tests may have Ray's, too."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"paramserve ")


def files_of(pid: int) -> list[str]:
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except OSError:  # the listing's own
            continue
    return found


@pytest.mark.slow
def test_forks_of_a_run_share_nothing_and_draw_by_rank_and_seed() -> None:
    pytest.importorskip("torch")  # the driver has it: workers are forked from a process that has it
    engine = ps.Local(threads_per_worker=THREADS)
    options: dict[str, Any] = {"workers": 2, "consistency": ps.Async(), "seed": 7}
    runs = (ps.run(look, engine=engine, **options).returns for _ in range(3))
    _, once, again = runs  # the first may compile kernels
    for rank in range(2):
        assert once[rank].drawn == again[rank].drawn
        assert once[rank].threads == THREADS
        assert once[rank].environment == str(THREADS)
    assert all(one != other for one, other in zip(once[0].drawn, once[1].drawn, strict=True))
    seen: Seen = once[0]
    assert len(seen.files) == 4, "coordinator, server and workers are forks"
    sockets = Counter(each for files in seen.files.values() for each in files if "socket:" in each)
    assert set(sockets.values()) == {1}, "each socket is of one process"
    pipes = Counter(each for files in seen.files.values() for each in files if "pipe:" in each)
    assert set(pipes.values()) == {1}
    for files in seen.files.values():
        rest = Counter(each for each in files if ":[" not in each or "anon_inode" in each)
        del rest["/memfd:paramserve (deleted)"]
        loop = rest.pop("anon_inode:[eventpoll]", 0)
        assert loop <= 1
        assert rest == {"/dev/null": 1, "anon_inode:[pidfd]": 1}
    assert max(seen.tasks.values()) <= 3, "the main thread, and those for driver and heartbeats"


def count(worker: ps.Worker) -> int:
    worker.client.define("w", np.zeros(4), rule=ps.Add())
    worker.client.push("w", np.ones(4)).result()
    return worker.rank


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousand_starts_in_a_row_all_succeed() -> None:
    failed: list[str] = []
    with nothing_left():
        for number in range(RUNS):
            try:
                result = ps.run(count, workers=2, consistency=ps.Async())
                assert result.returns == {0: 0, 1: 1}
                assert (result.values["default"]["w"] == 2.0).all()
            except Exception as error:
                failed.append(f"run {number}: {error!r}")
    assert failed == [], f"{len(failed)} of {RUNS} runs of 4 processes"
