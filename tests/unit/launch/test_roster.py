"""Which error a run ends with, whatever order its processes fall in."""

from __future__ import annotations

import msgspec
import pytest
from tests.suites import each_case

from paramserve.config import Deadlines
from paramserve.engine.base import Failure
from paramserve.errors import ConnectTimeout, CoordinatorGone, ServerGone, WorkerFailed
from paramserve.launch.entries import CAUSE_S, COORDINATOR, Entry, Key
from paramserve.launch.roster import (
    Decision,
    Exclude,
    Interrupt,
    Kill,
    Launch,
    OnWorkerDeath,
    Replace,
    Restart,
    Retire,
    Roster,
)

START_BY = 60.0
RETIRE_S, STOP_S = 30.0, 2.0
FIRST = 1
"""The incarnation of a worker that was never restarted."""
SERVER, WORKER, OTHER = Key("server", 0), Key("worker", 0), Key("worker", 1)


def running(on_worker_death: OnWorkerDeath = "stop", servers: int = 1, workers: int = 2) -> Roster:
    deadlines = Deadlines(retire_s=RETIRE_S, stop_s=STOP_S)
    roster = Roster(servers, workers, on_worker_death, START_BY, deadlines)
    for key in roster.entries:
        roster.on_report(key, "ready", msgspec.msgpack.encode(FIRST), now=1.0)
    return roster


def replaced(decision: Decision) -> list[Entry]:
    """The workers that are started again, as they died."""
    return [each.entry for each in decision.effects if isinstance(each, Replace)]


def raised(kind: str, text: str = "why") -> bytes:
    return msgspec.msgpack.encode(Failure(kind, text, f"Traceback of {kind}"))


def test_processes_start_with_coordinator_then_servers_then_workers() -> None:
    keys = [str(key) for key in Roster(2, 1, "stop", START_BY).entries]
    assert keys == ["coordinator", "server 0", "server 1", "worker 0"]


def test_all_returned_is_finished_even_before_the_processes_end() -> None:
    roster = running()
    roster.on_report(WORKER, "returned", b"a", 2.0)
    assert roster.decide(2.0) == Decision()
    roster.on_report(OTHER, "returned", b"b", 3.0)
    assert roster.decide(3.0).finished
    assert [entry.returned for entry in roster.workers()] == [b"a", b"b"]


def test_returned_worker_may_end_as_it_likes() -> None:
    roster = running()
    roster.on_report(WORKER, "returned", b"", 2.0)
    roster.on_end(WORKER, -11, 2.1)
    assert roster.decide(5.0) == Decision()


def test_cluster_without_workers_never_finishes() -> None:
    assert running(workers=0).decide(5.0) == Decision()


def test_worker_that_raises_fails_the_run_with_its_traceback() -> None:
    roster = running()
    roster.on_report(OTHER, "failed", raised("ZeroDivisionError", "division by zero"), 2.0)
    error = roster.decide(2.0).error
    assert isinstance(error, WorkerFailed)
    assert "worker 1 raised ZeroDivisionError: division by zero" in str(error)
    assert "Traceback of ZeroDivisionError" in str(error)


@each_case(
    ("status", "words"),
    [(-9, "was killed by SIGKILL"), (0, "exited with code 0"), (7, "exited with code 7")],
)
def test_worker_that_ends_without_returning_fails_the_run(status: int, words: str) -> None:
    roster = running()
    roster.on_end(WORKER, status, 2.0)
    error = roster.decide(2.0).error
    assert isinstance(error, WorkerFailed)
    assert f"worker 0 {words} before its function returned" in str(error)


@each_case("status", [-9, 1])
def test_servers_end_fails_the_run_at_once(status: int) -> None:
    roster = running("continue")
    roster.on_end(SERVER, status, 2.0)
    assert isinstance(roster.decide(2.0).error, ServerGone)


def test_coordinators_end_fails_the_run_at_once() -> None:
    roster = running("continue")
    roster.on_end(COORDINATOR, -9, 2.0)
    assert isinstance(roster.decide(2.0).error, CoordinatorGone)


def test_worker_that_complains_of_a_server_waits_for_the_servers_end() -> None:
    roster = running()
    roster.on_report(WORKER, "failed", raised("ServerGone"), 2.0)
    decision = roster.decide(2.0)
    assert decision.error is None
    assert decision.look_again_at == 2.0 + CAUSE_S
    roster.on_end(SERVER, -9, 2.1)
    error = roster.decide(2.1).error
    assert isinstance(error, ServerGone)
    assert "server 0 was killed by SIGKILL" in str(error)


def test_complaint_without_a_cause_becomes_the_workers_own_failure() -> None:
    roster = running()
    roster.on_report(WORKER, "failed", raised("ServerGone"), 2.0)
    assert isinstance(roster.decide(2.0 + CAUSE_S).error, WorkerFailed)


def test_coordinators_end_counts_before_its_consequences() -> None:
    roster = running(servers=2)
    roster.on_end(Key("server", 1), 0, 2.0)  # a server ends in order when the coordinator is gone
    roster.on_report(WORKER, "failed", raised("CoordinatorGone"), 2.0)
    roster.on_report(OTHER, "failed", raised("ServerGone"), 2.0)
    assert roster.decide(2.1).error is None
    roster.on_end(COORDINATOR, -9, 2.2)
    assert isinstance(roster.decide(2.2).error, CoordinatorGone)


def test_server_that_ends_in_order_by_itself_is_gone() -> None:
    roster = running()
    roster.on_end(SERVER, 0, 2.0)
    assert isinstance(roster.decide(2.0 + CAUSE_S).error, ServerGone)


def test_worker_killed_and_another_complaining_reports_the_kill() -> None:
    roster = running()
    roster.on_report(OTHER, "failed", raised("ClientClosed"), 2.0)
    roster.on_end(WORKER, -9, 2.1)
    assert "worker 0 was killed" in str(roster.decide(2.1).error)


def test_continue_goes_on_with_the_rest_and_tells_once() -> None:
    roster = running("continue")
    roster.on_end(WORKER, -9, 2.0)
    assert roster.decide(2.0) == Decision(effects=(Exclude(roster.entries[WORKER]),))
    assert roster.decide(2.1) == Decision()
    roster.on_report(OTHER, "returned", b"", 3.0)
    assert roster.decide(3.0) == Decision(finished=True)


def test_continue_last_worker_returned_before_the_other_died_is_finished() -> None:
    roster = running("continue")
    roster.on_report(OTHER, "returned", b"", 2.0)
    roster.on_end(WORKER, -9, 3.0)
    assert roster.decide(3.0) == Decision(None, (Exclude(roster.entries[WORKER]),), finished=True)


def test_continue_fails_when_all_workers_died() -> None:
    roster = running("continue")
    roster.on_end(WORKER, -9, 2.0)
    roster.decide(2.0)
    roster.on_report(OTHER, "failed", raised("ValueError"), 3.0)
    error = roster.decide(3.0).error
    assert isinstance(error, WorkerFailed)
    assert "worker 1 raised ValueError" in str(error)


def test_continue_does_not_count_a_complaint_before_its_cause_can_show() -> None:
    roster = running("continue", workers=3)
    roster.on_end(WORKER, -9, 2.0)
    roster.on_report(OTHER, "failed", raised("ServerGone"), 2.0)
    decision = roster.decide(2.0)
    assert decision.effects == (Exclude(roster.entries[WORKER]),)
    assert decision.look_again_at == 2.0 + CAUSE_S
    roster.on_end(SERVER, -9, 2.1)
    assert isinstance(roster.decide(2.1).error, ServerGone)


def test_start_that_takes_too_long_names_who_is_missing() -> None:
    roster = Roster(2, 1, "stop", START_BY)
    roster.on_report(COORDINATOR, "ready", b"", 1.0)
    roster.on_report(Key("server", 0), "ready", b"", 1.0)
    assert not roster.serving
    assert roster.decide(START_BY - 1).look_again_at == START_BY
    error = roster.decide(START_BY).error
    assert isinstance(error, ConnectTimeout)
    assert "server 1 not ready" in str(error)


def test_silent_server_is_gone() -> None:
    roster = running()
    roster.on_silence(SERVER, 20.0)
    error = roster.decide(20.0).error
    assert isinstance(error, ServerGone)
    assert "server 0 gave no sign of life" in str(error)


def test_returned_worker_may_be_silent() -> None:
    roster = running()
    roster.on_report(WORKER, "returned", b"", 2.0)
    roster.on_silence(WORKER, 3.0, FIRST)
    assert roster.decide(3.0) == Decision()


def test_restart_dead_worker_is_started_again_and_fails_past_its_times() -> None:
    roster = running(Restart(times=2))
    for times in range(2):
        roster.on_end(WORKER, -9, 2.0 + times)
        decision = roster.decide(2.0 + times)
        assert [(e.key, e.restarts, e.status) for e in replaced(decision)] == [(WORKER, times, -9)]
        assert decision.effects[-1] == Launch((WORKER,))
        assert decision.error is None
        assert roster.worker_states() == {0: "starting", 1: "running"}
    roster.on_end(WORKER, -9, 5.0)
    error = roster.decide(5.0).error
    assert isinstance(error, WorkerFailed)
    assert "had been restarted 2 times" in str(error)


@each_case(
    ("report", "again"),
    [
        (raised("DefineMismatch"), False),
        (raised("CodecMismatch"), False),
        (raised("ValueError", "no. Applied: no. To fix: give another"), False),
        (raised("ValueError"), True),
        (raised("KeyError", "Applied: no. To fix: "), True),
        (raised("PushTimeout"), True),
    ],
)
def test_restart_refusal_that_would_come_again_fails_at_once(report: bytes, again: bool) -> None:
    roster = running(Restart(times=2))
    roster.on_report(WORKER, "failed", report, now=2.0)
    decision = roster.decide(2.0)
    assert bool(replaced(decision)) == again
    assert isinstance(decision.error, WorkerFailed) != again


def test_restart_each_rank_has_its_own_times() -> None:
    roster = running(Restart(times=1))
    roster.on_end(WORKER, -9, 2.0)
    roster.on_end(OTHER, 3, 2.0)
    assert [entry.key for entry in replaced(roster.decide(2.0))] == [WORKER, OTHER]


def test_restart_server_is_not_restarted() -> None:
    roster = running(Restart(times=1))
    roster.on_end(SERVER, -9, 2.0)
    assert isinstance(roster.decide(2.0).error, ServerGone)


def test_silence_of_an_incarnation_that_was_replaced_means_nothing() -> None:
    roster = running(Restart(times=1))
    roster.on_end(WORKER, -9, 2.0)
    roster.decide(2.0)
    roster.on_silence(WORKER, 2.1, FIRST)
    assert roster.decide(2.1) == Decision()
    roster.on_report(WORKER, "ready", msgspec.msgpack.encode(FIRST + 1), 3.0)
    roster.on_silence(WORKER, 3.1, FIRST)
    assert roster.decide(3.1) == Decision()
    roster.on_silence(WORKER, 3.2, FIRST + 1)
    assert isinstance(roster.decide(3.2).error, WorkerFailed)


@each_case(("times", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_restart_times_that_are_wrong_are_named(times: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="times of Restart must be"):
        Restart(times)


def test_dismissed_workers_end_without_meaning() -> None:
    roster = running()
    roster.dismiss_workers()
    roster.on_end(WORKER, 143, 2.0)
    roster.on_end(OTHER, -9, 2.0)
    decision = roster.decide(2.0)
    assert decision.error is None
    assert decision.finished


THIRD = Key("worker", 2)


def test_scale_up_wants_new_ranks_and_waits_for_their_return() -> None:
    roster = running()
    assert roster.scale(4, 2.0) == (THIRD, Key("worker", 3))
    assert roster.worker_states() == {0: "running", 1: "running", 2: "starting", 3: "starting"}
    for key in (WORKER, OTHER, THIRD):
        roster.on_report(key, "returned", b"", 3.0)
    assert not roster.decide(3.0).finished
    roster.on_report(Key("worker", 3), "returned", b"", 4.0)
    assert roster.decide(4.0).finished


def test_scale_up_joiner_that_fails_is_a_failure_like_any_other() -> None:
    roster = running()
    roster.scale(3, 2.0)
    roster.on_report(THIRD, "failed", raised("ZeroDivisionError"), 3.0)
    assert "worker 2 raised ZeroDivisionError" in str(roster.decide(3.0).error)


def test_scale_up_joiner_is_restarted_as_the_others_are() -> None:
    roster = running(Restart(times=1))
    roster.scale(3, 2.0)
    roster.on_end(THIRD, -9, 3.0)
    assert [entry.key for entry in replaced(roster.decide(3.0))] == [THIRD]


def test_scale_to_the_same_number_changes_nothing() -> None:
    roster = running()
    assert roster.scale(2, 2.0) == ()
    assert roster.decide(99.0) == Decision()


@each_case("how", ["returned", "raised", "killed", "silent"])
@each_case("on_worker_death", ["stop", "continue", Restart()])
def test_retiring_worker_may_end_as_it_likes(how: str, on_worker_death: OnWorkerDeath) -> None:
    roster = running(on_worker_death)
    assert roster.scale(1, 2.0) == ()
    assert roster.worker_states() == {0: "running", 1: "retiring"}
    if how == "returned":
        roster.on_report(OTHER, "returned", b"early", 3.0)
    elif how == "raised":
        roster.on_report(OTHER, "failed", raised("KeyError"), 3.0)
    elif how == "silent":
        roster.on_silence(OTHER, 3.0, FIRST)
    assert roster.decide(3.5).error is None
    roster.on_end(OTHER, 0 if how == "returned" else -9, 4.0)
    entry = roster.entries[OTHER]
    assert roster.decide(4.0) == Decision(effects=(Retire(entry),))
    assert roster.decide(5.0) == Decision(), "it is told once"
    assert roster.worker_states() == {0: "running", 1: "retired"}
    assert (entry.returned == b"early") == (how == "returned")


def test_run_is_finished_when_the_retired_have_ended_too() -> None:
    roster = running()
    roster.scale(1, 2.0)
    roster.on_report(WORKER, "returned", b"", 3.0)
    assert not roster.decide(3.0).finished
    roster.on_end(OTHER, 1, 4.0)
    assert roster.decide(4.0).finished


def test_last_worker_that_is_wanted_dies_while_another_retires_fails_the_run() -> None:
    roster = running("continue")
    roster.scale(1, 2.0)
    roster.on_end(WORKER, -9, 3.0)
    assert isinstance(roster.decide(3.0).error, WorkerFailed)


def test_retiring_worker_that_takes_too_long_is_interrupted_then_killed_once() -> None:
    roster = running()
    roster.scale(1, 2.0)
    assert roster.decide(2.0) == Decision(look_again_at=2.0 + RETIRE_S)
    due = 2.0 + RETIRE_S
    assert roster.decide(due) == Decision(None, (Interrupt((OTHER,)),), look_again_at=due + STOP_S)
    assert roster.decide(due + 1) == Decision(look_again_at=due + STOP_S)
    assert roster.decide(due + STOP_S) == Decision(effects=(Kill((OTHER,)),))
    assert roster.decide(99.0) == Decision()


def test_starting_worker_that_is_to_retire_is_ended_at_once() -> None:
    roster = running()
    roster.scale(3, 2.0)
    roster.scale(2, 3.0)
    assert roster.decide(3.0).effects == (Interrupt((THIRD,)),)
    roster.on_end(THIRD, 143, 3.1)
    assert roster.decide(3.1).error is None


def test_rank_that_comes_back_waits_for_the_end_of_its_old_process() -> None:
    roster = running()
    roster.scale(1, 2.0)
    assert roster.scale(2, 3.0) == ()
    assert roster.worker_states() == {0: "running", 1: "retiring"}
    roster.on_report(OTHER, "returned", b"", 4.0)
    roster.on_report(WORKER, "returned", b"", 4.0)
    assert not roster.decide(4.0).finished, "the rank is wanted again"
    roster.on_end(OTHER, 0, 5.0)
    old = roster.entries[OTHER]
    assert roster.decide(5.0).effects == (Retire(old), Launch((OTHER,)))
    assert roster.worker_states() == {0: "returned", 1: "starting"}
    assert roster.decide(6.0) == Decision()
    roster.on_report(OTHER, "returned", b"again", 7.0)
    assert roster.decide(7.0).finished


def test_rank_that_comes_back_and_goes_again_is_not_launched() -> None:
    roster = running()
    roster.scale(1, 2.0)
    roster.scale(2, 3.0)
    roster.scale(1, 4.0)
    roster.on_end(OTHER, 0, 5.0)
    assert roster.decide(5.0).effects == (Retire(roster.entries[OTHER]),)
    assert roster.scale(2, 6.0) == (OTHER,), "its process has ended"
    assert roster.worker_states()[1] == "starting"


def test_scale_that_is_taken_back_leaves_all_as_it_was() -> None:
    roster = running()
    roster.scale(1, 2.0)
    roster.on_report(OTHER, "returned", b"kept", 2.5)
    roster.on_end(OTHER, 0, 3.0)
    roster.decide(3.0)
    before = dict(roster.entries)
    assert roster.scale(3, 4.0) == (OTHER, THIRD)
    roster.take_back()
    assert roster.entries == before
    assert roster.target == 1
    roster.on_report(WORKER, "returned", b"", 5.0)
    assert roster.decide(5.0).finished


def test_dismissed_workers_do_not_come_back() -> None:
    roster = running()
    roster.scale(1, 2.0)
    roster.scale(2, 3.0)
    roster.dismiss_workers()
    roster.on_end(OTHER, 0, 4.0)
    assert roster.decide(4.0) == Decision(finished=True)
