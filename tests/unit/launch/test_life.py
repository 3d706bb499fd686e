"""The life of a cluster, by scripts and in any order of events: nothing here starts or waits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

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
    Ask,
    Begin,
    Breakdown,
    CheckpointFailed,
    Close,
    Collect,
    Collected,
    Done,
    End,
    Event,
    ProcessEnd,
    Report,
    Request,
    Select,
    Selection,
    Serving,
    Silence,
    Standing,
    Stop,
)
from paramserve.launch.roster import Exclude, Interrupt, Kill, Launch, Replace, Restart
from paramserve.messages import Member

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


@each_case("ends", [Abandon(), Stop(), ProcessEnd(COORDINATOR, -9)])
def test_coordinator_that_is_up_as_it_ends_launches_no_others(ends: Event) -> None:
    world = World(shares_host=False, resumes=True, deaf=["coordinator"])
    if isinstance(ends, ProcessEnd):
        del world.running[COORDINATOR]
    world.step(Report(COORDINATOR, "ready", b""), ends)
    world.step(Report(COORDINATOR, "ready", b""))
    assert world.of(Launch) == [Launch((COORDINATOR,))]


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


def test_stop_collects_when_the_last_worker_has_ended() -> None:
    world = served(collects=True, deaf=["worker"])
    world.step(Stop())
    world.step(after_s=DEADLINES.stop_s / 2)
    world.end(WORKER)
    assert (world.life.state, world.of(Collect)) == ("running", [])
    world.step(after_s=DEADLINES.stop_s / 2)
    world.step()
    assert (world.of(Kill)[0], len(world.of(Collect))) == (Kill((OTHER,)), 1)


@each_case("why", [Stop(), CheckpointFailed("full"), Request(ServerGone("told", fix="")), None])
@each_case("others", [(), (OTHER,)])
def test_worker_that_dies_as_the_life_is_to_end_is_not_restarted(
    why: Event | None, others: tuple[Key, ...]
) -> None:
    world = served(
        collects=True,
        collects_at_once=False,
        strict=True,
        timeout_s=100.0,
        on_worker_death=Restart(3),
        workers=1 + len(others),
    )
    world.now = 99.0 if why is not None else 100.0
    world.end(WORKER, beside=[why] if why is not None else [])
    assert WORKER not in world.running
    assert (world.of(Replace), [each.entry.key for each in world.of(Exclude)]) == ([], [WORKER])
    assert world.of(Interrupt) == [Interrupt(others)]
    assert len(world.of(Collect)) == 1
    world.step(Collected())
    world.settle()
    assert world.life.outcome == ("stopped" if isinstance(why, Stop) else "failed")


def test_rank_that_is_wanted_again_is_not_started_as_the_life_is_stopped() -> None:
    world = served(deaf=["worker"], collects=True)
    world.scale(1)
    world.scale(2)
    world.end(OTHER, beside=[Stop()])
    assert OTHER not in world.running


@each_case("kind", ["server", "worker"])
def test_failure_that_comes_with_a_stop_is_still_told(kind: str) -> None:
    world = served(on_worker_death=Restart(1))
    refused = Report(WORKER, "failed", failure("DefineMismatch"))
    world.end(*([SERVER] if kind == "server" else []), beside=[Stop(), refused])
    assert isinstance(world.life.error, ServerGone if kind == "server" else WorkerFailed)


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


@each_case("reads", [True, False])
def test_request_to_end_is_granted_once_the_values_are_read(reads: bool) -> None:
    world = served(collects=reads)
    why = ServerGone("server 1 was told to end", fix="none")
    world.step(Request(why))
    world.settle()
    assert (world.life.error, len(world.of(Collect))) == (why, int(reads))
    world = served(collects=True, collects_at_once=False)
    world.step(*RETURNED)
    world.step(Request(why))
    world.step(Collected())
    assert world.life.outcome == "finished", "it ended already"


@each_case("first", [Request(ServerGone("told to end", fix="")), CheckpointFailed("full")])
def test_stop_makes_an_end_in_order_of_what_was_requested_only(first: Event) -> None:
    world = served(collects=True, collects_at_once=False, strict=True)
    world.step(first)
    world.step()
    world.step(Stop())
    world.step(Collected())
    assert world.life.outcome == ("stopped" if isinstance(first, Request) else "failed")
    assert len(world.of(Collect)) == 1


def test_done_is_an_end_in_order_also_without_workers_of_its_own() -> None:
    world = served(servers=0, workers=0)
    world.step(Done())
    assert (world.life.outcome, world.life.over) == ("finished", True)


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


def test_checkpoint_is_looked_for_as_long_as_it_takes_once_all_have_ended() -> None:
    life = World(resumes=True, workers=0).life
    for key in (COORDINATOR, SERVER):
        life.roster.on_launch(key)
        life.step([Report(key, "ready", b"")], 0.0)
    effects = life.step([ProcessEnd(SERVER, -9)], 1.0)
    assert [type(each) for each in effects] == [Ask, Kill]
    effects = life.step([ProcessEnd(COORDINATOR, -9)], 2.0)
    assert [type(each) for each in effects] == [Select]
    assert life.step([], 2.0 * KILL_S) == [], "asked once"
    effects = life.step([Selection("a/step-4")], 3.0 * KILL_S)
    assert [type(each) for each in effects] == [Begin, Launch]


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


@each_case("together", [False, True])
def test_server_lost_while_values_are_read_goes_back_and_reads_again(together: bool) -> None:
    world = resumable(collects_at_once=False)
    world.step(*RETURNED)
    unread = Collected(ServerGone("gone", fix="none"))
    del world.running[SERVER]
    events = [ProcessEnd(SERVER, -9), unread]
    if together:
        world.step(*reversed(events))
    else:
        for event in events:
            world.step(event)
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


# --- workers that others start -------------------------------------------------------------------


def standing(*states: str, workers: int = 2, incarnation: int = 1) -> Standing:
    members = [Member(rank, rank, incarnation, state) for rank, state in enumerate(states)]
    return Standing(tuple(members), workers)


def attended(**options: Any) -> World:
    """A cluster that others start: its coordinator tells of workers, servers are up."""
    return served(on_worker_death="continue", others=True, **options)


def a_cluster(**options: Any) -> World:
    """A cluster as its first server sees it, which waits without a limit for the others."""
    settings = {"on_worker_death": "continue", "resumes": False, "collects": True, **options}
    return World(others=True, start_s=math.inf, **settings)


@each_case(
    ("states", "ends"),
    [
        (("expected", "left"), None),
        (("live", "dead"), None),
        (("restarting", "left"), None),
        (("retiring", "left"), None),
        (("left", "dead"), "finished"),
        (("left", "left"), "finished"),
        (("dead", "dead"), "failed"),
    ],
)
def test_cluster_of_others_ends_when_all_have_come_and_left(
    states: tuple[str, str], ends: str | None
) -> None:
    world = attended()
    world.step(standing("expected", "expected"))
    world.step(standing("live", "live"))
    world.step(standing(*states))
    assert (world.life.outcome if world.life.over else None) == ends
    assert isinstance(world.life.error, WorkerFailed) == (ends == "failed")


def test_rank_that_comes_again_or_is_added_is_waited_for() -> None:
    world = attended()
    world.step(standing("dead", "live"))
    world.step(standing("live", "live", incarnation=2))
    world.step(standing("live", "left", incarnation=2))
    assert not world.life.ending
    world.step(standing("left", "left", incarnation=2, workers=3))
    assert not world.life.ending, "rank 2 has not come yet"
    world.step(standing("left", "left", "left", workers=3))
    assert (world.life.over, world.life.outcome) == (True, "finished")


def test_rank_that_has_never_come_and_is_scaled_away_is_not_waited_for() -> None:
    world = attended()
    world.step(standing("live", "live", workers=4))
    world.step(standing("live", "live", workers=3))
    world.step(standing("left", "left", workers=3))
    assert not world.life.ending, "rank 2 may still come"
    world.step(standing("left", "left"))
    assert world.life.over


def test_server_lost_is_no_failure_once_all_have_left() -> None:
    world = attended()
    world.step(standing("left", "left"))
    world.step(Silence(SERVER))
    assert (world.life.outcome, world.life.error) == ("finished", None)
    world = attended()
    world.step(Silence(SERVER))
    assert isinstance(world.life.error, ServerGone)


@each_case("servers", [2, 3])
def test_stop_ends_a_cluster_that_waits_for_servers_after_a_damaged_checkpoint(
    servers: int,
) -> None:
    world = a_cluster(servers=servers, checkpoint="a/2", found=["a/1"])
    world.step(DAMAGED)
    world.step(Report(SERVER, "ready", b""))
    assert (world.life.state, world.life.wake_at) == ("resuming", None)
    world.step(Stop())
    assert (world.life.over, world.life.outcome) == (True, "stopped")
    assert world.of(Collect) == [], "there is no cluster to ask"


# --- any order -----------------------------------------------------------------------------------

KEYS = [COORDINATOR, SERVER, WORKER, OTHER, Key("worker", 2)]
KINDS = ["ServerGone", "ValueError", "DefineMismatch", "CheckpointDamaged", "ConnectTimeout"]
WHAT = {"end": 5, "ends": 1, "fail": 1, "return": 2, "silence": 1, "serve": 4, "wait": 2} | {
    "scale": 2,
    "damage": 2,
    "rest": 1,
}
"""What may happen, and how often beside the others."""
SEEDS, STEPS = 400, 30


def a_world(chance: random.Random) -> World:
    kinds = ["coordinator", "server", "worker"]
    return World(
        deaf=chance.sample(kinds, chance.choice([0, 0, 1, 2])),
        immortal=chance.sample(kinds, chance.choice([0, 0, 0, 1, 2])),
        found=chance.choices(["", "a/1", "a/2", "none"], [4, 4, 4, 1], k=chance.randint(1, 5)),
        collects_at_once=False,
        on_worker_death=chance.choice(["stop", "continue", "continue", Restart(1), Restart(2)]),
        resumes=chance.choice([None, False, True, True]),
        strict=chance.random() < 0.2,
        collects=chance.random() < 0.7,
        shares_host=chance.random() < 0.7,
        checkpoint=chance.choice(["", "a/1"]),
        timeout_s=chance.choice([None, None, 300.0]),
    )


def let_happen(world: World, chance: random.Random) -> None:
    """One thing that can happen now."""
    life = world.life
    (what,) = chance.choices(list(WHAT), list(WHAT.values()))
    alive = sorted(world.running)
    workers = [key for key in alive if key.kind == "worker"]
    if what == "end" and workers:
        events = [Stop(), CheckpointFailed("full"), *([None] * 18)]
        beside = [each for each in [chance.choice(events)] if each is not None]
        world.end(chance.choice(workers), status=chance.choice([-9, 0, 1]), beside=beside)
    elif what == "ends" and alive and chance.random() < 0.5:
        world.end(*chance.sample(alive, min(len(alive), 2)))
    elif what == "fail" and alive:
        key = chance.choice(workers or alive) if chance.random() < 0.7 else chance.choice(alive)
        world.step(Report(key, "failed", failure(chance.choice(KINDS))))
    elif what == "damage" and life.state in ("starting", "resuming") and SERVER in alive:
        world.step(DAMAGED)
    elif what == "return" and workers:
        world.step(Report(chance.choice(workers), "returned", b""))
    elif what == "silence" and alive:
        key = chance.choice(workers or alive)
        world.step(Silence(key, life.roster.entries[key].incarnation))
    elif what == "serve":
        world.serve()
    elif what == "wait":
        world.step(after_s=chance.choice([0.1, CAUSE_S, 3.0, 61.0]))
    elif what == "scale" and life.state == "running" and not (life.stopped or life.ending):
        world.scale(chance.randint(1, 3))
    elif what == "rest":
        events = [Stop(), Abandon(), CheckpointFailed("full"), Breakdown(OSError())]
        if world.collecting:
            events = [Collected(chance.choice([None, LookupError("unread")]))]
        if world.collecting or chance.random() < 0.3:
            world.collecting = False
            world.step(chance.choice(events))


def live(
    world: World, chance: random.Random, happen: Callable[[World, random.Random], None], seed: int
) -> None:
    """Let things happen in some order, and then the life end."""
    try:
        for _ in range(STEPS):
            happen(world, chance)
        world.step(Abandon())
        world.settle()
        assert world.life.over
        assert len(world.of(End)) == 1
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


def test_life_in_any_order_of_events_keeps_its_promises() -> None:
    """`World` asserts them after each step: no two attempts at once, each end counted once, none
    restarted past its limit, no refused checkpoint again, one end with a reason, each wait with a
    deadline."""
    for seed in range(SEEDS):
        chance = random.Random(seed)
        world = a_world(chance)
        live(world, chance, let_happen, seed)


def let_others_happen(world: World, chance: random.Random) -> None:
    """One thing that can happen now to a cluster whose processes others start."""
    life = world.life
    entries = life.roster.entries.values()
    missing = [each.key for each in entries if each.key.kind != "worker" and not each.ready]
    servers = [each.key for each in entries if each.key.kind == "server" and each.ready]
    what = chance.choice(["damage", "ready", "ready", "silence", "standing", "wait", "rest"])
    if what == "damage" and COORDINATOR in missing:
        world.step(DAMAGED)
    elif what == "ready" and missing:
        world.step(Report(missing[0], "ready", b""))
    elif what == "silence" and servers and chance.random() < 0.3:
        world.step(Silence(chance.choice(servers)))
    elif what == "standing" and COORDINATOR not in missing and life.state != "finishing":
        world.step(standing(*chance.choices(["expected", "live", "left", "dead"], k=2)))
    elif what == "wait":
        world.step(after_s=chance.choice([0.1, CAUSE_S, 3.0, 61.0]))
    elif what == "rest" and world.collecting:
        world.collecting = False
        world.step(Collected(chance.choice([None, LookupError("unread")])))
    elif what == "rest":
        events = [Stop(), Request(ServerGone("told to end", fix="")), CheckpointFailed("full")]
        world.step(chance.choice(events) if chance.random() < 0.9 else Abandon())


def test_cluster_of_others_in_any_order_of_events_keeps_its_promises() -> None:
    """As above; nothing but a stop bounds how long it waits for the other servers."""
    for seed in range(SEEDS):
        chance = random.Random(seed)
        world = a_cluster(
            servers=chance.randint(1, 3),
            checkpoint=chance.choice(["", "a/3", "a/3"]),
            found=chance.choices(["", "a/1", "a/2", "a/3", "none"], [3, 3, 3, 1, 1], k=3),
            collects_at_once=False,
            resumes=chance.choice([None, False, False]),
            strict=chance.random() < 0.2,
            timeout_s=chance.choice([None, None, 300.0]),
        )
        live(world, chance, let_others_happen, seed)


def test_life_whose_processes_do_nothing_ends_by_itself() -> None:
    """Before it is up, and after it is told to end: nothing waits for an event that never comes."""
    everything = ["coordinator", "server", "worker"]
    for stops in (True, False):
        world = World(deaf=everything, immortal=everything, collects=True)
        if stops:
            world.step(Stop())
        world.settle()
        assert world.life.over
