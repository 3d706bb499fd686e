"""Public test kit: simulated clusters, checkers of what every run must keep, conformance suites."""

from __future__ import annotations

from paramserve.testing import checkers
from paramserve.testing.checkers import Violation, check
from paramserve.testing.counting import Counting
from paramserve.testing.history import Call, History, Part, Row
from paramserve.testing.nemesis import (
    ScriptedFault,
    cut,
    join,
    kill,
    leave,
    set_policy,
    slow,
    stop,
)
from paramserve.testing.network import Faults
from paramserve.testing.scenario import Scenario
from paramserve.testing.simulated import SimulatedCluster, replay
from paramserve.testing.workload import Parameters, Pushed, Setting, Workload

__all__ = [
    "SimulatedCluster",
    "Scenario",
    "Faults",
    "replay",
    "ScriptedFault",
    "kill",
    "stop",
    "cut",
    "slow",
    "join",
    "leave",
    "set_policy",
    "Workload",
    "Parameters",
    "Setting",
    "Counting",
    "Pushed",
    "History",
    "Call",
    "Part",
    "Row",
    "check",
    "checkers",
    "Violation",
]
