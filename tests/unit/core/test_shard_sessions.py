from __future__ import annotations

import numpy as np

from paramserve.core.request_memory import Memory
from paramserve.core.shard_sessions import Answer, Request, ShardSession, Verdict
from paramserve.messages import Done, Fetch


def session(window: int = 2) -> ShardSession:
    return ShardSession(client=7, incarnation=1, rank=0, window=window)


def request(seq: int) -> Request:
    return Request(Fetch(seq, 0, 0, 0, 0), Memory({}, mirrored=True))


def test_admit_takes_exactly_the_next_number() -> None:
    one = session()
    assert one.admit(2) is Verdict.GAP
    assert one.admit(1) is Verdict.NEW
    assert one.admit(2) is Verdict.NEW
    assert one.admit(4) is Verdict.GAP


def test_admit_answered_number_is_repeated_with_its_outcome() -> None:
    one = session()
    one.admit(1)
    one.mirror = Memory({1: np.zeros(128, np.uint8)}, mirrored=True)
    answer = Answer(Done(1, version=5), ((1, 64, 8),), one.mirror)
    one.keep_outcome(answer)
    assert one.admit(1) is Verdict.REPEATED
    assert one.answer_again(1) == answer


def test_admit_held_and_queued_numbers_are_pending() -> None:
    one = session()
    one.admit(1)
    one.held = request(1)
    one.admit(2)
    one.queue.append(request(2))
    assert [one.admit(seq) for seq in (1, 2)] == [Verdict.PENDING, Verdict.PENDING]


def test_admit_past_the_window_is_a_gap() -> None:
    one = session(window=1)
    one.admit(1)
    one.held = request(1)
    one.admit(2)
    one.queue.append(request(2))
    assert one.admit(3) is Verdict.GAP
    assert one.last == 2, "the number is not used up"


def test_outcomes_are_kept_for_the_window_only() -> None:
    one = session(window=2)
    for seq in (1, 2, 3):
        one.admit(seq)
        one.keep_outcome(Answer(Done(seq)))
    assert one.admit(1) is Verdict.FORGOTTEN
    assert one.admit(2) is Verdict.REPEATED
