from __future__ import annotations

import pytest

from paramserve.core.membership import DEAD, EXPECTED, LEFT, LIVE, Membership
from paramserve.errors import ParamServeError
from paramserve.messages import Join, Register, ServerBeat


def membership() -> Membership:
    one = Membership(servers=2, workers=2)
    one.register(Register(1, 0, 100, ("unix:a",)), 0.0)
    one.register(Register(2, 1, 101, ("unix:b",)), 0.0)
    return one


def test_complete_when_every_server_has_registered() -> None:
    one = Membership(servers=2, workers=1)
    assert not one.complete
    one.register(Register(1, 1, 100, ("unix:b",)), 0.0)
    assert not one.complete
    one.register(Register(2, 0, 100, ("unix:a",)), 0.0)
    assert one.complete
    assert one.addresses() == (("unix:a",), ("unix:b",))


@pytest.mark.parametrize("shard", [-1, 2, 1])
def test_register_unknown_or_taken_shard_is_refused(shard: int) -> None:
    with pytest.raises(ParamServeError, match=f"shard {shard}"):
        membership().register(Register(3, shard, 102, ()), 0.0)


def test_join_gives_ids_that_are_never_used_again() -> None:
    one = membership()
    assert one.join(Join(1, 0, 0), 0.0) == (1, 1)
    assert one.join(Join(1, -1, 0), 0.0) == (2, 0)
    assert one.ended(0, DEAD)
    assert one.join(Join(1, 0, 0), 0.0) == (3, 2)
    assert [(m.client, m.incarnation, m.state) for m in one.snapshot().members] == [
        (3, 2, LIVE),
        (0, 0, EXPECTED),
    ]


def test_join_as_a_rank_that_lives_or_does_not_exist_is_refused() -> None:
    one = membership()
    one.join(Join(1, 0, 0), 0.0)
    with pytest.raises(ParamServeError, match="taken by a live worker"):
        one.join(Join(1, 0, 0), 0.0)
    with pytest.raises(ParamServeError, match="2 workers"):
        one.join(Join(1, 2, 0), 0.0)


def test_number_grows_with_every_change_and_only_then() -> None:
    one = membership()
    before = one.number
    client, _ = one.join(Join(1, 1, 0), 0.0)
    assert one.number == before + 1
    assert not one.ended(1, DEAD, client + 1), "the news is of an older incarnation"
    assert not one.ended(7, DEAD), "no such rank"
    assert one.number == before + 1
    assert one.ended(1, LEFT, client)
    assert not one.ended(1, DEAD, client), "it has left already"
    assert one.number == before + 2
    assert one.snapshot().number == one.number


def test_rank_that_never_joined_can_die() -> None:
    one = membership()
    assert one.ended(0, DEAD)
    assert one.members[0].state == DEAD


def test_silent_workers_are_live_ones_not_heard_of() -> None:
    one = membership()
    one.join(Join(1, 0, 0), 0.0)
    one.join(Join(2, 1, 0), 0.0)
    one.heard_worker(1, 4.0)
    assert one.silent_workers(5.0, 3.0) == [0]
    one.ended(0, DEAD)
    assert one.silent_workers(5.0, 3.0) == []


def test_silent_servers_are_those_without_a_heartbeat() -> None:
    one = membership()
    one.heard_server(ServerBeat(1, ()), 4.0)
    one.heard_server(ServerBeat(9, ()), 4.0)
    assert one.silent_servers(5.0, 3.0) == (0,)
