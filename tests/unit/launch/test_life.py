"""The life of a cluster, by scripts and in any order of events: nothing here starts or waits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.suites import each_case
from tests.unit.launch.worlds import DEADLINES, START_S, World, failure

from paramserve.errors import (
    CheckpointError,
    ClientClosed,
    ConnectTimeout,
    CoordinatorGone,
    RunTimeout,
    ServerGone,
    WorkerFailed,
)
from paramserve.launch.entries import CAUSE_S, COORDINATOR, Key
from paramserve.launch.life import (
    ABANDON_S,
    KILL_S,
    SAME_MAX,
    Abandon,
    Begin,
    Breakdown,
    CheckpointFailed,
    Close,
    Collect,
    Collected,
    End,
    Report,
    Select,
    Serving,
    Silence,
    Stop,
)
from paramserve.launch.roster import Interrupt, Kill, Launch, Restart

SERVER, WORKER, OTHER = Key("server", 0), Key("worker", 0), Key("worker", 1)
DAMAGED = Report(SERVER, "failed", failure("CheckpointDamaged", "a hash differs"))
RETURNED = (Report(WORKER, "returned", b""), Report(OTHER, "returned", b""))


def served(**options: Any) -> World:
    world = World(**options)
    world.serve()
    return world


def resumable(**options: Any) -> World:
    return served(resumes=True, collects=True, **options)


# --- starting ------------------------------------------------------------------------------------


def test_begin_launches_all_and_serves_once_when_servers_are_ready() -> None:
    world = World()
    assert world.of(Launch) == [Launch((COORDINATOR, SERVER, WORKER, OTHER))]
    world.step(Report(COORDINATOR, "ready", b""))
    assert world.life.state == "starting"
    world.step(Report(SERVER, "ready", b""))
    world.step()
    assert (world.life.state, len(world.of(Serving))) == ("running", 1)


def test_begin_elsewhere_launches_the_others_when_the_coordinator_is_ready() -> None:
    world = World(shares_host=False)
    assert world.of(Launch) == [Launch((COORDINATOR,))]
    world.step(Report(COORDINATOR, "ready", b""), after_s=START_S / 2)
    assert world.of(Launch)[1:] == [Launch((SERVER, WORKER, OTHER))]
    world.step(after_s=START_S * 0.75)
    assert not world.life.ending, "each start has its own time"
    world.settle()
    assert isinstance(world.life.error, ConnectTimeout)


# --- the end -------------------------------------------------------------------------------------


@each_case("collects", [True, False])
def test_finished_life_collects_before_it_ends(collects: bool) -> None:
    world = served(collects=collects)
    world.step(*RETURNED)
    world.settle()
    kinds = [type(each) for each in world.effects if isinstance(each, Collect | End | Close)]
    assert kinds == [Collect, End, Close] if collects else [End, Close]
    assert (world.life.outcome, world.life.error) == ("finished", None)


def test_finished_life_that_cannot_be_collected_fails_for_that() -> None:
    world = served(collects=True, collects_at_once=False)
    world.step(*RETURNED)
    why = LookupError("unread")
    world.step(Collected(why))
    assert (world.life.outcome, world.life.error) == ("failed", why)


@each_case("collected", [None, LookupError("unread")])
def test_failure_collects_once_and_stays_the_reason(collected: LookupError | None) -> None:
    world = served(collects=True, collects_at_once=False)
    world.end(WORKER)
    assert world.of(Interrupt) == [Interrupt((OTHER,))]
    world.step()
    assert len(world.of(Collect)) == 1
    world.step(Collected(collected))
    world.settle()
    assert isinstance(world.life.error, WorkerFailed)
    assert world.of(End) == [End(world.life.error, serving=True)]


def test_server_that_ends_while_a_failed_life_is_read_does_not_hide_why() -> None:
    world = served(collects=True, collects_at_once=False)
    world.end(WORKER)
    world.step()
    world.end(SERVER)
    assert isinstance(world.life.error, WorkerFailed)


def test_failure_before_the_servers_are_up_is_not_collected() -> None:
    world = World(collects=True)
    world.end(WORKER)
    assert isinstance(world.life.error, WorkerFailed)
    assert world.of(Collect) == []


def test_worker_and_server_that_end_together_tell_of_the_server() -> None:
    world = served()
    world.end(WORKER, SERVER)
    assert isinstance(world.life.error, ServerGone)


def test_time_limit_ends_the_life_unless_it_ends_already() -> None:
    world = served(timeout_s=100.0)
    assert world.life.wake_at == 100.0
    world.step(after_s=100.0)
    assert isinstance(world.life.error, RunTimeout)
    world = served(timeout_s=100.0, collects=True, collects_at_once=False)
    world.step(*RETURNED)
    world.step(after_s=200.0)
    assert (world.life.state, world.life.ending) == ("finishing", False)


@each_case("strict", [True, False])
def test_checkpoint_that_fails_ends_a_strict_life_only(strict: bool) -> None:
    world = served(strict=strict)
    world.step(CheckpointFailed("no space left"))
    assert isinstance(world.life.error, CheckpointError) == strict
    assert world.life.ending == strict


def test_stop_dismisses_workers_and_collects() -> None:
    world = served(collects=True)
    world.step(Stop())
    assert world.of(Interrupt)[0] == Interrupt((WORKER, OTHER))
    world.settle()
    assert (world.life.outcome, world.life.error) == ("stopped", None)
    assert len(world.of(Collect)) == 1


def test_stop_before_the_servers_are_up_kills_workers_that_do_not_end() -> None:
    world = World(collects=True, deaf=["worker"])
    world.step(Stop())
    world.step(after_s=DEADLINES.stop_s - 0.1)
    assert world.of(Kill) == []
    world.settle()
    assert world.of(Kill)[0] == Kill((WORKER, OTHER))
    assert (world.life.outcome, world.of(Collect)) == ("stopped", [])


def test_end_interrupts_the_coordinator_last_and_waits_for_what_does_not_end() -> None:
    world = served(deaf=["server"])
    world.end(WORKER)
    assert world.of(Interrupt)[-1] == Interrupt((OTHER, SERVER, COORDINATOR))
    assert not world.life.over
    world.step(after_s=DEADLINES.stop_s)
    assert world.life.over


def test_worker_that_has_returned_may_end_in_order_for_a_while_and_is_then_late() -> None:
    world = served()
    world.step(*RETURNED)
    assert OTHER not in world.of(Interrupt)[-1].keys
    world.step(after_s=DEADLINES.exit_s - 0.1)
    assert not world.life.over
    world.end(WORKER, status=0)
    world.settle()
    assert world.of(Close) == [Close((OTHER,))]


@each_case("when", ["starting", "running", "finishing", "resuming", "ending"])
def test_abandon_ends_it_soon_whatever_it_does(when: str) -> None:
    everything = ["coordinator", "server", "worker"]
    spared = everything if when == "resuming" else []
    world = World(
        deaf=everything, immortal=spared, collects=True, collects_at_once=False, resumes=True
    )
    if when != "starting":
        world.serve()
    if when == "finishing":
        world.step(*RETURNED)
    elif when == "resuming":
        world.end(SERVER)
    elif when == "ending":
        world.step(Breakdown(LookupError("broken")))
    assert when in (world.life.state, "ending")
    world.step(Abandon())
    assert world.life.outcome == "stopped"
    assert isinstance(world.life.error, ClientClosed | LookupError)
    world.step(after_s=ABANDON_S)
    assert world.of(Close) == [Close()]


def test_breakdown_ends_it_and_a_second_one_closes_at_once() -> None:
    world = served(deaf=["server"])
    why = OSError("no more processes")
    world.step(Breakdown(why))
    assert not world.life.over
    world.step(Breakdown(LookupError("close")))
    assert world.life.over
    assert world.life.error is why
    world.step(Breakdown(LookupError("forget")))
    assert (world.life.outcome, world.life.error) == ("failed", why)


# --- going on from a checkpoint ------------------------------------------------------------------


@each_case(
    ("lost", "error"), [(SERVER, ServerGone), (COORDINATOR, CoordinatorGone)], ids=["s", "c"]
)
def test_lost_server_begins_again_from_the_newest_checkpoint(
    lost: Key, error: type[Exception]
) -> None:
    world = resumable(found=["a/step-4"])
    world.life.roster.scale(3, world.now)
    world.end(lost)
    (begin,) = world.of(Begin)
    assert (type(begin.cause), begin.damaged, begin.workers) == (error, False, 3)
    assert world.of(Launch)[-1].keys[:2] == (COORDINATOR, SERVER)
    assert world.life.state == "resuming"
    assert world.life.roster.start_by == world.now + START_S + 5.0, "servers read it first"
    world.serve()
    assert world.life.state == "running"


def test_next_attempt_waits_for_the_end_of_each_old_process_but_not_for_ever() -> None:
    world = resumable(immortal=["worker"])
    world.end(SERVER)
    assert world.of(Begin) == []
    world.end(WORKER)
    assert world.of(Begin) == []
    world.end(OTHER)
    assert len(world.of(Begin)) == 1
    world = resumable(immortal=["worker"])
    world.end(SERVER)
    world.step(after_s=KILL_S)
    assert isinstance(world.life.error, ServerGone)
    assert world.of(Begin) == []


@each_case("why", ["told to", "without", "starting", "stopped", "failed"])
def test_lost_server_ends_it_where_it_does_not_go_back(why: str) -> None:
    resumes = {"told to": False, "without": None}.get(why, True)
    world = World(
        resumes=resumes, collects=True, collects_at_once=False, deaf=["worker"], found=["a/step-4"]
    )
    if why != "starting":
        world.serve()
    if why == "stopped":
        world.step(Stop())
    elif why == "failed":
        world.end(OTHER)
    world.end(SERVER)
    assert isinstance(world.life.error, WorkerFailed if why == "failed" else ServerGone)
    assert world.of(Select) == []
    if why in ("told to", "starting"):
        assert "resume=True" in world.life.error.fix


def test_same_checkpoint_is_not_gone_back_to_for_ever() -> None:
    world = resumable(found=["a/step-1"])
    for number in range(SAME_MAX):
        world.end(SERVER if number % 2 else COORDINATOR)
        if number % 3:
            world.serve()
    assert not world.life.ending
    world.end(SERVER)
    assert isinstance(world.life.error, ServerGone)
    assert f"ended {SAME_MAX + 1} times since that checkpoint" in world.life.error.fix
    world = resumable(found=[f"a/step-{number // SAME_MAX}" for number in range(20)])
    for _ in range(20):
        world.end(SERVER)
        world.serve()
    assert not world.life.ending, "each time from a newer one"


def test_damaged_checkpoint_is_refused_and_never_tried_again() -> None:
    world = resumable(found=["a/step-2", "a/step-1", "a/step-2"])
    world.end(SERVER)
    world.step(DAMAGED)
    assert [each.damaged for each in world.of(Begin)] == [False, True]
    world.serve()
    world.end(SERVER)
    assert isinstance(world.life.error, ServerGone), "step-2 would be refused again"
    assert len(world.of(Begin)) == 2


def test_damaged_checkpoint_of_a_first_start_is_refused_also_without_any_of_its_own() -> None:
    world = World(resumes=False, checkpoint="old/step-9", found=["old/step-8"])
    world.step(DAMAGED)
    assert len(world.of(Begin)) == 1
    world.end(SERVER)
    assert isinstance(world.life.error, ServerGone), "it was never up"


def test_life_without_a_usable_checkpoint_ends_with_that_and_its_cause() -> None:
    world = resumable(found=["none"])
    world.end(SERVER)
    assert isinstance(world.life.error, CheckpointError)
    assert isinstance(world.life.error.__cause__, ServerGone)


def test_stop_while_it_goes_back_waits_for_the_values_of_the_checkpoint() -> None:
    world = resumable()
    world.end(SERVER)
    world.step(Stop())
    assert (world.life.state, world.life.ending) == ("resuming", False)
    world.serve()
    world.settle()
    assert world.life.outcome == "stopped"
    assert len(world.of(Collect)) == 1


def test_server_lost_while_values_are_read_goes_back_and_reads_again() -> None:
    world = resumable(collects_at_once=False)
    world.step(*RETURNED)
    world.end(SERVER)
    world.step(Collected(ServerGone("gone", fix="none")))
    assert not world.life.ending, "that was of the attempt before"
    world.serve()
    world.step(*RETURNED)
    world.step(Collected())
    assert (world.life.outcome, world.life.error) == ("finished", None)


def test_silent_worker_is_killed_once_and_replaced() -> None:
    world = served(on_worker_death=Restart(1))
    old = world.running[WORKER]
    for _ in range(3):
        world.step(Silence(WORKER, 1))
    assert world.of(Kill) == [Kill((WORKER,))]
    assert world.running[WORKER] != old


# --- any order -----------------------------------------------------------------------------------

KEYS = [COORDINATOR, SERVER, WORKER, OTHER, Key("worker", 2)]
WORKERS = st.sampled_from(KEYS[2:])
KINDS = ["ServerGone", "ValueError", "DefineMismatch", "CheckpointDamaged", "ConnectTimeout"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("end"), WORKERS.map(lambda key: [key])),
        st.tuples(st.just("end"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)),
        st.tuples(st.just("fail"), st.tuples(st.sampled_from(KEYS), st.sampled_from(KINDS))),
        st.tuples(st.just("return"), WORKERS),
        st.tuples(st.just("silence"), st.sampled_from(KEYS)),
        st.tuples(st.just("serve"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.1, CAUSE_S, 3.0, 61.0])),
        st.tuples(st.just("scale"), st.integers(1, 3)),
        st.tuples(st.just("collected"), st.sampled_from([None, LookupError("unread")])),
        st.tuples(
            st.just("event"),
            st.sampled_from([Stop(), Abandon(), CheckpointFailed("full"), Breakdown(OSError())]),
        ),
    ),
    max_size=25,
)
SPARED = st.lists(st.sampled_from(["coordinator", "server", "worker"]), unique=True, max_size=2)


def happen(world: World, what: str, about: Any) -> None:
    """Let one of `STEPS` happen, if it can."""
    life = world.life
    entries = life.roster.entries
    if what == "end":
        world.end(*about)
    elif what == "fail" and about[0] in world.running:
        world.step(Report(about[0], "failed", failure(about[1])))
    elif what == "return" and about in world.running:
        world.step(Report(about, "returned", b""))
    elif what == "silence" and about in world.running:
        world.step(Silence(about, entries[about].incarnation))
    elif what == "serve" and not life.ending:
        world.serve()
    elif what == "wait":
        world.step(after_s=about)
    elif what == "scale" and life.state == "running" and not (life.stopped or life.ending):
        keys = life.roster.scale(about, world.now)
        world._launch(keys)
        world.step()
    elif what == "collected" and world.collecting:
        world.collecting = False
        world.step(Collected(about))
    elif what == "event":
        world.step(about)


@settings(max_examples=300, deadline=None)
@given(
    up=st.sampled_from([True, True, True, False]),
    steps=STEPS,
    deaf=SPARED,
    immortal=SPARED,
    death=st.sampled_from(["stop", "continue", "continue", Restart(1), Restart(2)]),
    resumes=st.sampled_from([None, False, True]),
    strict=st.booleans(),
    collects=st.booleans(),
    shares_host=st.booleans(),
    found=st.lists(st.sampled_from(["", "a/1", "a/2", "none"]), min_size=1, max_size=5),
    timeout_s=st.sampled_from([None, 50.0]),
)
def test_life_in_any_order_of_events_keeps_its_promises(
    up: bool, steps: list[tuple[str, Any]], death: Any, **options: Any
) -> None:
    """`World` asserts them after each step: no two attempts at once, each end counted once, none
    restarted past its limit, no refused checkpoint again, one end with a reason, each wait with a
    deadline."""
    world = World(
        on_worker_death=death, collects_at_once=False, checkpoint="a/1" * bool(steps), **options
    )
    if up:
        world.serve()
        world.serve()  # those that only then were launched, elsewhere
    for what, about in steps:
        happen(world, what, about)
    world.step(Abandon())
    world.settle()
    assert world.life.over
    assert len(world.of(End)) == 1


def test_life_whose_processes_do_nothing_ends_by_itself() -> None:
    """Before it is up, and after it is told to end: nothing waits for an event that never comes."""
    everything = ["coordinator", "server", "worker"]
    for stops in (True, False):
        world = World(deaf=everything, immortal=everything, collects=True)
        if stops:
            world.step(Stop())
        world.settle()
        assert world.life.over


@pytest.mark.parametrize("times", [1, 3])
def test_worker_is_replaced_so_often_and_then_fails_the_life(times: int) -> None:
    world = served(on_worker_death=Restart(times))
    for _ in range(times + 1):
        world.end(WORKER)
    assert isinstance(world.life.error, WorkerFailed)
    assert sum(1 for each in world.of(Launch) if each.keys == (WORKER,)) == times
