"""What holds for every test: a run that ends leaves no process behind."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator
from importlib import import_module

import psutil
import pytest
from tests.ray.nodes import ray_cluster as ray_cluster  # fixtures: one cluster for all suites
from tests.ray.nodes import ray_nodes as ray_nodes
from tests.seconds import Seconds

GRACE_S = 3.0
"""Children that end by themselves may take this long after the last test."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background of a shell without job control; what tests start and interrupt inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Seconds())


def pytest_collection_finish() -> None:
    """Leave what was imported and collected, which stays to the end, out of garbage collections:
    there are many, and the search for schedulers walks over all objects as they do."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Use one thread, as workers do: a convolution's sums depend on the number of threads.

    And two test processes share the cores: torch's threads would spin while they wait for these."""
    with contextlib.suppress(ImportError):
        import_module("torch").set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_child_is_left() -> Iterator[None]:
    """Fail the session if a child process outlives the tests that started it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(started, timeout=GRACE_S)
    assert not alive, f"processes left behind by the tests: {[describe(one) for one in alive]}"


def describe(process: psutil.Process) -> str:
    """Pid and command line, as far as the process still tells."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}: ended"
