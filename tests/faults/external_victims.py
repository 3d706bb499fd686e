"""A training function that agents import: it has no arguments, so the environment says the rest."""

from __future__ import annotations

import os

from tests.faults import victims

import paramserve as ps

PIPE = "PARAMSERVE_TEST_PIPE"
AT = 5


def regress(worker: ps.Worker) -> int:
    """As `victims.regress`; tells at step `AT`."""
    return victims.regress(worker, os.environ[PIPE], AT)


def fail(worker: ps.Worker) -> int:
    """Raises on rank 1."""
    return victims.fail_on(worker, rank=1, step=3)
