from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.config import CheckpointPlan, CoordinatorConfig, Deadlines, Limits, RuleSpec
from paramserve.core import coordination as module
from paramserve.core.checkpointing import ServersSeen
from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    Coordination,
    Decided,
    FilesWorked,
    Noticed,
    TimePassed,
)
from paramserve.messages import (
    AskStatus,
    CoordinatorRequest,
    Defined,
    Enlist,
    Enlisted,
    Failed,
    Found,
    GroupReport,
    Join,
    Joined,
    Leave,
    Lookup,
    MarkDead,
    Ok,
    Piece,
    PlaceBlock,
    Placed,
    Record,
    Register,
    Scale,
    SentGradients,
    ServerBeat,
    Status,
    WorkerBeat,
)

START_S, STALL_S, RESTART_S = 10.0, 5.0, 20.0
SERVER, DRIVER = 90, 99
"""Connections; a worker's is its rank."""


class Cluster:
    """A coordinator whose calls are made at `now`."""

    def __init__(
        self,
        servers: int = 1,
        workers: int = 2,
        *,
        up: bool = True,
        restarts: bool = False,
        folder: str = "",
    ) -> None:
        deadlines = Deadlines(start_s=START_S, stall_s=STALL_S, restart_s=RESTART_S)
        limits = Limits(log_records_max=2)
        policy = RuleSpec("Async")
        self.one = Coordination(
            CoordinatorConfig(
                servers,
                workers,
                "",
                policy,
                restarts=restarts,
                limits=limits,
                deadlines=deadlines,
                checkpoints=CheckpointPlan(folder),
            )
        )
        self.now = 0.0
        if up:
            for shard in range(servers):
                self.call(SERVER + shard, Register(1, shard, 1, (f"unix:{shard}",)))

    def happen(self, event: Any) -> Decided:
        return self.one.step(event, self.now)

    def call(self, connection: int, message: CoordinatorRequest) -> Any:
        """The reply to a call, or None while it waits."""
        decided = self.happen(Called(connection, message))
        mine = [reply for to, reply in decided.replies if to == connection]
        assert len(mine) <= 1
        return mine[0] if mine else None

    def join(self, rank: int, connection: int | None = None) -> Joined:
        reply = self.call(connection if connection is not None else rank, Join(1, rank, 1))
        assert isinstance(reply, Joined)
        return reply

    def states(self) -> list[str]:
        return [member.state for member in self.one.membership.snapshot().members]


def place(*names: str, define: bool = True, wait_s: float = 1.0) -> PlaceBlock:
    pieces = tuple(Piece(name, (3,)) for name in names)
    return PlaceBlock(7, "model", "float32", None, pieces, define, wait_s)


def test_join_waits_until_all_servers_are_up() -> None:
    cluster = Cluster(servers=2, up=False)
    assert cluster.call(0, Join(5, 0, 1)) is None
    cluster.call(SERVER, Register(1, 1, 1, ("unix:b",)))
    decided = cluster.happen(Called(SERVER + 1, Register(1, 0, 1, ("unix:a",))))
    joined = dict(decided.replies)[0]
    assert isinstance(joined, Joined)
    assert (joined.call, joined.client, joined.incarnation, joined.workers) == (5, 1, 1, 2)
    assert joined.servers == (("unix:a",), ("unix:b",))
    assert decided.members is not None
    assert [member.state for member in decided.members.members] == ["live", "expected"]


@each_case(("restarts", "folder"), [(False, ""), (True, ""), (False, "runs/a")])
def test_join_says_whether_another_incarnation_may_go_on(restarts: bool, folder: str) -> None:
    """A run that goes on from a checkpoint starts all its workers again."""
    cluster = Cluster(restarts=restarts, folder=folder)
    if folder:
        cluster.call(0, Join(1, 0, 1))
        (joined,) = (reply for _, reply in cluster.happen(FilesWorked(ServersSeen())).replies)
    else:
        joined = cluster.join(0)
    assert joined.restarts == (restarts or bool(folder))


def test_join_fails_when_servers_do_not_come_up() -> None:
    cluster = Cluster(servers=2, up=False)
    cluster.call(SERVER, Register(1, 1, 1, ()))
    assert cluster.call(0, Join(5, 0, 1)) is None
    cluster.now = START_S
    ((to, failed),) = cluster.happen(TimePassed()).replies
    assert to == 0
    assert isinstance(failed, Failed)
    assert failed.call == 5
    assert failed.kind == "ConnectTimeout"
    assert failed.failed == "1 of 2 servers have registered, those of shards [0] have not"


def test_join_says_how_long_it_waits_and_status_how_many_servers_there_are_to_be() -> None:
    cluster = Cluster(servers=2, up=False)
    cluster.call(SERVER, Register(1, 1, 1, ()))
    assert cluster.call(0, Join(5, 0, 1, wait_s=0.5)) is None
    status = cluster.call(DRIVER, AskStatus(1))
    assert (len(status.servers), status.expected_servers) == (1, 2)
    cluster.now = 0.5
    ((to, failed),) = cluster.happen(TimePassed()).replies
    assert isinstance(failed, Failed)
    assert (to, failed.kind) == (0, "ConnectTimeout")
    assert cluster.call(0, Join(6, 0, 1, wait_s=2 * START_S)) is None
    cluster.now += START_S
    assert cluster.happen(TimePassed()).replies == [], "the caller's own limit"


def test_join_taken_rank_is_refused() -> None:
    cluster = Cluster()
    cluster.join(0)
    reply = cluster.call(7, Join(5, 0, 1))
    assert isinstance(reply, Failed)
    assert reply.kind == "RankTaken"
    assert "taken" in reply.failed


def test_servers_are_told_only_when_something_changed() -> None:
    cluster = Cluster()
    assert cluster.happen(Called(0, Join(1, 0, 1))).members is not None
    assert cluster.happen(Called(1, Join(1, -1, 1))).members is None
    assert cluster.happen(Noticed(0, WorkerBeat(1))).members is None
    assert cluster.happen(TimePassed()).members is None
    assert cluster.happen(Called(0, Leave(1))).members is not None
    assert cluster.happen(ConnectionLost(0)).members is None


def test_leave_then_lost_connection_counts_as_left() -> None:
    cluster = Cluster()
    cluster.join(0)
    assert cluster.call(0, Leave(3)) == Ok(3)
    cluster.happen(ConnectionLost(0))
    assert cluster.states() == ["left", "expected"]


def test_lost_connection_without_leave_is_a_death() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.happen(ConnectionLost(0))
    cluster.happen(ConnectionLost(SERVER))
    cluster.happen(ConnectionLost(55))
    assert cluster.states() == ["dead", "expected"]


def test_lost_connection_of_an_older_incarnation_changes_nothing() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.call(DRIVER, MarkDead(1, "worker", 0))
    assert cluster.join(0, connection=10).incarnation == 2
    cluster.happen(ConnectionLost(0))
    assert cluster.states() == ["live", "expected"]


def test_mark_dead_is_for_workers_only() -> None:
    cluster = Cluster()
    cluster.join(0)
    reply = cluster.call(DRIVER, MarkDead(4, "server", 0))
    assert isinstance(reply, Failed)
    assert cluster.states() == ["live", "expected"]
    assert cluster.call(DRIVER, MarkDead(4, "worker", 0)) == Ok(4)
    assert cluster.call(DRIVER, MarkDead(5, "worker", 9)) == Ok(5)
    assert cluster.states() == ["dead", "expected"]


@each_case("final", [True, False])
def test_mark_dead_that_comes_late_spares_the_successor(final: bool) -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    lose(cluster)
    assert cluster.join(0, connection=10).incarnation == 2
    late = MarkDead(4, "worker", 0, final, incarnation=1)
    assert cluster.happen(Called(DRIVER, late)) == Decided([(DRIVER, Ok(4))])
    assert cluster.states()[0] == "live"
    cluster.call(DRIVER, MarkDead(5, "worker", 0, final, incarnation=2))
    assert cluster.states()[0] == ("dead" if final else "restarting")


def test_join_as_one_of_another_number_is_refused_and_notifies_no_peer() -> None:
    cluster = Cluster()
    decided = cluster.happen(Called(0, Join(5, 0, 1, workers=3)))
    ((_, failed),) = decided.replies
    assert isinstance(failed, Failed)
    assert "for 2 workers, but rank 0 was started as one of 3" in failed.failed
    assert decided.members is None
    cluster.happen(ConnectionLost(0))
    assert cluster.states() == ["expected", "expected"]
    assert cluster.join(0).incarnation == 1


def test_silent_worker_is_declared_dead() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    cluster.now = STALL_S
    cluster.happen(Noticed(1, WorkerBeat(3)))
    cluster.now = STALL_S + 1.0
    decided = cluster.happen(TimePassed())
    assert decided.members is not None
    assert cluster.states() == ["dead", "live"]


def test_worker_that_waits_for_an_answer_lives_only_by_its_heartbeats() -> None:
    cluster = Cluster()
    for rank in range(2):
        cluster.join(rank)
        assert cluster.call(rank, Lookup(1, ("w",), 100.0)) is None
    for _ in range(3):
        cluster.now += STALL_S
        cluster.happen(Noticed(0, WorkerBeat(0)))
        cluster.happen(TimePassed())
    assert cluster.states() == ["live", "dead"]


def test_heartbeat_of_an_older_incarnation_does_not_count() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.call(DRIVER, MarkDead(1, "worker", 0))
    cluster.join(0, connection=10)
    cluster.now = STALL_S + 1.0
    cluster.happen(Noticed(0, WorkerBeat(3)))
    cluster.happen(TimePassed())
    assert cluster.states()[0] == "dead"


# --- workers that are started again --------------------------------------------------------------


def lose(cluster: Cluster) -> Decided:
    return cluster.happen(ConnectionLost(0))


def fall_silent(cluster: Cluster) -> Decided:
    cluster.now += STALL_S + 1.0
    cluster.happen(Noticed(1, WorkerBeat(3)))
    return cluster.happen(TimePassed())


def be_reported(cluster: Cluster) -> Decided:
    return cluster.happen(Called(DRIVER, MarkDead(1, "worker", 0, final=False)))


@each_case("die", [lose, fall_silent, be_reported])
@each_case("restarts", [True, False])
def test_death_of_a_worker_is_a_restart_where_there_are_some(
    die: Callable[[Cluster], Decided], restarts: bool
) -> None:
    cluster = Cluster(restarts=restarts)
    cluster.join(0)
    cluster.join(1)
    decided = die(cluster)
    assert decided.members is not None
    assert cluster.states() == ["restarting" if restarts else "dead", "live"]


def test_restart_that_takes_too_long_is_a_death() -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    lose(cluster)
    cluster.now = RESTART_S - 1.0
    assert cluster.happen(TimePassed()).members is None
    cluster.now = RESTART_S
    assert cluster.happen(TimePassed()).members is not None
    assert cluster.states() == ["dead", "expected"]
    assert cluster.join(0, connection=10).incarnation == 2


def test_restart_that_the_driver_gives_up_is_a_death() -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    lose(cluster)
    assert be_reported(cluster).members is None, "it is waited for already"
    assert cluster.happen(Called(DRIVER, MarkDead(1, "worker", 0))).members is not None
    assert cluster.states() == ["dead", "expected"]


def test_worker_that_dies_twice_is_waited_for_anew() -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    lose(cluster)
    cluster.now = RESTART_S - 1.0
    assert cluster.join(0, connection=10).incarnation == 2
    cluster.happen(ConnectionLost(10))
    cluster.now += RESTART_S - 1.0
    cluster.happen(TimePassed())
    assert cluster.states()[0] == "restarting"
    assert cluster.join(0, connection=11).incarnation == 3


def test_restarting_definer_is_followed_by_the_next() -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    cluster.join(1)
    cluster.call(0, place("w"))
    assert cluster.call(1, place("w")) is None
    ((to, placed),) = lose(cluster).replies
    assert (to, placed.attempt) == (1, 2)


# --- servers that were started by themselves ------------------------------------------------------


def test_enlist_gives_a_free_shard_and_what_the_server_needs_to_know() -> None:
    cluster = Cluster(servers=2, up=False)
    cluster.call(SERVER, Register(1, 0, 1, ("unix:0",)))
    enlisted = cluster.call(50, Enlist(4))
    assert enlisted == Enlisted(4, 1, 2, 2, RuleSpec("Async"), heartbeat_s=1.0)
    assert cluster.call(50, Enlist(5)).shard == 1, "the same server asks again"
    refused = cluster.call(51, Enlist(6))
    assert isinstance(refused, Failed)
    assert "one more server registered at a cluster of 2" in refused.failed


def test_enlist_number_of_a_server_that_ended_before_it_registered_is_free_again() -> None:
    cluster = Cluster(servers=1, up=False)
    assert cluster.call(50, Enlist(4)).shard == 0
    cluster.happen(ConnectionLost(50))
    assert cluster.call(51, Enlist(4)).shard == 0
    assert cluster.call(51, Register(5, 0, 1, ("unix:0",))) == Ok(5)
    cluster.happen(ConnectionLost(51))
    refused = cluster.call(52, Enlist(4))
    assert isinstance(refused, Failed)
    assert "lost the server of shard 0, and its values with it" in refused.failed
    assert refused.fix == "start the whole cluster again"


def test_register_as_a_shard_that_another_enlisted_is_refused() -> None:
    cluster = Cluster(servers=1, up=False)
    assert cluster.call(50, Enlist(4)).shard == 0
    assert isinstance(cluster.call(51, Register(5, 0, 1, ())), Failed)
    assert cluster.call(50, Register(5, 0, 1, ("unix:0",))) == Ok(5)


def test_status_names_a_server_whose_connection_ended_at_once() -> None:
    cluster = Cluster(servers=2)
    cluster.happen(ConnectionLost(SERVER + 1))
    assert cluster.call(DRIVER, AskStatus(1)).silent_servers == (1,)


def test_place_second_client_waits_until_it_is_defined() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    placed = cluster.call(0, place("w"))
    assert isinstance(placed, Placed)
    assert placed.attempt == 1
    assert cluster.call(1, place("w")) is None
    decided = cluster.happen(Called(0, Defined(8, placed.spec.block, 1)))
    assert dict(decided.replies) == {0: Ok(8), 1: Placed(7, placed.spec, 0)}


def test_place_definer_that_dies_is_followed_by_the_next() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    cluster.call(0, place("w"))
    assert cluster.call(1, place("w")) is None
    ((to, placed),) = cluster.happen(ConnectionLost(0)).replies
    assert to == 1
    assert isinstance(placed, Placed)
    assert placed.attempt == 2


def test_place_of_a_worker_that_counts_as_dead_is_refused() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.call(DRIVER, MarkDead(1, "worker", 0))
    reply = cluster.call(0, place("w"))
    assert isinstance(reply, Failed)
    assert reply.kind == "WorkerFenced"
    cluster.join(1)
    assert isinstance(cluster.call(1, place("w")), Placed)


def test_place_waiting_worker_that_dies_is_told() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    cluster.call(0, place("w"))
    assert cluster.call(1, place("w")) is None
    decided = cluster.happen(Called(DRIVER, MarkDead(1, "worker", 1)))
    told = dict(decided.replies)[1]
    assert isinstance(told, Failed)
    assert told.kind == "WorkerFenced"


def test_place_that_waits_too_long_fails_with_its_names() -> None:
    cluster = Cluster()
    cluster.join(0)
    assert cluster.call(0, place("w", define=False, wait_s=2.0)) is None
    cluster.now = 1.9
    assert cluster.happen(TimePassed()).replies == []
    cluster.now = 2.0
    ((_, failed),) = cluster.happen(TimePassed()).replies
    assert isinstance(failed, Failed)
    assert failed.kind == "DefineTimeout"
    assert "'w'" in failed.failed


def test_place_mismatch_is_refused() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.call(0, place("w"))
    reply = cluster.call(0, place("w", "v"))
    assert isinstance(reply, Failed)
    assert reply.kind == "DefineMismatch"


def test_place_mismatch_that_shows_later_ends_the_wait() -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.join(1)
    assert cluster.call(1, place("w", "v", define=False)) is None
    decided = cluster.happen(Called(0, place("w")))
    told = dict(decided.replies)
    assert isinstance(told[0], Placed)
    assert isinstance(told[1], Failed)
    assert told[1].kind == "DefineMismatch"


def test_wait_of_a_lost_connection_is_forgotten() -> None:
    cluster = Cluster()
    cluster.join(0)
    assert cluster.call(0, Lookup(1, ("w",), 1.0)) is None
    cluster.happen(ConnectionLost(0))
    cluster.now = 5.0
    assert cluster.happen(TimePassed()).replies == []


def test_waiting_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    cluster = Cluster()
    for connection in (10, 11):
        cluster.join(-1, connection)
        assert cluster.call(connection, Lookup(1, ("w",), 1.0)) is None
    cluster.join(-1, 12)
    ((to, failed),) = cluster.happen(Called(12, Lookup(1, ("w",), 1.0))).replies
    assert to == 10
    assert isinstance(failed, Failed)


def test_lookup_finds_defined_names_and_says_what_is_unknown() -> None:
    cluster = Cluster()
    cluster.join(0)
    placed = cluster.call(0, place("w"))
    cluster.call(0, Defined(1, 0, 1))
    assert cluster.call(0, Lookup(2, ("w",), 1.0)) == Found(2, (placed.spec,))
    assert cluster.call(0, Lookup(3, None, 1.0)) == Found(3, (placed.spec,))
    assert cluster.call(0, Lookup(4, ("v",), 1.0)) is None
    cluster.now = 1.0
    ((_, failed),) = cluster.happen(TimePassed()).replies
    assert isinstance(failed, Failed)
    assert failed.kind == "UnknownName"
    assert "'v'" in failed.failed
    assert "defined: w" in failed.failed


def test_lookup_before_any_define_says_so() -> None:
    cluster = Cluster()
    assert cluster.call(0, Lookup(4, ("v",), 0.0)) is not None
    assert "nothing yet" in cluster.call(0, Lookup(4, ("v",), 0.0)).failed


def record(rank: int, clock: int) -> Record:
    return Record(float(clock), rank, clock, {"loss": 1.0})


def test_status_hands_on_records_and_counts_those_that_were_dropped() -> None:
    cluster = Cluster(workers=1)
    cluster.join(0)
    cluster.happen(Noticed(0, WorkerBeat(1, (record(0, 1),))))
    status = cluster.call(DRIVER, AskStatus(1))
    assert isinstance(status, Status)
    assert ([r.clock for r in status.records], status.next_record) == ([1], 1)
    cluster.happen(Noticed(0, WorkerBeat(3, (record(0, 2), record(0, 3)))))
    status = cluster.call(DRIVER, AskStatus(2, status.next_record))
    assert ([r.clock for r in status.records], status.next_record) == ([2, 3], 3)
    status = cluster.call(DRIVER, AskStatus(3, 0))
    assert ([r.clock for r in status.records], status.dropped_records) == ([2, 3], 1)


def test_status_shows_servers_and_who_is_silent() -> None:
    cluster = Cluster(servers=2)
    report = GroupReport("model", 4, ((0, 4),), 0, ())
    cluster.now = STALL_S
    cluster.happen(Noticed(SERVER + 1, ServerBeat(1, (report,), 3)))
    cluster.happen(Noticed(SERVER, ServerBeat(1, ())))
    cluster.now = STALL_S + 1.0
    status = cluster.call(DRIVER, AskStatus(1))
    assert [beat.groups for beat in status.servers] == [(), (report,)]
    assert status.silent_servers == (0,)


def test_scale_up_is_confirmed_and_lets_later_ranks_join() -> None:
    cluster = Cluster()
    cluster.join(0)
    assert cluster.call(DRIVER, Scale(4, 3)) == Ok(4)
    assert cluster.states() == ["live", "expected"]
    joined = cluster.join(2)
    assert (joined.workers, joined.incarnation, joined.late) == (3, 1, True)
    assert cluster.states() == ["live", "expected", "live"]
    assert not cluster.join(1).late, "the cluster was started with it"


def test_scale_that_means_nothing_is_refused() -> None:
    cluster = Cluster()
    refused = cluster.call(DRIVER, Scale(4, 0))
    assert isinstance(refused, Failed)
    assert (refused.call, refused.applied) == (4, "no")
    refused = cluster.call(DRIVER, Scale(5, 10**12))
    assert isinstance(refused, Failed)
    assert "clients_max" in refused.failed
    assert cluster.join(1).workers == 2


def test_scale_down_tells_the_servers_who_is_to_end() -> None:
    cluster = Cluster(workers=3)
    cluster.join(0)
    cluster.join(1)
    decided = cluster.happen(Called(DRIVER, Scale(4, 1)))
    assert decided.members is not None
    assert [member.state for member in decided.members.members] == ["live", "retiring", "left"]


def test_retiring_worker_may_define_and_heartbeat_and_leaves() -> None:
    cluster = Cluster()
    cluster.join(1)
    cluster.call(DRIVER, Scale(4, 1))
    assert isinstance(cluster.call(1, place("w")), Placed)
    cluster.now = STALL_S
    cluster.happen(Noticed(1, WorkerBeat(3)))
    cluster.now = 2 * STALL_S
    cluster.happen(TimePassed())
    assert cluster.states() == ["expected", "retiring"]
    cluster.call(1, Leave(2))
    assert cluster.states() == ["expected", "left"]


@each_case("restarts", [True, False])
@each_case("how", ["lost", "silent", "told"])
def test_retiring_worker_that_dies_is_dead_and_no_clock_waits_for_it(
    how: str, restarts: bool
) -> None:
    cluster = Cluster(restarts=restarts)
    cluster.join(1)
    cluster.call(DRIVER, Scale(4, 1))
    if how == "lost":
        cluster.happen(ConnectionLost(1))
    elif how == "silent":
        cluster.now = STALL_S + 1
        cluster.happen(TimePassed())
    else:
        cluster.call(DRIVER, MarkDead(5, "worker", 1, final=False))
    assert cluster.states() == ["expected", "dead"]


def test_scale_down_and_up_lets_the_rank_come_as_a_new_incarnation() -> None:
    cluster = Cluster()
    cluster.join(1)
    cluster.call(DRIVER, Scale(4, 1))
    cluster.call(DRIVER, Scale(5, 2))
    assert cluster.call(7, Join(1, 1, 1)).kind == "RankTaken"
    cluster.call(1, Leave(2))
    joined = cluster.join(1, connection=7)
    assert (joined.incarnation, joined.workers, joined.late) == (2, 2, True)


def test_scale_up_keeps_as_many_more_records() -> None:
    cluster = Cluster(workers=1)
    cluster.call(DRIVER, Scale(4, 2))
    cluster.join(1)
    records = tuple(Record(0.0, 1, clock, {}) for clock in range(5))
    cluster.happen(Noticed(1, WorkerBeat(5, records)))
    status = cluster.call(DRIVER, AskStatus(5))
    assert [record.clock for record in status.records] == [1, 2, 3, 4]


def test_status_has_what_members_sent_of_groups_that_there_are() -> None:
    cluster = Cluster()
    for rank in range(2):
        cluster.join(rank)
    cluster.call(0, place("w"))
    told = SentGradients("model", 10, 40, 0.5)
    for connection in (1, 9):  # the second one has not joined
        beat = WorkerBeat(3, sent=(told, SentGradients("nothing", 1, 4, 0.0)))
        cluster.happen(Noticed(connection, beat))
    status = cluster.call(99, AskStatus(1, 0))
    assert status.sent == ((1, told),)
