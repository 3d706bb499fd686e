"""Clients that end around a cut: all shards have the same of them, and no cut waits for them."""

from __future__ import annotations

import pytest
from tests.suites import each_case
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.built_in import Async, Sync
from paramserve.core import cut, shard_sessions
from paramserve.core.decisions import LEAD
from paramserve.core.events import (
    CheckpointEnded,
    ClientBye,
    ClientGone,
    ClientHere,
    CutWanted,
    DeadlineReached,
    FromShard,
)
from paramserve.messages import CutDone, CutTaken, LogEntry

READERS = range(10, 16)


def two_shards() -> Rig:
    one = Rig(Async(), shards=2, workers=1)
    one.join(A, 0)
    one.define(A, block_spec((1,), (1,), cuts=range(3)))
    return one


def begin(one: Rig, number: int = 1) -> list[object]:
    """Begin a cut for a checkpoint; what shard 0 has to tell of it so far."""
    notices: list[object] = list(one.happen(CutWanted(number)).notices)
    return deliver(one, notices)


def deliver(one: Rig, notices: list[object]) -> list[object]:
    while one.wire:
        shard, message = one.wire.pop(0)
        notices += one.happen(FromShard(message), shard).notices
    return notices


def end_checkpoint(one: Rig, number: int, *, committed: bool) -> None:
    for shard in range(2):
        one.happen(CheckpointEnded(number, committed), shard)
    one.deliver()


def numbers(one: Rig, client: int) -> list[int | None]:
    """How much of a client each shard has in the newest cut."""
    parts = [shard.cuts.parts_here[max(shard.cuts.parts_here)] for shard in one.shards]
    return [part.clients.get(client) for part in parts]


def test_cut_has_the_whole_push_of_a_client_that_said_goodbye_between_the_reports() -> None:
    one = two_shards()
    one.join(B)
    one.step(B, {0: [1.0]}, shard=0)
    one.happen(ClientBye(B), 0)
    notices = begin(one)
    assert not notices  # what is on its way to shard 1 is waited for
    one.step(B, {0: [1.0]}, shard=1)
    one.happen(ClientBye(B), 1)
    (taken,) = deliver(one, notices)
    assert isinstance(taken, CutTaken)
    assert (taken.torn, numbers(one, B)) == ((), [1, 1])


def test_cut_does_not_wait_for_what_an_ended_client_has_sent_to_one_shard_only() -> None:
    one = two_shards()
    one.join(B)
    one.step(B, {0: [1.0]}, shard=0)
    for shard in range(2):
        one.happen(ClientBye(B), shard)
    (taken,) = begin(one)
    assert isinstance(taken, CutTaken)
    assert (taken.failed, taken.torn) == ("", (B,))


def test_cut_does_not_wait_for_a_client_that_only_one_shard_knows() -> None:
    one = two_shards()
    one.happen(ClientHere(B, 0, -1, 4), 0)
    one.step(B, {0: [1.0]}, shard=0)
    (taken,) = begin(one)
    assert isinstance(taken, CutTaken)
    assert not taken.failed


@each_case("answered", [True, False])
def test_clients_that_end_in_another_order_on_each_shard_hold_up_no_cut(
    monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    monkeypatch.setattr(shard_sessions, "CLOSED_MAX", 2)
    one = two_shards()
    for client in READERS:
        one.join(client)
        for shard in range(2):
            one.step(client, {0: [1.0]}, shard=shard)
    for shard, order in enumerate((READERS, reversed(READERS))):
        for client in order:
            one.happen(ClientBye(client, answered), shard)
    (taken,) = begin(one)
    assert isinstance(taken, CutTaken)
    assert not taken.failed


def test_ended_client_is_forgotten_with_the_first_cut_after_its_end_on_all_shards() -> None:
    one = two_shards()
    one.join(B)
    for shard in range(2):
        one.step(B, {0: [1.0]}, shard=shard)
    one.happen(ClientBye(B), 0)
    begin(one)
    assert one.shards[0].sessions.closed == {B: 1}  # shard 1 may still execute something of it
    one.happen(ClientBye(B), 1)
    begin(one, 2)
    assert numbers(one, B) == [1, 1]
    assert [shard.sessions.closed for shard in one.shards] == [{}, {}]


def test_client_whose_calls_were_all_answered_is_forgotten_at_its_goodbye() -> None:
    one = two_shards()
    one.join(B)
    one.step(B, {0: [1.0]})
    one.happen(ClientBye(B, answered=True))
    assert one.shards[0].sessions.closed == {}


def test_fenced_client_is_remembered_since_shards_may_have_fenced_it_at_other_requests() -> None:
    one = two_shards()
    one.join(B, 0, incarnation=2)  # fences A
    one.happen(ClientBye(A, answered=True))
    assert one.shards[0].sessions.closed == {A: 1}


def test_client_without_a_link_to_one_shard_is_not_waited_for_there() -> None:
    one = two_shards()
    one.join(B)
    one.step(B, {0: [1.0]}, shard=0)
    one.happen(ClientBye(B), 0)
    one.happen(ClientGone(B), 1)
    assert not begin(one)
    one.now = cut.CUT_LIMIT_S
    one.happen(DeadlineReached())
    one.now = cut.CUT_LIMIT_S + cut.CUT_RETRY_S
    notices: list[object] = list(one.happen(DeadlineReached()).notices)
    (taken,) = deliver(one, notices)
    assert isinstance(taken, CutTaken)
    assert taken.torn == (B,)


def test_client_that_ended_around_a_commit_has_its_step_on_all_shards_and_is_not_named() -> None:
    """The lead has decided its last step before its goodbye, the other shard behind that."""
    one = Rig(Sync(), shards=2, workers=2)
    for rank, client in enumerate((A, B)):
        one.join(client, rank)
    one.define(A, block_spec((1,), (1,), cuts=range(3)))
    for client in (A, B):
        for shard in range(2):
            one.step(client, {0: [1.0]}, shard=shard)
    commits = []
    while one.wire:
        shard, message = one.wire.pop(0)
        if isinstance(message, LogEntry) and shard != LEAD:
            commits.append((shard, message))
        else:
            one.happen(FromShard(message), shard)
    for shard in range(2):
        one.happen(ClientBye(B), shard)
    assert [shard.sessions.closed[B] for shard in one.shards] == [1, 0]
    one.wire += commits
    one.deliver()
    (taken,) = begin(one)
    assert isinstance(taken, CutTaken)
    assert (taken.failed, taken.torn, numbers(one, B)) == ("", (), [1, 1])


def ended_between_two_sends() -> Rig:
    """A client that has ended with its push on one shard only."""
    one = two_shards()
    one.join(B)
    one.step(B, {0: [1.0]}, shard=0)
    for shard in range(2):
        one.happen(ClientBye(B), shard)
    return one


@each_case("given_up", [0, 1])
def test_client_that_ended_unequal_is_named_in_one_checkpoint_and_forgotten_on_all_shards(
    given_up: int,
) -> None:
    one = ended_between_two_sends()
    for _ in range(given_up):  # its files could not be written: no manifest names the client
        (first,) = begin(one, 3)
        end_checkpoint(one, 3, committed=False)
    (first,) = begin(one)
    assert isinstance(first, CutTaken)
    assert (first.torn, numbers(one, B)) == ((B,), [1, 0])
    assert [shard.sessions.closed for shard in one.shards] == [{B: 1}, {B: 0}]
    end_checkpoint(one, 1, committed=True)
    assert [shard.sessions.closed for shard in one.shards] == [{}, {}]
    (second,) = begin(one, 2)
    assert isinstance(second, CutTaken)
    assert (second.torn, numbers(one, B)) == ((), [None, None])


def test_client_that_ended_unequal_is_not_forgotten_with_a_cut_that_is_in_no_manifest() -> None:
    one = ended_between_two_sends()
    one.shards[0].cuts.want((0,), False, None, one.now)
    one.happen(DeadlineReached())
    one.deliver()
    assert numbers(one, B) == [1, 0]
    (taken,) = begin(one)
    assert isinstance(taken, CutTaken)
    assert taken.torn == (B,)


def test_client_that_ended_unequal_is_remembered_where_a_cut_was_given_up() -> None:
    one = ended_between_two_sends()
    one.happen(CutWanted(1))
    while one.wire:
        shard, message = one.wire.pop(0)
        if not isinstance(message, CutDone):  # shard 1 has its part, which shard 0 never hears of
            one.happen(FromShard(message), shard)
    one.now = cut.CUT_LIMIT_S
    one.happen(DeadlineReached())
    one.deliver()
    assert [shard.sessions.closed for shard in one.shards] == [{B: 1}, {B: 0}]
    one.now = cut.CUT_LIMIT_S + cut.CUT_RETRY_S
    notices: list[object] = list(one.happen(DeadlineReached()).notices)
    (taken,) = deliver(one, notices)
    assert isinstance(taken, CutTaken)
    assert taken.torn == (B,)
