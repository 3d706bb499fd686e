"""What the errors say of processes and runs that have ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paramserve.engine.base import Failure
from paramserve.errors import CannotPlace, ClientClosed, ParamServeError, RunTimeout
from paramserve.launch.entries import (
    COORDINATOR,
    Entry,
    Key,
    gone,
    stopped,
    timed_out,
    worker_failed,
)

SERVER, WORKER = Key("server", 0), Key("worker", 0)


@pytest.mark.parametrize(
    ("key", "error_of"), [(COORDINATOR, gone), (SERVER, gone), (WORKER, worker_failed)]
)
def test_process_that_found_no_place_is_told_as_that(
    key: Key, error_of: Callable[[Entry], ParamServeError]
) -> None:
    error = CannotPlace("no node is free", fix="add one")
    failure = Failure("CannotPlace", str(error), "Traceback", error.failed, error.fix)
    found = error_of(Entry(key, failure=failure))
    assert isinstance(found, CannotPlace)
    assert (found.failed, found.applied, found.fix) == ("no node is free", "no", "add one")


def test_end_is_told_with_what_the_engine_knows() -> None:
    entry = Entry(WORKER, status=-9, why="its node is lost\nand more")
    assert "was killed by SIGKILL (its node is lost) before" in str(worker_failed(entry))


def test_worker_failed_silent_says_what_makes_a_process_silent() -> None:
    error = worker_failed(Entry(WORKER, silent=True, status=-9))  # that was the supervisor
    assert "worker 0 gave no sign of life" in error.failed
    for cause in ("Deadlines(stall_s=", "stopped process", "swapping", "GIL"):
        assert cause in error.fix
    assert "sys.exit" not in error.fix


def test_timed_out_names_the_workers_that_are_not_done() -> None:
    returned, retired = Entry(WORKER, returned=b""), Entry(Key("worker", 3), retire_by=1.0)
    retired.status = 0
    waiting = [Entry(Key("worker", rank)) for rank in (1, 2)]
    error = timed_out(5.0, [returned, *waiting, retired])
    assert isinstance(error, RunTimeout)
    assert error.failed.endswith("timeout_s=5.0; not done: workers 1, 2")
    assert timed_out(5.0, waiting[:1]).failed.endswith("not done: worker 1")


@pytest.mark.parametrize(
    ("workers", "text"), [(True, "the run was stopped"), (False, "the cluster was closed")]
)
def test_stopped_says_what_it_was(workers: bool, text: str) -> None:
    error = stopped(2.04, workers=workers)
    assert isinstance(error, ClientClosed)
    assert error.failed == f"{text} after 2.0 s"
