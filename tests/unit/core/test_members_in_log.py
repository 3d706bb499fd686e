"""Members as the decision log has them, where ranks come back or a group is defined late."""

from __future__ import annotations

import numpy as np
from tests.unit.core.rig import block_spec, gathered
from tests.unit.core.test_shard_members import FIRST, OTHER, SECOND, both, pair, resent, rig

from paramserve.consistency.built_in import Sync
from paramserve.core.events import DeadlineReached
from paramserve.messages import Define, JoinGroup, Undefine


def test_gradients_of_an_older_incarnation_are_in_no_clock_that_the_newer_has_joined() -> None:
    one = pair()
    both(one, FIRST, 1.0)
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.deliver()
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    for shard in (0, 1):
        one.send(SECOND, JoinGroup(0, 0), shard)
    one.deliver()
    assert [answer.at for answer in one.answers(SECOND)] == [0, 0]
    both(one, OTHER, 10.0)
    assert resent(one) == [0.0, 0.0], "it waits for the newer one"
    both(one, SECOND, 2.0)
    assert resent(one) == [12.0, 12.0]
    assert not any(answer.skipped for answer in one.answers(SECOND))
    assert [one.answers(FIRST, shard)[-1].kind for shard in (0, 1)] == ["WorkerFenced"] * 2


def test_gradients_of_an_older_incarnation_stay_in_the_clock_of_a_rank_that_stayed_member() -> None:
    one = pair()
    both(one, FIRST, 1.0)
    one.tell(one.members((FIRST, 1, "restarting"), (OTHER, 1, "live")))
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    for shard in (0, 1):
        one.send(SECOND, JoinGroup(0, 0), shard)
    one.deliver()
    both(one, OTHER, 10.0)
    assert resent(one) == [11.0, 11.0], "it goes on behind a step that all shards have"


def test_clock_that_forgets_an_older_incarnation_begins_with_the_next_gradients() -> None:
    one = rig(Sync(reduce="sum", timeout_s=10.0))
    one.step(FIRST, {0: [1.0]})
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.now = 9.0
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    one.send(SECOND, JoinGroup(0, 0))
    one.step(OTHER, {0: [10.0]})
    for now, value in ((10.5, 0.0), (19.5, 10.0)):
        one.now = now
        one.happen(DeadlineReached())
        assert one.value() == [value]


def test_shard_that_gets_two_attempts_to_define_a_group_late_has_the_members_of_the_lead() -> None:
    one = pair()
    later = block_spec((1,), (1,), number=1, group=1, cuts=(0, 1, 2))

    def attempts(shard: int) -> None:
        for client, attempt in ((FIRST, 1), (OTHER, 2)):
            define = Define(0, later, attempt, 0, 0)
            one.send(client, define, shard, {0: gathered([np.zeros(1)])})
            if attempt == 1:
                one.send(client, Undefine(0, 1, attempt), shard)

    attempts(0)
    one.join(8, 7)
    for shard in range(2):
        one.send(8, JoinGroup(0, 0), shard)
    one.deliver()
    attempts(1)
    one.deliver()
    assert [set(shard.groups[1].state.clocks) for shard in one.shards] == [{0, 1}, {0, 1}]
