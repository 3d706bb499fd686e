"""Who may still change something: incarnations, deaths, and news that come late."""

from __future__ import annotations

import pytest
from tests.unit.core.rig import Bounded, Rig, block_spec, done, refused

from paramserve.core.consistency import Async, Sync
from paramserve.core.events import ClientGone, ClientHere, DeadlineReached
from paramserve.core.shard import SESSION_KEEP_S
from paramserve.messages import Define, Done, Refused

FIRST, OTHER, SECOND = 1, 2, 3
"""Clients: rank 0, rank 1, and rank 0 again."""


def rig(policy: object = None) -> Rig:
    one = Rig(policy if policy is not None else Async())  # type: ignore[arg-type]
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    one.tell(one.members((FIRST, 1, "live"), (OTHER, 1, "live")))
    one.define(OTHER, block_spec((1,)))
    return one


@pytest.mark.parametrize("state", ["dead", "left"])
def test_worker_that_has_ended_is_fenced(state: str) -> None:
    one = rig()
    one.tell(one.members((FIRST, 1, state), (OTHER, 1, "live")))
    error = refused(one.step(FIRST, {0: [1.0]}))
    assert type(error).__name__ == "WorkerFenced"
    assert one.value() == [0.0]
    effects = one.happen(ClientHere(FIRST, 1, 0, 4))
    assert type(effects.refused).__name__ == "WorkerFenced"
    done(one.step(OTHER, {0: [1.0]}))


def test_older_news_change_nothing() -> None:
    one = rig()
    older = one.members((FIRST, 1, "dead"), (OTHER, 1, "live"))
    one.tell(one.members((FIRST, 1, "live"), (OTHER, 1, "live")))
    one.tell(older)
    done(one.step(FIRST, {0: [1.0]}))


def test_newer_incarnation_fences_the_older_at_once() -> None:
    one = rig()
    one.join(SECOND, 0, incarnation=2)
    assert type(refused(one.step(FIRST, {0: [1.0]}))).__name__ == "WorkerFenced"
    assert one.happen(ClientHere(FIRST, 1, 0, 4)).refused is not None
    done(one.step(SECOND, {0: [1.0]}))


def test_news_from_before_a_newer_incarnation_do_not_end_it() -> None:
    one = rig()
    dead = one.members((FIRST, 1, "dead"), (OTHER, 1, "live"))
    one.join(SECOND, 0, incarnation=2)
    one.tell(dead)
    assert one.shards[0].live() == [0, 1]
    done(one.step(SECOND, {0: [1.0]}))
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    done(one.step(SECOND, {0: [1.0]}, clock=1))


def test_newer_incarnation_in_sync_belongs_to_the_clock_before_the_news_of_it() -> None:
    one = rig(Sync(reduce="sum"))
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    assert one.step(SECOND, {0: [1.0]}).replies == []
    assert len(one.step(OTHER, {0: [1.0]}).replies) == 2
    assert one.value() == [2.0]


def test_client_of_an_unknown_rank_is_admitted_and_pushes_to_no_clock() -> None:
    one = rig(Sync())
    one.join(8, 7)
    assert type(refused(one.step(8, {0: [1.0]}))).__name__ == "NotAMember"


def test_fenced_session_is_forgotten_when_its_connection_has_been_gone_for_long() -> None:
    one = rig()
    one.happen(ClientGone(FIRST))
    one.join(SECOND, 0, incarnation=2)
    one.now = SESSION_KEEP_S
    one.happen(DeadlineReached())
    assert set(one.shards[0].sessions) == {OTHER, SECOND}
    assert one.shards[0].workers[0].client == SECOND


def test_fenced_worker_is_told_about_everything_it_waits_for() -> None:
    one = rig(Bounded(0))
    assert one.step(FIRST, {0: [1.0]}, [0]).replies == [], "the push is applied, the pull waits"
    assert one.step(FIRST, {0: [1.0]}, [0], clock=1).replies == []
    one.join(SECOND, 0, incarnation=2)
    waited, queued = one.answers(FIRST)
    assert isinstance(waited, Refused)
    assert isinstance(queued, Refused)
    assert (waited.kind, waited.applied) == ("WorkerFenced", "yes")
    assert (queued.kind, queued.applied) == ("WorkerFenced", "no")
    assert one.value() == [1.0]


def test_fenced_reader_of_a_clock_is_told_that_nothing_was_applied() -> None:
    one = rig(Bounded(0))
    one.step(FIRST)
    assert one.step(FIRST, pull=[0], clock=1, tick=False).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    told = one.answers(FIRST)[-1]
    assert isinstance(told, Refused)
    assert told.applied == "no"


def test_fenced_worker_whose_gradient_is_collected_hears_of_its_commit() -> None:
    one = rig(Sync(reduce="sum"))
    one.step(FIRST, {0: [1.0]})
    one.step(FIRST, {0: [5.0]}, clock=1)
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    assert one.answers(FIRST) == []
    one.step(OTHER, {0: [1.0]})
    collected, queued = one.answers(FIRST)
    assert isinstance(collected, Done)
    assert isinstance(queued, Refused)
    assert queued.kind == "WorkerFenced"
    assert one.value() == [2.0], "what was collected before its death counts"


def test_death_of_the_slowest_lets_the_others_go_on() -> None:
    one = rig(Sync(reduce="sum"))
    assert one.step(OTHER, {0: [1.0]}).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    assert isinstance(one.answers(OTHER)[-1], Done)
    assert one.value() == [1.0]
    assert len(one.step(OTHER, {0: [1.0]}, clock=1).replies) == 1


def test_rank_that_comes_back_starts_at_the_clock_of_the_slowest() -> None:
    one = rig()
    for clock in range(3):
        one.step(OTHER, clock=clock)
    one.step(FIRST)
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    assert one.shards[0].report()[0].clocks == ((0, 3), (1, 3))


def test_group_defined_after_a_death_waits_for_the_living() -> None:
    one = rig()
    one.tell(one.members((FIRST, 1, "left"), (OTHER, 1, "live")))
    one.define(OTHER, block_spec((1,), number=1, group=1))
    assert one.shards[0].report()[1].clocks == ((1, 0),)


@pytest.mark.parametrize("shards", [1, 2])
def test_define_that_waited_behind_a_clock_may_make_a_group_when_it_is_released(
    shards: int,
) -> None:
    one = Rig(Sync(reduce="sum"), shards=shards)
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    cuts = (0, 1) if shards == 1 else (0, 1, 1)
    one.define(OTHER, block_spec((1,), cuts=cuts))
    for shard in range(shards):
        one.step(OTHER, shard=shard)
        spec = block_spec((0,), number=1, group=1, cuts=[0] * (shards + 1))
        assert one.send(OTHER, Define(0, spec, 1, 0, 0), shard).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.deliver()
    for shard in range(shards):
        assert set(one.shards[shard].groups) == {0, 1}


def test_forgotten_client_that_comes_back_is_refused() -> None:
    one = rig()
    one.happen(ClientHere(9, 0, -1, 4))
    one.happen(ClientGone(9))
    assert one.happen(ClientHere(9, 0, -1, 4, again=True)).refused is None, "it is still known"
    one.happen(ClientGone(9))
    one.now += SESSION_KEEP_S
    one.happen(DeadlineReached())
    refused = one.happen(ClientHere(9, 0, -1, 4, again=True)).refused
    assert refused is not None, "its unanswered request would be applied a second time"
    assert refused.applied == "unknown"
