"""A simulated run gives back what it has taken of the system."""

from __future__ import annotations

import os

from paramserve_testing import Scenario, SimulatedCluster


def test_runs_leave_no_descriptors_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(8):
        cluster = SimulatedCluster(seed, Scenario(servers=2, workers=3))
        cluster.run()
        assert len(os.listdir("/proc/self/fd")) <= before
