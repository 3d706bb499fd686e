"""What a shard reports is bounded, however much the ranks have noted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tests.contract.role_cluster import RoleCluster

from paramserve.config import Limits
from paramserve.rules import Add

NOTE_BYTES = 1 << 14
WORKERS = 3


def test_reports_leave_the_notes_out_unless_they_are_asked_for(
    make_cluster: Callable[..., RoleCluster],
) -> None:
    cluster = make_cluster("unix", workers=WORKERS)
    small = Limits(header_bytes_max=2 * NOTE_BYTES)
    watcher = cluster.client(limits=small)
    workers = [cluster.client(rank) for rank in range(WORKERS)]
    block = workers[0].define("w", np.zeros(4), rule=Add())
    for worker in workers:
        worker.pull("w")
        for number in range(2):
            note = bytes([number]) * NOTE_BYTES
            worker.dense.step("default", (), pull=[block], tick=True, note=note).result()
    (beat,) = watcher.connection.reports()
    assert beat.groups[0].clocks == tuple((rank, 2) for rank in range(WORKERS))
    assert watcher.pull("w").tolist() == [0.0] * 4, "the watcher goes on"
    assert [len(notes) for notes in workers[0].dense.notes("default").values()] == [2] * WORKERS
