"""How long shards stop for a cut: shortly at first, longer where pushes take long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.suites import each_case
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.built_in import Async
from paramserve.core import cut
from paramserve.core.events import CutWanted, DeadlineReached, FromShard
from paramserve.messages import CutAsk, CutTaken, PeerMessage

TICK_S = 0.05
GIVEN_UP_S = cut.CUT_PATIENCE_S + cut.CUT_LIMIT_MAX_S


class SlowShards:
    """Two shards that two clients push to. Shard 0 handles all at once; shard 1 one message after
    the other, and each push takes `push_s` there. A client pushes again when both have answered."""

    def __init__(self, push_s: float) -> None:
        self.rig = one = Rig(Async(), shards=2, workers=2)
        for rank in range(2):
            one.join(rank + 1, rank)
        one.define(A, block_spec((1,), (1,), cuts=range(3)))
        self.push_s = push_s
        self.limits: list[float] = []
        """Of each attempt."""
        self._clocks = {A: 0, B: 0}
        self._pushed = {A: True, B: True}
        """Whether shard 1 has a client's last push."""
        self._inbox: deque[tuple[float, Callable[[], object]]] = deque()

    def taken(self, checkpoint: int = 1, *, pushes: bool = True) -> CutTaken:
        """Outcome of a cut for a checkpoint."""
        notices = list(self.rig.happen(CutWanted(checkpoint)).notices)
        until = self.rig.now + GIVEN_UP_S
        while not notices and self.rig.now < until:
            if pushes:
                self._push()
            self._deliver(notices)
            self.rig.now += TICK_S
            notices += self.rig.happen(DeadlineReached()).notices
            self._work(notices)
        assert isinstance(notices[0], CutTaken)
        return notices[0]

    def _push(self) -> None:
        for client, arrived in self._pushed.items():
            answered = self._clocks[client] == len(self.rig.answers(client, 0)) - (client == A)
            if arrived and answered:
                clock = self._clocks[client]
                self._clocks[client] += 1
                self._pushed[client] = False
                self.rig.step(client, {0: [1.0]}, shard=0, clock=clock)
                self._inbox.append((self.push_s, lambda c=client, n=clock: self._arrive(c, n)))

    def _arrive(self, client: int, clock: int) -> None:
        self._pushed[client] = True
        self.rig.step(client, {0: [1.0]}, shard=1, clock=clock)

    def deliver(self, notices: list[object]) -> None:
        """Hand over what the shards have sent each other, until they wait for something else."""
        self._deliver(notices)
        self._work(notices)

    def _deliver(self, notices: list[object]) -> None:
        while self.rig.wire:
            shard, message = self.rig.wire.pop(0)
            if shard == 0:
                notices += self.rig.happen(FromShard(message)).notices
                continue
            if isinstance(message, CutAsk) and message.limit_s not in self.limits:
                self.limits.append(message.limit_s)
            self._inbox.append((0.0, lambda m=message: self._hear(m)))

    def _hear(self, message: PeerMessage) -> None:
        self.rig.happen(FromShard(message), 1)

    def _work(self, notices: list[object]) -> None:
        """Let shard 1 go on for one tick."""
        left_s = TICK_S
        while self._inbox and left_s >= 0:
            takes_s, do = self._inbox[0]
            if takes_s > left_s and not self.rig.shards[1].cuts.stops:  # else it is held
                self._inbox[0] = takes_s - left_s, do
                return
            left_s -= min(takes_s, left_s)
            self._inbox.popleft()
            do()
        self.rig.happen(DeadlineReached(), 1)
        self._deliver(notices)


def test_cut_of_fast_shards_is_taken_at_the_first_attempt() -> None:
    shards = SlowShards(push_s=0.0)
    assert not shards.taken().failed
    assert shards.limits == [cut.CUT_LIMIT_S]


@each_case("push_s", [0.3, 1.0, 2.5])
def test_cut_of_shards_with_slow_pushes_is_taken_with_a_longer_pause(push_s: float) -> None:
    shards = SlowShards(push_s)
    assert not shards.taken().failed
    assert shards.limits[:2] == [cut.CUT_LIMIT_S, 2 * cut.CUT_LIMIT_S]
    parts = [shard.cuts.parts_here[max(shard.cuts.parts_here)] for shard in shards.rig.shards]
    assert parts[0].clients == parts[1].clients
    assert min(parts[0].clients[A], parts[0].clients[B]) > 1
    given_up_s = shards.limits[-2]
    assert parts[0].pause_s >= given_up_s - TICK_S  # for as long it stopped in vain before


def test_cut_that_pushes_are_too_slow_for_says_so() -> None:
    taken = SlowShards(push_s=30.0).taken()
    assert taken.failed == (
        "no consistent cut of all shards could be taken in 20 s: all were asked to stop, and "
        "shards [1] did not in 8 s, as they were busy with pushes, or with a change of policy, or "
        "did not answer"
    )
    assert "more servers, or a faster rule" in taken.fix


def test_cut_leaves_out_a_worker_that_stands_still_in_the_middle_of_a_push() -> None:
    shards = SlowShards(push_s=0.0)
    shards.rig.step(A, {0: [1.0]}, shard=0)
    taken = shards.taken(pushes=False)
    assert (taken.failed, taken.torn, taken.left_out) == ("", (A,), "rank 0")
    assert shards.limits[-1] == cut.CUT_LIMIT_MAX_S


def test_cut_after_one_that_left_a_worker_out_does_not_wait_for_it_again() -> None:
    shards = SlowShards(push_s=0.0)
    shards.rig.step(A, {0: [1.0]}, shard=0)
    shards.taken(pushes=False)
    shards.limits.clear()
    taken = shards.taken(2, pushes=False)
    assert (taken.torn, shards.limits) == ((A,), [cut.CUT_LIMIT_S])


def test_worker_that_was_left_out_is_waited_for_once_it_goes_on() -> None:
    shards = SlowShards(push_s=0.0)
    shards.rig.step(A, {0: [1.0]}, shard=0)
    shards.taken(pushes=False)
    shards.rig.step(A, {0: [1.0]}, shard=1)
    shards.rig.step(A, {0: [1.0]}, shard=0, clock=1)
    notices = list(shards.rig.happen(CutWanted(2)).notices)
    shards.deliver(notices)
    assert not notices
    shards.rig.step(A, {0: [1.0]}, shard=1, clock=1)
    shards.deliver(notices)
    assert isinstance(notices[0], CutTaken)
    assert (notices[0].torn, notices[0].left_out) == ((), "")
