"""Time in which the coordinator did not run counts for no silence and no wait."""

from __future__ import annotations

from tests.suites import each_case
from tests.unit.core.test_coordination import (
    RESTART_S,
    SERVER,
    STALL_S,
    START_S,
    Cluster,
    place,
)

from paramserve.core.coordination import Noticed, ProcessPaused, TimePassed
from paramserve.messages import AskStatus, Failed, Join, MarkDead, ServerBeat, WorkerBeat

PAUSE_S = 10 * max(START_S, STALL_S, RESTART_S)


def pause(cluster: Cluster, seconds: float = PAUSE_S) -> None:
    cluster.now += seconds
    assert cluster.happen(ProcessPaused(seconds)).members is None


def test_silence_during_a_pause_kills_no_worker_and_no_server() -> None:
    cluster = Cluster()
    cluster.join(0)
    pause(cluster)
    cluster.happen(TimePassed())
    assert cluster.states() == ["live", "expected"]
    assert cluster.call(99, AskStatus(1)).silent_servers == ()


@each_case("beats", [True, False])
def test_silence_before_and_after_a_pause_counts(beats: bool) -> None:
    cluster = Cluster()
    cluster.join(0)
    cluster.now += STALL_S - 1.0
    pause(cluster)
    if beats:
        cluster.happen(Noticed(0, WorkerBeat(1)))
        cluster.happen(Noticed(SERVER, ServerBeat(0, ())))
    cluster.now += 2.0
    cluster.happen(TimePassed())
    assert cluster.states()[0] == ("live" if beats else "dead")
    assert cluster.call(99, AskStatus(1)).silent_servers == (() if beats else (0,))


def test_restarting_worker_is_awaited_through_a_pause() -> None:
    cluster = Cluster(restarts=True)
    cluster.join(0)
    cluster.call(99, MarkDead(1, "worker", 0, final=False))
    pause(cluster)
    cluster.happen(TimePassed())
    assert cluster.states()[0] == "restarting"
    cluster.now += RESTART_S
    cluster.happen(TimePassed())
    assert cluster.states()[0] == "dead"


def test_waiting_calls_wait_through_a_pause() -> None:
    cluster = Cluster(servers=2, up=False)
    assert cluster.call(0, Join(5, 0, 1)) is None
    pause(cluster)
    assert cluster.happen(TimePassed()).replies == []
    cluster.now += START_S
    ((_, failed),) = cluster.happen(TimePassed()).replies
    assert isinstance(failed, Failed)


def test_waiting_define_waits_through_a_pause() -> None:
    cluster = Cluster()
    cluster.join(0)
    assert cluster.call(0, place("w", define=False, wait_s=1.0)) is None
    pause(cluster)
    assert cluster.happen(TimePassed()).replies == []
