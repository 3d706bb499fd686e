from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case

from paramserve.core.client_session import SLOT_ALIGN, ClientSession, Operation, SlotPool
from paramserve.errors import NonFinite, ServerGone, UnknownName
from paramserve.messages import Done, Fetch, NotRead, Read, Refused, Step, Values

REQUEST = Fetch(0, 0, 0, 0, 0)


def refused(seq: int, applied: str = "no") -> Refused:
    return Refused(seq, "NonFinite", "a NaN", applied, "look")


# --- operations


def test_operation_is_complete_when_every_shard_has_answered() -> None:
    calls: list[str] = []
    operation = Operation(2)
    operation.on_complete = lambda: calls.append("done")
    operation.answered(1, Done(1))
    assert not operation.complete
    assert calls == []
    operation.answered(0, Done(1, version=3))
    assert operation.complete
    assert operation.error is None
    assert operation.replies[0].version == 3
    assert calls == ["done"]


def test_operation_first_refusal_counts() -> None:
    operation = Operation(2)
    operation.answered(0, refused(1))
    operation.answered(1, Refused(1, "ShapeMismatch", "other", "no", ""))
    assert isinstance(operation.error, NonFinite)
    assert (operation.error.failed, operation.error.applied) == ("a NaN", "no")


def test_operation_refused_by_one_and_applied_by_another_is_unknown() -> None:
    operation = Operation(2)
    operation.answered(0, refused(1))
    operation.answered(1, Done(1))
    assert operation.error is not None
    assert operation.error.applied == "unknown"


def test_operation_refused_by_one_and_skipped_by_another_is_not_applied() -> None:
    operation = Operation(2)
    operation.answered(0, refused(1))
    operation.answered(1, Done(1, skipped=True))
    assert operation.error is not None
    assert operation.error.applied == "no"


@each_case("order", [("yes", "no"), ("no", "yes"), ("no", "unknown")])
def test_operation_refused_by_all_and_applied_by_one_is_unknown(order: tuple[str, str]) -> None:
    operation = Operation(2)
    for shard, applied in enumerate(order):
        operation.answered(shard, refused(1, applied))
    assert operation.error is not None
    assert operation.error.applied == "unknown"


def test_operation_unknown_outcome_stays_unknown() -> None:
    operation = Operation(1)
    operation.answered(0, refused(1, "unknown"))
    assert operation.error is not None
    assert operation.error.applied == "unknown"


def test_operation_lost_shard_keeps_the_first_error() -> None:
    operation = Operation(2)
    operation.answered(0, refused(1))
    operation.failed(ServerGone("gone", applied="unknown", fix=""))
    assert isinstance(operation.error, NonFinite)


# --- sessions


def test_session_numbers_from_one() -> None:
    session = ClientSession(0, 2)
    assert [session.submit(REQUEST, Operation(1)).seq for _ in range(2)] == [1, 2]


def test_session_window_is_full_until_the_oldest_is_answered() -> None:
    session = ClientSession(0, 2)
    for _ in range(2):
        session.submit(REQUEST, Operation(1))
    assert session.full
    session.on_reply(Done(2))
    assert session.full, "the shard keeps outcomes of the last two numbers only"
    session.on_reply(Done(1))
    assert not session.full


def test_session_full_submit_is_a_fault_of_the_caller() -> None:
    session = ClientSession(0, 1)
    session.submit(REQUEST, Operation(1))
    with pytest.raises(AssertionError):
        session.submit(REQUEST, Operation(1))


def test_session_repeated_reply_is_ignored() -> None:
    session = ClientSession(0, 2)
    operation = Operation(2)
    session.submit(REQUEST, operation)
    assert session.on_reply(Done(1)) is not None
    assert session.on_reply(Done(1)) is None
    assert operation.waiting == 1


def test_session_resends_the_unanswered_in_order_with_their_numbers() -> None:
    session = ClientSession(0, 3)
    for _ in range(3):
        session.submit(REQUEST, Operation(1))
    session.on_reply(Done(1))
    assert [message.seq for message in session.to_resend()] == [2, 3]
    assert session.pending_for(Done(1)) is None
    assert session.pending_for(Done(3)) is not None


def read() -> Read:
    return Read(0, 0, 0, 0, ())


def test_reads_are_counted_by_themselves_and_come_behind_what_was_sent_before_them() -> None:
    session = ClientSession(0, 4)
    order = [read(), REQUEST, read(), read(), REQUEST]
    operations = [Operation(1) for _ in order]
    for message, operation in zip(order, operations, strict=True):
        session.submit(message, operation)
    assert [(each.seq, each.behind) for each in order if isinstance(each, Read)] == [
        (1, 0),
        (2, 1),
        (3, 1),
    ]
    assert session.last == 2
    assert [type(each) for each in session.to_resend()] == [type(each) for each in order]
    session.on_reply(Values(2))
    session.on_reply(Done(2))
    assert [each.complete for each in operations] == [False, False, True, False, True]
    assert session.on_reply(Values(2)) is None, "a second answer"
    assert [type(each) for each in session.to_resend()] == [Read, type(REQUEST), Read]
    session.abandon(ServerGone("gone", applied="unknown", fix=""))
    assert all(each.complete for each in operations)
    assert not session.outstanding


def test_refused_read_is_the_reads_and_not_the_requests_of_the_same_number() -> None:
    session, asked, pushed = ClientSession(0, 4), Operation(1), Operation(1)
    session.submit(read(), asked)
    session.submit(REQUEST, pushed)
    session.on_reply(NotRead(1, "UnknownName", "no such block", "no", ""))
    assert isinstance(asked.error, UnknownName)
    assert not pushed.complete


def test_reads_have_room_of_their_own() -> None:
    session = ClientSession(0, 1, 2)
    session.submit(REQUEST, Operation(1))
    assert not session.has_room()
    assert session.has_room_to_read(2)
    assert not session.has_room_to_read(3)
    session.submit(read(), Operation(1))
    session.submit(read(), Operation(1), first=False)
    assert not session.has_room_to_read()
    session.on_reply(Values(1))
    assert not session.has_room_to_read(), "the call is not over"
    session.on_reply(Values(2))
    assert session.has_room_to_read()
    assert not session.has_room()


def test_call_that_is_taken_back_leaves_no_number_used() -> None:
    session = ClientSession(0, 4)
    session.submit(REQUEST, Operation(1))
    for message in (read(), REQUEST):
        session.take_back([session.submit(message, Operation(1))])
    assert (session.last, session.last_read, session.calls, session.reading_calls) == (1, 0, 1, 0)
    assert not session.reads


def test_place_of_the_oldest_call_is_that_of_a_read_too() -> None:
    session = ClientSession(0, 4)
    assert session.oldest is None
    session.submit(read(), Operation(1), place=3)
    session.submit(REQUEST, Operation(1), place=5)
    assert session.oldest == 3
    session.on_reply(Values(1))
    assert session.oldest == 5


def test_session_resends_a_step_whose_gradients_are_to_be_looked_at_again() -> None:
    session = ClientSession(0, 4)
    first = session.submit(Step(0, 0, 0, True, (), largest=1.0, pull=()), Operation(1))
    (again,) = session.to_resend()
    assert isinstance(again, Step)
    assert (again.largest, again.seq) == (-1.0, 1)
    assert isinstance(first, Step)
    assert first.largest == 1.0


def test_session_abandon_fails_everything_unanswered() -> None:
    session = ClientSession(0, 2)
    operations = [Operation(1), Operation(1)]
    for operation in operations:
        session.submit(REQUEST, operation)
    gone = ServerGone("gone", applied="unknown", fix="")
    session.abandon(gone)
    assert [operation.error for operation in operations] == [gone, gone]
    assert not session.unanswered


# --- slots


class At:
    """A slot."""

    own: Any

    def __init__(self, arena: int, offset: int, size: int) -> None:
        self.place = arena, offset


def take(pool: SlotPool[At], nbytes: int) -> At:
    slot = pool.take(nbytes)
    assert slot is not None
    return slot


@st.composite
def actions(draw: st.DrawFn) -> list[int]:
    """Positive: take so many bytes; negative: give back one of those taken."""
    return draw(st.lists(st.integers(-10, 300).filter(bool), max_size=60))


@given(actions())
def test_slots_never_overlap(steps: list[int]) -> None:
    pool = SlotPool(At)
    arenas = {1: 1024, 2: 4096}
    for number, nbytes in arenas.items():
        pool.add_arena(number, SLOT_ALIGN, nbytes)
    owned: dict[At, int] = {}
    for step in steps:
        if step < 0:
            if owned:
                slot = list(owned)[step % len(owned)]
                del owned[slot]
                pool.give_back([slot])
            continue
        taken = pool.take(step)
        if taken is None:
            continue
        arena, offset = taken.place
        assert taken not in owned
        assert offset % SLOT_ALIGN == 0
        assert offset >= SLOT_ALIGN
        assert offset + step <= arenas[arena]
        for slot, size in owned.items():
            other, start = slot.place
            assert other != arena or offset + step <= start or start + size <= offset
        owned[taken] = step
    assert {own() for own in pool.in_use_by} == set(owned)


def test_slot_given_back_is_used_again_for_its_size_and_cut_for_another() -> None:
    pool = SlotPool(At)
    pool.add_arena(1, 0, 192)
    first, second = take(pool, 100), take(pool, 1)
    assert (first.place, second.place) == ((1, 0), (1, 128))
    assert pool.take(1) is None
    pool.give_back([first])
    assert take(pool, 65) is first
    pool.give_back([first])
    small = take(pool, 1), take(pool, 1)
    assert [each.place for each in small] == [(1, 0), (1, 64)]
    assert pool.take(1) is None


def test_free_neighbours_are_joined_for_a_larger_slot() -> None:
    pool = SlotPool(At)
    pool.add_arena(1, 0, 256)
    slots = [take(pool, 64) for _ in range(4)]
    for slot in slots[1:3]:
        pool.give_back([slot])
    assert pool.take(192) is None
    large = take(pool, 128)
    assert large.place == (1, 64)
    assert (pool.in_use, pool.peak) == (256, 256)


def test_arena_that_no_slot_is_taken_in_can_be_dropped() -> None:
    pool = SlotPool(At)
    pool.add_arena(1, 0, 128)
    pool.add_arena(2, 0, 128)
    first, second, third = (take(pool, 64) for _ in range(3))
    assert third.place == (2, 0)
    pool.give_back([third])
    assert pool.unused() == [2]
    pool.drop_arena(2)
    pool.give_back([first])
    assert pool.unused() == []
    assert (take(pool, 64).place, pool.take(64)) == ((1, 0), None)
    assert second.place == (1, 64)


def test_slot_that_nothing_refers_to_is_free_again_when_no_request_speaks_of_it() -> None:
    """Also of a client that never is without an unanswered request."""
    pool = SlotPool(At)
    pool.add_arena(1, 0, 192)
    first, second, third = (take(pool, 64) for _ in range(3))
    del first
    pool.reclaim(oldest=5, last=7)
    del second
    for oldest in (6, 7):
        pool.reclaim(oldest=oldest, last=oldest + 2)
        assert (pool.take(64), pool.in_use) == (None, 192)
    pool.reclaim(oldest=8, last=10)
    assert (pool.in_use, len(pool.lost_slots)) == (128, 1)
    pool.reclaim(oldest=9, last=11)
    assert (pool.in_use, len(pool.lost_slots)) == (64, 0)
    again = take(pool, 64), take(pool, 64)
    assert ({each.place for each in again}, third.place) == ({(1, 0), (1, 64)}, (1, 128))


def test_free_slots_that_are_cut_anew_count_as_lost_no_longer_than_until_the_next_look() -> None:
    pool = SlotPool(At)
    pool.add_arena(1, 0, 128)
    pool.give_back([take(pool, 64)])
    large = take(pool, 128)
    assert len(pool.lost_slots) == 1
    pool.reclaim(oldest=1, last=1)
    assert (pool.in_use, len(pool.lost_slots)) == (128, 0)
    pool.give_back([large])
    assert pool.in_use == 0


def test_slot_that_is_free_cannot_be_given_back() -> None:
    pool = SlotPool(At)
    pool.add_arena(1, 0, 64)
    slot = pool.take(0)
    assert slot is not None
    pool.give_back([slot])
    with pytest.raises(KeyError):
        pool.give_back([slot])
