"""Reads by themselves: not numbered, answered behind what their client has sent before them."""

from __future__ import annotations

from typing import Any

from tests.unit.core.group_rig import change
from tests.unit.core.rig import Rig, block_spec, payload

from paramserve.config import NO_RANK
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core.events import ClientGone, ClientHere, Effects
from paramserve.messages import Done, NotRead, Read, ReadTarget, Refused, Values

ME, OTHER, READER = 7, 8, 9
SIZE = 8


def rig(policy: Policy | None = None, workers: int = 2) -> Rig:
    """Ranks 0 and 1, and a client without a rank; one block of zeros with the rule `Add`."""
    one = Rig(policy, workers=workers)
    for client, rank in ((ME, 0), (OTHER, 1), (READER, NO_RANK)):
        one.join(client, rank)
    one.define(ME, block_spec((SIZE,)))
    return one


def read(one: Rig, seq: int, behind: int, client: int = ME, clock: int = 0) -> Effects:
    return one.again(client, Read(seq, behind, 0, clock, (ReadTarget(0, 0, 0),)))


def push(one: Rig, client: int = ME, clock: int = 0) -> Effects:
    return one.step(client, {0: [1.0] * SIZE}, clock=clock)


def read_by(effects: Effects) -> list[tuple[int, Any]]:
    """The reads that were answered: their numbers, with the first value."""
    found = []
    for _, answer in effects.replies:
        if isinstance(answer.message, Values):
            assert answer.payload is not None
            found.append((answer.message.seq, answer.payload.view("float64")[0]))
    return found


def test_read_uses_no_number_and_may_be_asked_again_on_a_new_connection() -> None:
    one = rig()
    last = one.shards[0].sessions.by_client[READER].last
    assert payload(read(one, 1, last, READER)) == [0.0] * SIZE
    push(one)
    one.happen(ClientGone(READER))
    one.happen(ClientHere(READER, 1, NO_RANK, 4, again=True))
    assert payload(read(one, 1, last, READER)) == [1.0] * SIZE, "as it is now"
    assert one.shards[0].sessions.by_client[READER].last == last


def test_read_that_comes_twice_on_one_connection_is_answered_once() -> None:
    """Its client may use the memory for something else by then."""
    one = rig()
    assert read_by(read(one, 1, 0, READER)) == [(1, 0.0)]
    assert read(one, 1, 0, READER).replies == []


def test_read_behind_a_held_step_sees_it() -> None:
    one = rig(Sync(reduce="sum"))
    assert push(one).replies == []
    behind = one.shards[0].sessions.by_client[ME].last
    assert read(one, 1, behind, clock=1).replies == []
    assert read_by(push(one, OTHER)) == [(1, 2.0)]
    assert one.shards[0].waiting == 0


def test_read_comes_before_a_step_that_was_sent_behind_it() -> None:
    one = rig(Sync(reduce="sum"))
    push(one)
    behind = one.shards[0].sessions.by_client[ME].last
    read(one, 1, behind, clock=1)
    push(one, clock=1)
    assert read_by(push(one, OTHER)) == [(1, 2.0)]
    assert read_by(push(one, OTHER, clock=1)) == []


def test_read_waits_for_the_members_that_its_policy_waits_for_and_holds_up_no_step() -> None:
    one = rig(BoundedStaleness(0))
    push(one)
    behind = one.shards[0].sessions.by_client[ME].last
    assert read(one, 1, behind, clock=1).replies == []
    told = one.shards[0].groups[0].inquire(ME)
    assert told.held
    assert told.missing == ((1, 0),)
    assert "does not let worker 0 read at clock 1 yet" in told.reason
    assert len(push(one, clock=1).replies) == 1, "it only pushes"
    assert read_by(push(one, OTHER)) == [(1, 3.0)]


def test_member_that_is_further_on_than_a_shard_knows_does_not_wait_for_itself() -> None:
    """It has joined on another shard at a later clock."""
    one = rig(BoundedStaleness(0))
    for clock in range(5):
        push(one, OTHER, clock)
    assert read_by(read(one, 1, 0, clock=5)) == [(1, 5.0)]
    assert one.shards[0].groups[0].state.clocks == {0: 5, 1: 5}


def test_news_of_a_policy_in_the_answer_of_a_read_is_told_again() -> None:
    """That answer may be lost with its link, and is kept nowhere."""
    one = rig(workers=1)
    change(one, BoundedStaleness(1), OTHER)
    told = []
    for seq in (1, 2):
        (_, answer), *_ = read(one, seq, 0).replies
        assert isinstance(answer.message, Values)
        told.append(answer.message.news)
    assert told[0] == told[1] != ()
    (_, answer), *_ = push(one).replies
    assert isinstance(answer.message, Done)
    assert answer.message.news == told[0]
    (_, answer), *_ = read(one, 3, 0).replies
    assert isinstance(answer.message, Values)
    assert answer.message.news == ()


def test_read_behind_a_request_that_never_came_ends_the_connection() -> None:
    one = rig()
    effects = read(one, 1, one.shards[0].sessions.by_client[ME].last + 1)
    assert (effects.drops, effects.replies) == ([ME], [])


def test_reads_that_wait_are_bounded() -> None:
    one = rig(BoundedStaleness(0))
    push(one)
    session = one.shards[0].sessions.by_client[ME]
    for seq in range(1, session.requests + 1):
        assert read(one, seq, session.last, clock=1).drops == []
    assert read(one, session.requests + 1, session.last, clock=1).drops == [ME]


def test_waiting_reads_are_forgotten_with_their_connection() -> None:
    one = rig(BoundedStaleness(0))
    push(one)
    read(one, 1, one.shards[0].sessions.by_client[ME].last, clock=1)
    one.happen(ClientHere(ME, 1, 0, 4, again=True))
    assert read_by(push(one, OTHER)) == []


def test_read_of_a_rank_that_has_ended_is_refused() -> None:
    one = rig(BoundedStaleness(0))
    push(one)
    last = one.shards[0].sessions.by_client[ME].last
    read(one, 1, last, clock=1)
    one.tell(one.members((ME, 1, "dead"), (OTHER, 1, "live")))
    (waited,) = [each for each in one.answers(ME) if isinstance(each, NotRead)]
    assert (waited.seq, waited.kind, waited.applied) == (1, "WorkerFenced", "no")
    (_, answer), *_ = read(one, 2, last, clock=1).replies
    assert isinstance(answer.message, NotRead)


def test_read_of_what_is_not_there_says_that_nothing_was_applied() -> None:
    one = rig()
    wrong = one.again(READER, Read(1, 0, 5, 0, ()))
    beyond = one.again(READER, Read(2, 0, 0, 0, (ReadTarget(3, 0, 0),)))
    nowhere = one.again(READER, Read(3, 0, 0, 0, (ReadTarget(0, 4, 64),)))
    for effects in (wrong, beyond, nowhere):
        (_, answer), *_ = effects.replies
        assert isinstance(answer.message, Refused)
        assert answer.message.applied == "no"
