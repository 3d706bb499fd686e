"""Simulated servers keep the deadlines of a policy, however rarely they repeat messages."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paramserve.consistency.built_in import Sync
from paramserve_testing import Faults, Scenario, SimulatedCluster, slow

TIMEOUT_S = 0.02


class ResendsLate(SimulatedCluster):
    """Its servers repeat a message as late as those of a run do."""

    server_deadlines = replace(SimulatedCluster.server_deadlines, resend_s=0.25)


def test_clock_is_decided_at_its_timeout_while_a_message_waits_to_be_repeated() -> None:
    policy = Sync(reduce="sum", timeout_s=TIMEOUT_S)
    script = (slow(worker=2, factor=200),)
    cluster = ResendsLate(1, Scenario(consistency=policy, faults=Faults(), script=script))
    history = cluster.run()
    cluster.check()
    assert history.prompt_s is not None
    waited_s = [each.waited_s for each in history.decided if len(each.contributors) == 2]
    assert max(waited_s) == pytest.approx(TIMEOUT_S, abs=history.prompt_s)
