"""Public test kit: simulated clusters, checkers of what every run must keep, conformance suites."""

from __future__ import annotations

from paramserve_testing import checkers
from paramserve_testing.checkers import Violation, check
from paramserve_testing.counting import Counting
from paramserve_testing.history import Call, History, Part, Row
from paramserve_testing.nemesis import (
    ScriptedFault,
    cut,
    join,
    kill,
    leave,
    set_policy,
    slow,
    stop,
)
from paramserve_testing.network import Faults
from paramserve_testing.scenario import Scenario
from paramserve_testing.simulated import SimulatedCluster, replay
from paramserve_testing.workload import Parameters, Pushed, Setting, Workload

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
