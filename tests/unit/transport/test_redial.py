"""When a peer is tried again, and when it is given up, on a virtual clock."""

from __future__ import annotations

from paramserve.transport.redial import Redial


class UnreachablePeer:
    """Takes so long to refuse each attempt, or all the time that the attempt has."""

    def __init__(self, redial: Redial, takes_s: float) -> None:
        self.now = 0.0
        self.began: list[float] = []
        self.limits: list[float] = []
        at: float | None = 0.0
        while at is not None:
            self.now = at
            self.began.append(at)
            self.limits.append(redial.limit_s(at))
            self.now += min(takes_s, self.limits[-1])
            at = redial.next_at(self.now)


def test_refused_attempts_repeat_after_each_pause_until_the_deadline() -> None:
    peer = UnreachablePeer(Redial(deadline=2.0, pause=0.5), takes_s=0.0)
    assert peer.began == [0.0, 0.5, 1.0, 1.5]
    assert peer.now == 1.5, "given up at once, not after a pause that leads to no attempt"


def test_mute_peer_is_tried_once_where_attempts_have_no_limit() -> None:
    peer = UnreachablePeer(Redial(deadline=8.0, pause=0.5), takes_s=100.0)
    assert (peer.began, peer.now) == ([0.0], 8.0)


def test_no_attempt_lasts_past_the_deadline() -> None:
    peer = UnreachablePeer(Redial(deadline=8.0, pause=0.5, attempt=3.0), takes_s=100.0)
    assert peer.began == [0.0, 3.5, 7.0]
    assert peer.limits == [3.0, 3.0, 1.0]
    assert peer.now == 8.0


def test_peer_that_is_slow_gets_longer_attempts() -> None:
    redial = Redial(deadline=60.0, pause=0.5, hurry=0.25, attempt=2.0)
    assert redial.limit_s(0.0) == 0.25
    redial.wait_longer()
    assert redial.limit_s(1.0) == 2.0
    assert redial.limit_s(59.0) == 1.0


def test_time_that_is_up_leaves_one_attempt_as_long_as_a_pause() -> None:
    redial = Redial(deadline=0.0, pause=0.5)
    assert redial.limit_s(0.0) == 0.5
    assert redial.next_at(0.0) is None
