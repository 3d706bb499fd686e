"""Leases at the coordinator: who may ask, how long a question waits, what the news change."""

from __future__ import annotations

from typing import Any

from paramserve.config import ConsistencySpec, CoordinatorConfig, Deadlines
from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    Coordination,
    Decided,
    Noticed,
    TimePassed,
)
from paramserve.core.leases import LOADERS_MAX
from paramserve.messages import (
    AskStatus,
    CoordinatorRequest,
    DatasetSize,
    Failed,
    GiveBack,
    GroupReport,
    Join,
    Joined,
    Lease,
    Leased,
    LeasePlan,
    LeaseReport,
    Leave,
    MarkDead,
    Ok,
    Register,
    SameSize,
    Scale,
    ServerBeat,
    Status,
    decoder,
    encode,
)

SERVER = 90
"""Connection of shard 0; a worker's is its rank."""
PLAN = LeasePlan(10, 1, 0, 5, 5, 5, 1, 7)


class Cluster:
    """A coordinator with all its servers and workers, at `now`."""

    def __init__(self, workers: int = 2, servers: int = 2, *, restarts: bool = False) -> None:
        config = CoordinatorConfig(
            servers,
            workers,
            "",
            ConsistencySpec("Sync"),
            restarts=restarts,
            deadlines=Deadlines(stall_s=1000.0),
        )
        self.one = Coordination(config)
        self.now = 0.0
        for shard in range(servers):
            self.call(SERVER + shard, Register(1, shard, 1, (f"unix:{shard}",)))
        self.clients = [self.join(rank) for rank in range(workers)]

    def happen(self, event: Any) -> Decided:
        return self.one.step(event, self.now)

    def replies(self, event: Any) -> dict[int, Any]:
        return dict(self.happen(event).replies)

    def call(self, connection: int, message: CoordinatorRequest) -> Any:
        """The reply, or None while it waits."""
        return self.replies(Called(connection, message)).get(connection)

    def join(self, rank: int, connection: int | None = None) -> int:
        reply = self.call(rank if connection is None else connection, Join(1, rank, 1))
        assert isinstance(reply, Joined)
        return reply.client

    def beat(self, shard: int, *marks: tuple[int, int, int], members: int = 0) -> dict[int, Any]:
        report = GroupReport("model", 0, (), 0, (), marks=marks)
        return self.replies(Noticed(SERVER + shard, ServerBeat(shard, (report,), members=members)))


def ask(call: int = 3, **options: Any) -> Lease:
    given = {"plan": PLAN, "wait_s": 2.0, "seen": 0, "turn": 0, **options}
    return Lease(call, "loader", **given)


def ask_idle(seen: int, mark: tuple[int, int] | None = None, **options: Any) -> Lease:
    return ask(seen=seen, idle=True, taken=mark, **options)


def test_lease_survives_the_wire() -> None:
    reply = Cluster().call(0, decoder(CoordinatorRequest).decode(encode(ask())))
    assert decoder(Leased).decode(encode(reply)) == Leased(3, 1, 0, 0, 5, 5)


def test_lease_nothing_left_waits_until_the_others_have_finished() -> None:
    cluster = Cluster()
    assert [cluster.call(rank, ask()).lease for rank in (0, 1)] == [1, 2]
    assert cluster.call(0, ask_idle(1, (1, 5))) is None
    replies = cluster.replies(Called(1, ask_idle(2, (2, 5), call=8)))
    assert replies == {0: Leased(3, over=True), 1: Leased(8, over=True)}


def test_lease_question_that_waited_is_to_be_asked_again_and_hears_who_holds() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    assert cluster.call(0, ask_idle(1, (1, 5))) is None
    cluster.now = 1.9
    assert cluster.replies(TimePassed()) == {}
    cluster.now = 2.0
    assert cluster.replies(TimePassed()) == {0: Leased(3, holders=((1, 5),))}


def test_lease_question_without_waiting_is_answered_at_once() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    assert cluster.call(0, ask(seen=1, wait_s=0.0)) == Leased(3, holders=((0, 5), (1, 5)))


def test_lease_of_a_dead_worker_comes_when_all_shards_have_told() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    assert cluster.call(0, ask_idle(1, (1, 5))) is None
    members = cluster.happen(ConnectionLost(1)).members
    assert members is not None
    mark = (cluster.clients[1], 2, 3)
    assert cluster.beat(0, mark, members=members.number) == {}
    assert cluster.beat(1, mark, members=members.number - 1) == {}
    replies = cluster.beat(1, mark, members=members.number)
    assert replies == {0: Leased(3, 3, 0, 8, 10, 5)}


def test_lease_of_a_worker_that_left_or_restarts_comes_back() -> None:
    for event, restarts in [
        (Called(1, Leave(4)), False),
        (Called(SERVER, MarkDead(4, "worker", 1)), False),
        (ConnectionLost(1), True),
    ]:
        cluster = Cluster(restarts=restarts)
        for rank in (0, 1):
            cluster.call(rank, ask())
        cluster.call(0, ask_idle(1, (1, 5)))
        decided = cluster.happen(event)
        assert decided.members is not None
        assert all(to != 0 for to, _ in decided.replies)
        if restarts:
            cluster.join(1, connection=5)
        cluster.beat(0, members=decided.members.number)
        replies = cluster.beat(1, members=decided.members.number)
        assert replies == {0: Leased(3, 3, 0, 5, 10, 5)}


def test_lease_new_incarnation_waits_for_the_old_ones_rest() -> None:
    cluster = Cluster(workers=1, restarts=True)
    assert cluster.call(0, ask()).stop == 10
    number = cluster.happen(ConnectionLost(0)).members.number
    cluster.join(0, connection=5)
    assert cluster.call(5, ask_idle(0)) is None
    cluster.beat(0, (cluster.clients[0], 1, 5), members=number)
    replies = cluster.beat(1, (cluster.clients[0], 1, 10), members=number + 1)
    assert replies == {5: Leased(3, 2, 0, 5, 10, 5)}
    assert cluster.call(SERVER, AskStatus(1)).leases[0].repeated == 5


def test_lease_of_who_is_gone_is_not_answered() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    cluster.call(0, ask_idle(1, (1, 5)))
    cluster.happen(ConnectionLost(0))
    assert cluster.replies(Called(1, ask_idle(2, (2, 5)))) == {1: Leased(3, over=True)}


def test_lease_is_for_live_workers() -> None:
    cluster = Cluster()
    cluster.call(7, Join(1, -1, 1))
    refusal = cluster.call(7, ask())
    assert isinstance(refusal, Failed)
    assert "no worker" in refusal.failed
    cluster.call(SERVER, MarkDead(4, "worker", 1))
    fenced = cluster.call(1, ask())
    assert isinstance(fenced, Failed)
    assert fenced.kind == "WorkerFenced"
    assert cluster.call(0, ask()).start == 0


def test_lease_retiring_worker_gets_no_more() -> None:
    cluster = Cluster()
    cluster.call(SERVER, Scale(4, 1))
    assert cluster.call(1, ask()) == Leased(3, over=True)
    assert cluster.call(0, ask()).stop == 10, "it is the only one that counts"


def test_lease_retiring_while_it_waits_is_answered() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    assert cluster.call(1, ask_idle(2, (2, 5))) is None
    assert cluster.replies(Called(SERVER, Scale(4, 1)))[1] == Leased(3, over=True)


def test_lease_other_plan_is_refused() -> None:
    cluster = Cluster()
    cluster.call(0, ask())
    other = LeasePlan(11, 1, 0, 5, 5, 5, 1, 7)
    reply = cluster.call(1, ask(plan=other))
    assert isinstance(reply, Failed)
    assert "rank 1 came with 11 samples for loader 'loader', and a rank before it with 10" in (
        reply.failed
    )
    assert 'shards="own"' in reply.fix
    assert reply.applied == "no"
    reply = cluster.call(1, ask(plan=LeasePlan(10, 1, 0, 5, 5, 5, 2, 7)))
    assert isinstance(reply, Failed)
    assert "rank 1 came with another plan" in reply.failed


def test_first_rank_of_a_loader_says_how_long_its_dataset_is() -> None:
    cluster = Cluster()
    assert cluster.call(1, DatasetSize(1, "one", 50)) == SameSize(1, 1, 50)
    assert cluster.call(0, DatasetSize(2, "one", 30)) == SameSize(2, 1, 50)
    assert cluster.call(0, DatasetSize(3, "two", 30)) == SameSize(3, 0, 30)
    for number in range(LOADERS_MAX):  # of more than are kept each one is the first
        cluster.call(0, DatasetSize(4, f"loader-{number}", 1))
    assert cluster.call(0, DatasetSize(5, "another", 2)) == SameSize(5, 0, 2)
    assert cluster.call(1, DatasetSize(6, "another", 3)) == SameSize(6, 1, 3)


def test_give_back_reaches_who_waits() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    cluster.call(0, ask_idle(1, (1, 5)))
    replies = cluster.replies(Called(1, GiveBack(4, "loader", 0, (2, 0))))
    assert replies == {1: Ok(4), 0: Leased(3, 3, 0, 5, 10, 5)}


def test_status_tells_how_samples_were_shared() -> None:
    cluster = Cluster()
    for rank in (0, 1):
        cluster.call(rank, ask())
    for shard in (0, 1):
        cluster.beat(shard, (cluster.clients[1], 2, 5))
    status = cluster.call(SERVER, AskStatus(1))
    assert isinstance(status, Status)
    assert status.leases == (LeaseReport("loader", ((0, 5, 0), (1, 5, 5))),)
    assert decoder(Status).decode(encode(status)) == status
