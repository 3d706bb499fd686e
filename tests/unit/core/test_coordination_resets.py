"""A connection that was reset: its client or server may come on another one, until `stall_s`."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from tests.suites import each_case
from tests.unit.core.test_coordination import SERVER, STALL_S, Cluster, place

from paramserve.config import NO_RANK
from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    Decided,
    NoListener,
    Noticed,
    ProcessPaused,
    TimePassed,
)
from paramserve.messages import (
    AskStatus,
    Failed,
    Join,
    Joined,
    Leave,
    Lookup,
    MarkDead,
    Ok,
    Placed,
    Reconnect,
    Record,
    ServerBeat,
    WorkerBeat,
)

NEW, NEWER = 50, 51
"""Connections that are made anew."""
SERVER_AGAIN = Reconnect(1, b"", shard=0, pid=1, addresses=("unix:0",))


def of(joined: Joined, rank: int) -> Reconnect:
    return Reconnect(1, b"", joined.client, joined.incarnation, rank)


def reset(cluster: Cluster, connection: int) -> Decided:
    return cluster.happen(ConnectionLost(connection, reset=True))


def wait(cluster: Cluster, seconds: float) -> Decided:
    cluster.now += seconds
    return cluster.happen(TimePassed())


def refused(reply: Any) -> str:
    assert isinstance(reply, Failed)
    return reply.kind


@each_case("noticed", [True, False], ids=["noticed", "half_open"])
def test_worker_that_connects_again_in_time_goes_on(noticed: bool) -> None:
    cluster = Cluster()
    again = of(cluster.join(0), 0)
    if noticed:
        assert reset(cluster, 0).members is None
    wait(cluster, STALL_S - 1.0)
    assert cluster.call(NEW, again) == Ok(1)
    if not noticed:
        cluster.happen(ConnectionLost(0))  # it comes late, and means nothing
    wait(cluster, STALL_S - 1.0)
    assert cluster.states()[0] == "live"
    assert isinstance(cluster.call(NEW, place("w")), Placed)
    cluster.happen(ConnectionLost(NEW))
    assert cluster.states()[0] == "dead", "this one is its connection now"


def test_worker_that_does_not_connect_again_is_dead_after_stall_s() -> None:
    cluster = Cluster()
    again = of(cluster.join(0), 0)
    reset(cluster, 0)
    wait(cluster, STALL_S)
    assert cluster.states()[0] == "live"
    assert wait(cluster, 1.0).members is not None
    assert cluster.states()[0] == "dead"
    assert refused(cluster.call(NEW, again)) == "WorkerFenced"


@each_case("how", ["marked", "silent", "left"])
def test_older_incarnation_does_not_come_back(how: str) -> None:
    cluster = Cluster(restarts=True)
    again = of(cluster.join(0), 0)
    if how == "left":
        cluster.call(0, Leave(1))
    reset(cluster, 0)
    if how == "marked":
        cluster.call(99, MarkDead(1, "worker", 0, final=False))
    wait(cluster, STALL_S + 1.0 if how == "silent" else 0.0)
    assert refused(cluster.call(NEW, again)) == "WorkerFenced"
    successor = cluster.join(0, NEWER)
    assert successor.incarnation == again.incarnation + 1
    assert refused(cluster.call(NEW, again)) == "WorkerFenced"
    guess = structs.replace(again, client=successor.client, rank=1)
    assert refused(cluster.call(NEW, guess)) == "WorkerFenced"
    wait(cluster, STALL_S - 1.0)
    assert cluster.states()[0] == "live", "the end of the older one is not the newer one's"


@each_case("client", [-1, 0, 7])
def test_peer_that_was_never_there_does_not_connect_again(client: int) -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.call(NEWER, AskStatus(1))
    for rank in (NO_RANK, 0):
        assert refused(cluster.call(NEW, Reconnect(1, b"", client, 1, rank))) == "WorkerFenced"


def test_peer_of_another_cluster_is_refused() -> None:
    cluster = Cluster()
    again = of(cluster.join(0), 0)
    reset(cluster, 0)
    other = structs.replace(again, cluster=b"another")
    assert refused(cluster.call(NEW, other)) == "CoordinatorGone"
    assert refused(cluster.call(NEW, structs.replace(SERVER_AGAIN, cluster=b"a"))) == (
        "CoordinatorGone"
    )
    assert cluster.call(NEW, again) == Ok(1)


def test_definer_without_a_rank_keeps_its_define_until_it_is_given_up() -> None:
    cluster = Cluster()
    joined = cluster.call(NEW, Join(1, NO_RANK, 1))
    other = cluster.call(NEWER, Join(1, NO_RANK, 1))
    assert isinstance(joined, Joined)
    assert isinstance(other, Joined)
    assert isinstance(cluster.call(NEW, place("w")), Placed)
    reset(cluster, NEW)
    assert cluster.call(NEWER, place("w")) is None
    again = of(joined, NO_RANK)
    assert cluster.call(60, again) == Ok(1)
    assert isinstance(cluster.call(60, place("w")), Placed)
    reset(cluster, 60)
    replies = dict(wait(cluster, STALL_S + 1.0).replies)
    placed = replies[NEWER]  # which has waited for the definer all the time
    assert isinstance(placed, Placed)
    assert placed.attempt == 2
    assert refused(cluster.call(61, again)) == "WorkerFenced"


def test_call_that_waits_is_answered_on_the_new_connection_only() -> None:
    cluster = Cluster()
    again = of(cluster.join(0), 0)
    assert cluster.call(0, Lookup(3, ("w",), 1.0)) is None
    cluster.call(NEW, again)
    assert cluster.call(NEW, Lookup(4, ("w",), 1.0)) is None
    assert [to for to, _ in wait(cluster, 2.0).replies] == [NEW]


def test_records_lost_with_the_connection_are_counted_once() -> None:
    cluster = Cluster()
    again = of(cluster.join(0), 0)
    record = Record(0.0, 0, 1, {})
    cluster.happen(Noticed(0, WorkerBeat(1, (record,), 0)))
    reset(cluster, 0)
    cluster.call(NEW, again)
    cluster.happen(Noticed(NEW, WorkerBeat(1, (record,), 3)))
    assert cluster.call(99, AskStatus(1)).lost_records == 2


# --- servers --------------------------------------------------------------------------------------


def test_server_that_connects_again_in_time_is_not_lost_and_gets_the_members() -> None:
    cluster = Cluster()
    assert not reset(cluster, SERVER).server_lost
    assert not wait(cluster, STALL_S - 1.0).server_lost
    decided = cluster.happen(Called(NEW, SERVER_AGAIN))
    assert decided.replies == [(NEW, Ok(1))]
    assert decided.members is not None
    assert not wait(cluster, STALL_S - 1.0).server_lost
    cluster.happen(Noticed(NEW, ServerBeat(0, ())))
    wait(cluster, 2.0)
    assert cluster.call(99, AskStatus(1)).silent_servers == ()


def test_server_that_does_not_connect_again_is_lost_after_stall_s() -> None:
    cluster = Cluster()
    reset(cluster, SERVER)
    assert not wait(cluster, STALL_S).server_lost
    assert wait(cluster, 1.0).server_lost
    assert not wait(cluster, 1.0).server_lost, "it is told once"
    assert cluster.call(99, AskStatus(1)).silent_servers == (0,)
    assert refused(cluster.call(NEW, SERVER_AGAIN)) == "ParamServeError"


def test_server_that_does_not_connect_again_is_looked_for_and_lost_where_none_listens() -> None:
    cluster = Cluster()
    assert reset(cluster, SERVER).look_for == []
    assert wait(cluster, 0.9).look_for == [], "it may come again by itself"
    for _ in range(2):
        assert wait(cluster, 0.2).look_for == [(0, ("unix:0",))]
        assert wait(cluster, 0.9).look_for == [], "no sooner than that"
    pause_s = STALL_S
    cluster.happen(ProcessPaused(pause_s))
    assert wait(cluster, pause_s).look_for == [], "the pause is not counted"
    assert cluster.happen(NoListener(0)).server_lost
    assert not cluster.happen(NoListener(0)).server_lost, "it is told once"
    assert refused(cluster.call(NEW, SERVER_AGAIN)) == "ParamServeError"


def test_server_that_has_connected_again_is_not_looked_for() -> None:
    cluster = Cluster()
    reset(cluster, SERVER)
    assert wait(cluster, 1.0).look_for
    assert cluster.call(NEW, SERVER_AGAIN) == Ok(1)
    assert not cluster.happen(NoListener(0)).server_lost, "where it listened was looked at too soon"
    assert wait(cluster, 2.0).look_for == []


@each_case("lost", [False, True], ids=["absent", "lost"])
def test_join_waits_while_a_server_is_absent(lost: bool) -> None:
    """A client that joined now would try in vain to reach it."""
    cluster = Cluster()
    reset(cluster, SERVER)
    if lost:
        assert cluster.happen(NoListener(0)).server_lost
    assert cluster.call(0, Join(5, 0, 1, wait_s=2.0)) is None
    assert cluster.call(1, Join(6, 1, 1, wait_s=0.5)) is None
    ((to, late),) = wait(cluster, 1.0).replies
    assert (to, refused(late)) == (1, "ConnectTimeout")
    text = "1 of 1 servers have registered; the connection to those of shards [0] is lost"
    assert late.failed == text
    if not lost:
        replies = dict(cluster.happen(Called(NEW, SERVER_AGAIN)).replies)
        assert isinstance(replies[0], Joined)


@each_case("change", [{"pid": 2}, {"addresses": ("unix:other",)}, {"shard": 1}])
def test_another_server_does_not_take_the_place_of_one_that_was_reset(
    change: dict[str, Any],
) -> None:
    cluster = Cluster()
    reset(cluster, SERVER)
    assert refused(cluster.call(NEW, structs.replace(SERVER_AGAIN, **change))) == "ParamServeError"
    assert cluster.call(NEW, SERVER_AGAIN) == Ok(1)
