"""What the errors say of processes and runs that have ended."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.suites import each_case

from paramserve.engine.base import Failure
from paramserve.engine.child import describe
from paramserve.errors import (
    CannotPlace,
    ClientClosed,
    DtypeMismatch,
    Overloaded,
    ParamServeError,
    RunTimeout,
)
from paramserve.launch.entries import (
    COORDINATOR,
    Entry,
    Key,
    over,
    process_failure,
    started_again,
    stopped,
    timed_out,
    worker_failed,
)

SERVER, WORKER = Key("server", 0), Key("worker", 0)


@each_case(
    ("key", "error_of"),
    [(COORDINATOR, process_failure), (SERVER, process_failure), (WORKER, worker_failed)],
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


@each_case(("workers", "text"), [(True, "the run was stopped"), (False, "the cluster was closed")])
def test_stopped_says_what_it_was(workers: bool, text: str) -> None:
    error = stopped(2.04, workers=workers)
    assert isinstance(error, ClientClosed)
    assert error.failed == f"{text} after 2.0 s"


@each_case(
    ("workers", "early", "told"),
    [
        (True, False, "the run has finished after 2.0 s. Applied: no. To fix: read .* job.wait"),
        (True, True, "the run was stopped after 2.0 s. Applied: no. To fix: read .* job.wait"),
        (False, True, "the cluster was closed after 2.0 s. Applied: no. To fix: start it again"),
    ],
)
def test_what_is_asked_after_the_end_is_told_how_it_ended(
    workers: bool, early: bool, told: str
) -> None:
    with pytest.raises(ClientClosed, match=told):
        raise over(2.04, workers=workers, stopped=early)


def raised(error: Exception) -> Failure:
    """What a process reports of an exception."""
    try:
        raise error
    except Exception as caught:
        return msgspec.msgpack.decode(describe(caught), type=Failure)


def test_worker_that_raised_is_told_with_one_message_and_its_traceback() -> None:
    error = LookupError("no batch 3")
    error.add_note("of the second epoch")
    text = str(worker_failed(Entry(WORKER, failure=raised(error)), "start it again"))
    assert text.startswith("worker 0 raised LookupError: no batch 3\nof the second epoch\n\nTrace")
    assert text.count("no batch 3") == text.count("second epoch") == text.count("Applied:") == 1
    assert "test_entries.py" in text
    assert text.endswith(
        "\n\nApplied: unknown. To fix: fix the training function, or start it again. "
        "More: docs/reference.md#pserrorsworkerfailed"
    )
    assert "start it again" not in str(worker_failed(Entry(WORKER, failure=raised(error))))


def test_worker_that_is_started_again_is_told_in_one_line() -> None:
    failed = Entry(WORKER, failure=raised(LookupError("no batch 3\nof the second epoch")))
    assert started_again(failed, 3) == (
        "worker 0 raised LookupError: no batch 3; it is started again (1 of 3)"
    )
    killed = Entry(WORKER, status=-9, restarts=2)
    assert started_again(killed, 3) == (
        "worker 0 was killed by SIGKILL; it is started again (3 of 3)"
    )


def test_worker_that_was_refused_is_told_with_the_fix_of_that_error() -> None:
    refused = DtypeMismatch("'w' is float32, got int64", fix="convert it")
    error = worker_failed(Entry(WORKER, failure=raised(refused), restarts=2), "start it again")
    assert (error.applied, error.fix) == ("no", "convert it")
    text = str(error)
    head = (
        "worker 0 raised DtypeMismatch: 'w' is float32, got int64 (it had been restarted 2 times)"
    )
    assert text.startswith(head)
    again = worker_failed(Entry(WORKER, failure=raised(refused), restarts=1))
    assert "(it had been restarted once)" in str(again)
    for part in ("'w' is float32", "Applied:", "To fix:"):
        assert text.count(part) == 1


def test_value_error_with_a_fix_of_its_own_is_told_with_that_one() -> None:
    refused = ValueError("'w' differs. Applied: no. To fix: load the same on every rank")
    error = worker_failed(Entry(WORKER, failure=raised(refused)))
    assert (error.applied, error.fix) == ("no", "load the same on every rank")
    text = str(error)
    assert text.startswith("worker 0 raised ValueError: 'w' differs\n\nTraceback")
    for part in ("'w' differs", "Applied:", "To fix:"):
        assert text.count(part) == 1


def test_server_that_raised_is_told_with_the_fix_of_its_error() -> None:
    error = process_failure(Entry(SERVER, failure=raised(Overloaded("no room", fix="make some"))))
    assert (type(error).__name__, error.fix) == ("ServerGone", "make some")
    assert str(error).count("no room") == 1


def test_error_that_has_parts_of_another_kind_is_told_whole() -> None:
    class Odd(Exception):
        failed = 3

    assert "raised Odd: why" in str(worker_failed(Entry(WORKER, failure=raised(Odd("why")))))
