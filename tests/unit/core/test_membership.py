from __future__ import annotations

import pytest
from tests.suites import each_case

from paramserve.core.membership import (
    DEAD,
    EXPECTED,
    LEFT,
    LIVE,
    RESTARTING,
    RETIRING,
    Membership,
)
from paramserve.errors import ParamServeError, RankTaken
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


@each_case("shard", [-1, 2, 1])
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
    one.heard_worker(0, 2.0)
    taken = r"rank 0 is taken .*client 1, incarnation 1\), heard of 1\.5 s ago.*end its process"
    with pytest.raises(RankTaken, match=taken):
        one.join(Join(1, 0, 0), 3.5)
    with pytest.raises(ParamServeError, match=r"more ranks than workers.*rank 2.*2 workers"):
        one.join(Join(1, 2, 0), 0.0)
    assert one.join(Join(1, 1, 0), 0.0) == (2, 1), "a refusal uses up no id"
    with pytest.raises(ParamServeError, match=r"rank 0 joined .* without workers.*--workers 2"):
        Membership(1, 0).join(Join(1, 0, 0, workers=2), 0.0)


@each_case("rank", [0, 1, 2])
def test_join_as_one_of_another_number_changes_nothing(rank: int) -> None:
    one = membership()
    one.join(Join(1, 0, 0, workers=2), 0.0)
    before = one.snapshot()
    with pytest.raises(ParamServeError, match=rf"for 2 workers, but rank {rank} was .* one of 4"):
        one.join(Join(1, rank, 0, workers=4), 0.0)
    assert one.snapshot() == before
    assert one.join(Join(1, 1, 0), 0.0) == (2, 1), "a refusal uses up no id"


@each_case("state", [EXPECTED, LEFT, DEAD, RESTARTING])
def test_join_in_any_state_but_live_gives_a_new_incarnation(state: str) -> None:
    one = membership()
    if state != EXPECTED:
        client, _ = one.join(Join(1, 0, 0), 0.0)
        assert one.restarting(0, 0.0) if state == RESTARTING else one.ended(0, state, client)
    assert one.join(Join(1, 0, 0), 0.0)[1] == (1 if state == EXPECTED else 2)
    assert one.members[0].state == LIVE


def test_restarting_rank_is_overdue_after_a_while_since_its_last_death() -> None:
    one = membership()
    one.join(Join(1, 0, 0), 0.0)
    assert one.restarting(0, 1.0)
    assert not one.restarting(0, 2.0), "it is waited for already"
    assert one.overdue(3.9, 3.0) == []
    assert one.overdue(4.0, 3.0) == [0]
    one.join(Join(1, 0, 0), 3.0)
    assert one.overdue(9.0, 3.0) == []
    assert one.restarting(0, 9.0)
    assert one.overdue(11.0, 3.0) == []
    assert one.ended(0, DEAD)
    assert one.overdue(99.0, 3.0) == []
    assert not one.restarting(0, 99.0), "it has ended for good"


def test_restarting_is_not_for_an_older_incarnation() -> None:
    one = membership()
    older, _ = one.join(Join(1, 0, 0), 0.0)
    one.ended(0, DEAD)
    one.join(Join(1, 0, 0), 0.0)
    assert not one.restarting(0, 0.0, older)
    assert one.members[0].state == LIVE


def test_enlist_gives_out_each_free_number_once() -> None:
    one = Membership(servers=3, workers=1)
    one.register(Register(1, 0, 100, ("unix:a",)), 0.0)
    assert (one.enlist(), one.enlist()) == (1, 2)
    with pytest.raises(ParamServeError, match=r"one more server.*3"):
        one.enlist()
    one.resign(1)
    assert one.enlist() == 1
    one.register(Register(1, 1, 100, ("unix:b",)), 0.0, enlisted=1)
    one.resign(1)
    with pytest.raises(ParamServeError, match=r"one more server"):
        one.enlist()


def test_enlist_after_a_server_was_lost_says_which() -> None:
    one = membership()
    one.server_lost(1)
    with pytest.raises(ParamServeError, match=r"shard 1, and its values.*start the whole") as told:
        one.enlist()
    assert "--servers" not in str(told.value)


def test_register_number_that_was_given_to_another_server_is_refused() -> None:
    one = Membership(servers=2, workers=1)
    assert one.enlist() == 0
    with pytest.raises(ParamServeError, match=r"shard 0.*taken: \[0\]"):
        one.register(Register(1, 0, 100, ("unix:a",)), 0.0)
    one.register(Register(1, 0, 100, ("unix:a",)), 0.0, enlisted=0)
    with pytest.raises(ParamServeError, match=r"shard 0.*taken: \[0\]"):
        one.register(Register(1, 0, 100, ("unix:a",)), 0.0, enlisted=0)


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


def test_silent_servers_has_one_whose_connection_ended_at_once() -> None:
    one = membership()
    one.server_lost(1)
    one.server_lost(9)
    assert one.silent_servers(0.0, 3.0) == (1,)


def states(one: Membership) -> list[str]:
    return [member.state for member in one.snapshot().members]


def test_scale_up_opens_ranks_that_are_no_members_before_they_join() -> None:
    one = membership()
    before = one.snapshot()
    with pytest.raises(ParamServeError, match="more ranks than workers"):
        one.join(Join(1, 3, 0), 0.0)
    one.scale(4)
    assert one.snapshot() == before, "no clock waits for a process that starts"
    assert one.workers == 4
    assert one.join(Join(1, 3, 0), 0.0) == (1, 1)
    assert [(m.rank, m.state) for m in one.snapshot().members] == [
        (0, EXPECTED),
        (1, EXPECTED),
        (3, LIVE),
    ]
    with pytest.raises(ParamServeError, match=r"for 2 workers and has 4 now.*ranks 0 to 3"):
        one.join(Join(1, 4, 0), 0.0)


@each_case(
    ("state", "after"),
    [(LIVE, RETIRING), (EXPECTED, LEFT), (RESTARTING, DEAD), (LEFT, LEFT), (DEAD, DEAD)],
)
def test_scale_down_asks_live_ranks_to_end_and_waits_for_no_other(state: str, after: str) -> None:
    one = membership()
    if state != EXPECTED:
        one.join(Join(1, 1, 0), 0.0)
    if state == RESTARTING:
        one.restarting(1, 0.0)
    elif state in (LEFT, DEAD):
        one.ended(1, state)
    before = one.number
    one.scale(1)
    assert states(one) == [EXPECTED, after]
    assert len(one.present()) == (1 if state == EXPECTED else 2), "one that never came is no worker"
    assert (one.number > before) == (state != after)
    assert one.overdue(99.0, 1.0) == []


def test_retiring_rank_counts_as_live_until_it_ends() -> None:
    one = membership()
    client, _ = one.join(Join(1, 1, 0), 0.0)
    one.scale(1)
    assert one.silent_workers(5.0, 3.0) == [1]
    with pytest.raises(ParamServeError, match="more ranks than workers"):
        one.join(Join(1, 1, 0), 0.0)
    one.scale(2)
    with pytest.raises(RankTaken, match="rank 1 is taken by a live worker, which is asked to end,"):
        one.join(Join(1, 1, 0), 0.0)
    assert states(one) == [EXPECTED, RETIRING], "it is wanted again, as another incarnation"
    assert one.ended(1, LEFT, client)
    assert one.join(Join(1, 1, 0), 0.0)[1] == 2


@each_case("workers", [0, -1])
def test_scale_below_one_changes_nothing(workers: int) -> None:
    one = membership()
    before = one.snapshot()
    with pytest.raises(ParamServeError, match="at least 1 worker"):
        one.scale(workers)
    assert (one.snapshot(), one.workers) == (before, 2)


@each_case(("told", "taken"), [(2, True), (3, True), (0, True), (4, False)])
def test_join_as_one_of_the_first_or_the_present_number_is_taken(told: int, taken: bool) -> None:
    one = membership()
    one.scale(3)
    if taken:
        assert one.join(Join(1, 0, 0, workers=told), 0.0) == (1, 1)
    else:
        with pytest.raises(ParamServeError, match="for 2 workers and has 3 now, but rank 0"):
            one.join(Join(1, 0, 0, workers=told), 0.0)


def test_late_are_ranks_that_were_added_and_later_incarnations() -> None:
    one = membership()
    one.scale(3)
    assert [one.late(rank, 1) for rank in (-1, 0, 1, 2)] == [False, False, False, True]
    assert one.late(0, 2)


def test_late_is_who_was_given_up_before_it_came() -> None:
    one = membership()
    one.scale(1)
    one.scale(2)
    assert [one.late(rank, 1) for rank in (0, 1)] == [False, True]


@each_case("restarts", [False, True])
def test_late_is_who_died_before_it_came(restarts: bool) -> None:
    one = membership()
    if restarts:
        assert one.restarting(1, 0.0)
        assert not one.late(1, 1), "the others wait for it"
    assert one.ended(1, DEAD)
    one.scale(1)
    one.scale(2)
    assert one.join(Join(1, 1, 0), 0.0)[1] == 1
    assert one.late(1, 1)
