"""Whole clusters under random faults: every invariant holds, for each of 256 seeds; of 2,000 in
`make test-all`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from tests.sim.policies import POLICIES

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Sync
from paramserve_testing import (
    Faults,
    History,
    Scenario,
    SimulatedCluster,
    Violation,
    cut,
    join,
    kill,
    leave,
    replay,
    set_policy,
    slow,
    stop,
)

SEEDS = 2000
EACH = -(-SEEDS // len(POLICIES))
CHUNK = 16
FIRST = [
    pytest.param(first, marks=[pytest.mark.slow] if first else [])
    for first in range(0, EACH, CHUNK)
]
FEW = {"sync": Sync(reduce="sum"), "async": Async()}


def split(quick: int, total: int, first: int = 0) -> list[Any]:
    """Ranges of seeds: the `quick` first ones, and those up to `total`, marked slow."""
    rest = range(first + quick, first + total)
    return [
        pytest.param(range(first, first + quick), id="first"),
        pytest.param(rest, id="rest", marks=pytest.mark.slow),
    ]


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("policy", POLICIES)
def test_seeds_two_shards_three_workers_keep_every_invariant(policy: str, first: int) -> None:
    for seed in range(first, min(EACH, first + CHUNK)):
        replay(seed, consistency=POLICIES[policy])


def test_seed_whose_released_step_moved_the_slowest_clock_releases_the_others_too() -> None:
    replay(200123, consistency=BoundedStaleness(0))


@pytest.mark.parametrize("links", ["shared", "tcp"])
@pytest.mark.parametrize("policy", FEW)
def test_seeds_one_kind_of_link_keeps_every_invariant(policy: str, links: str) -> None:
    for seed in range(1000, 1010):
        replay(seed, consistency=FEW[policy], links=links)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seeds", split(3, 8, first=2000))
def test_seeds_other_numbers_of_shards_keep_every_invariant(
    policy: str, servers: int, seeds: range
) -> None:
    for seed in seeds:
        replay(seed, consistency=POLICIES[policy], servers=servers, workers=4, outstanding=3)


@pytest.mark.parametrize(
    ("policy", "seed", "outstanding"),
    [
        # Old proposals made each shard's `Vote` smaller in another way, for ever.
        (Sync(reduce="sum", backup=1), 30, 3),
        (Sync(reduce="sum", backup=2), 4, 3),
        # Whom a tick had released pushed as well: the read said an older version than it had.
        (POLICIES["delay-compensated"], 38, 2),
    ],
    ids=["proposals", "more proposals", "released"],
)
def test_seeds_of_three_shards_that_have_found_a_bug(
    policy: Policy, seed: int, outstanding: int
) -> None:
    replay(seed, consistency=policy, servers=3, workers=4, outstanding=outstanding)


def test_seed_where_reads_were_read_again_after_the_one_that_a_gradient_came_from() -> None:
    # The copy of that read had made room for the new ones.
    replay(300365, consistency=POLICIES["delay-compensated"])


@pytest.mark.parametrize(
    ("seed", "options"),
    [(290, {}), (195, {"samples": 60, "others": (), "restarts": False}), (191, {})],
    ids=["steps", "samples", "policy that changes"],
)
def test_seeds_where_a_rank_came_back_while_a_clock_was_decided_without_it(
    seed: int, options: dict[str, Any]
) -> None:
    replay(seed, **options)


@pytest.mark.parametrize(
    ("policy", "seed"),
    [
        # A request to join that was interrupted took the room of the step.
        (Sync(reduce="sum"), 26),
        # A shard heard that a rank had joined again before it was told of its suspension.
        (BoundedStaleness(1), 14),
    ],
    ids=["join", "suspension"],
)
def test_seeds_where_an_interrupted_call_was_followed_by_a_join(policy: Policy, seed: int) -> None:
    replay(seed, consistency=policy)


def test_seed_where_a_rank_came_back_into_the_last_clock_before_a_bound() -> None:
    replay(20738)


def test_seed_where_one_event_left_a_group_without_members_and_gave_it_one() -> None:
    """What was in the buffer is applied between the two decisions."""
    replay(21847, consistency=Buffered(size=3, damping=None))


@pytest.mark.parametrize("seed", [6334, 7016, 7909])
def test_seeds_where_a_rank_rested_after_it_was_interrupted_while_it_joined(seed: int) -> None:
    """It did not know what it had asked for: to join two groups, or to be out of one."""
    replay(seed, others=(), second=Sync(reduce="sum"))


@pytest.mark.parametrize("seeds", split(30, 80))
def test_seeds_of_two_groups_that_collect_keep_every_invariant(seeds: range) -> None:
    for seed in seeds:
        # With restarts a rank that has died between its two groups begins with the first one.
        replay(seed, others=(), second=Sync(reduce="sum"), restarts=bool(seed % 2))


def test_seed_where_a_rank_followed_one_that_was_ahead_in_its_entry() -> None:
    replay(6224, consistency=BoundedStaleness(0), others=(), second=BoundedStaleness(0))


def test_seed_where_a_rank_followed_one_by_a_round_of_before_its_suspension() -> None:
    replay(9663, consistency=BoundedStaleness(0), others=(), second=Sync(reduce="sum"))


def test_seed_where_the_answer_to_an_interrupted_suspension_was_lost() -> None:
    """The next call has room when it is there."""
    replay(6484, consistency=BoundedStaleness(0), others=(), second=Sync(reduce="sum"))


@pytest.mark.parametrize(
    ("policy", "second"),
    [
        (BoundedStaleness(1), Sync(reduce="sum")),
        (Sync(reduce="sum"), BoundedStaleness(0)),
        (BoundedStaleness(0), BoundedStaleness(0)),
        (BoundedStaleness(1), BoundedStaleness(4)),
    ],
    ids=["bounded first", "bounded second", "both of 0", "of 1 and 4"],
)
@pytest.mark.parametrize("seeds", split(10, 30))
def test_seeds_of_groups_one_of_which_has_a_bound_keep_every_invariant(
    policy: Policy, second: Policy, seeds: range
) -> None:
    for seed in seeds:
        replay(seed, consistency=policy, others=(), second=second)


@pytest.mark.parametrize("policy", ["sync", "sync-backup", "async", "bounded-1"])
def test_seeds_of_slow_readers_keep_every_invariant(policy: str) -> None:
    for seed in range(5):
        replay(seed, consistency=POLICIES[policy], slow_readers=True, outstanding=4)


def test_seeds_of_a_group_that_collects_and_one_that_does_not_keep_every_invariant() -> None:
    for seed in range(20):
        replay(seed, others=(), second=Async())


@pytest.mark.parametrize("policy", FEW)
def test_seeds_meet_every_kind_of_fault_and_answer(policy: str) -> None:
    expected = {"killed", "fenced", "restarted and finished", "unanswered", "skipped"}
    expected |= {"joined", "retired", "rested", "changed", "spoiled"}
    expected |= {"ParamServeError"}  # of a step that a shard refuses
    expected |= {"NotAMember", "NonFinite"} if policy == "sync" else {"WorkerFenced"}
    seen: Counter[str] = Counter()
    for seed in range(60):
        if expected <= set(+seen):
            break
        cluster = SimulatedCluster(seed, Scenario(consistency=FEW[policy]))
        history = cluster.run()
        seen["killed"] += sum(client.dead for client in cluster.clients)
        seen["fenced"] += sum(client.fenced for client in cluster.clients)
        seen["restarted and finished"] += sum(
            client.incarnation > 1 and client.finished for client in cluster.clients
        )
        seen["unanswered"] += sum(call.answered is None for call in history.calls)
        seen["skipped"] += sum(call.skipped for call in history.calls)
        seen.update(call.error for call in history.calls)
        seen["joined"] += sum(each.joins for each in history.entered)
        seen["retired"] += sum(client.retiring for client in cluster.clients)
        seen["rested"] += len(history.resting)
        seen["changed"] += len(history.policies) > 1
        seen["spoiled"] += any(call.spoiled for call in history.calls)
    assert expected <= set(+seen), seen


@pytest.mark.parametrize("seeds", split(20, 60))
def test_seeds_with_restarts_make_the_clocks_wait_and_some_workers_come_again(
    seeds: range,
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        cluster = SimulatedCluster(seed, Scenario(restarts=True))
        history = cluster.run()
        cluster.check()
        seen["decided"] += len(history.decided)
        seen["resumed"] += sum(c.incarnation > 1 and c.finished for c in cluster.clients)
        seen["away"] += sum(away for _, _, away in history.away)
    assert min(seen[key] for key in ("decided", "resumed", "away")) > 0, seen


@pytest.mark.parametrize("policy", FEW)
def test_seeds_restarts_of_four_workers_on_three_shards(policy: str) -> None:
    for seed in range(3000, 3015):
        replay(
            seed,
            consistency=FEW[policy],
            servers=3,
            workers=4,
            outstanding=3,
            restarts=True,
        )


def test_without_faults_every_push_is_acknowledged() -> None:
    cluster = replay(0, consistency=Async(), faults=Faults())
    pushes = [call for call in cluster.history.calls if call.push is not None]
    assert len(pushes) > 20
    assert all(call.acknowledged for call in pushes if not call.spoiled)


def test_repr_of_scenario_names_what_differs() -> None:
    assert repr(Scenario()) == ""
    assert repr(Scenario(workers=4, links="tcp")) == "workers=4, links='tcp'"


def test_violation_says_how_to_run_it_again() -> None:
    class Forgetful(SimulatedCluster):
        def run(self) -> History:
            super().run()
            self.history.final = {
                part: row._replace(counts=(0,) * len(row.counts), pushes=(0,) * len(row.pushes))
                for part, row in self.history.final.items()
            }
            return self.history

    cluster = Forgetful(11, Scenario(consistency=Async(), faults=Faults(), links="tcp"))
    cluster.run()
    with pytest.raises(Violation, match="acknowledged, but lost") as raised:
        cluster.check()
    first = str(raised.value).splitlines()[0]
    assert first == (
        f"paramserve_testing.replay(seed=11, consistency={Async()!r}, links='tcp', faults=Faults())"
    )


@pytest.mark.parametrize(
    "policy", ["sync", "sync-backup", "async", "async-drop", "bounded-1", "buffered"]
)
@pytest.mark.parametrize("seeds", split(8, 25))
def test_seeds_samples_shared_by_lease_are_all_used(policy: str, seeds: range) -> None:
    told = 0
    for seed in seeds:
        cluster = replay(seed, consistency=POLICIES[policy], others=(), samples=60)
        assert cluster.history.shared is not None
        told += cluster.history.shared.over
    assert told > len(seeds) // 2, "else the checker had little to judge"


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_seeds_ranks_agree_in_collectives(policy: str) -> None:
    agreed, again, refused, further = 0, 0, 0, 0
    for seed in range(48):
        found = replay(seed, consistency=POLICIES[policy], others=(), collectives=True).history
        agreed += len(found.agreed)
        first = {each.writer: each.nth for each in reversed(found.agreed)}
        further += sum(nth > 1 for nth in first.values())
        again += sum(each.again for each in found.agreed)
        refused += sum(each.refused for each in found.company)
    assert agreed > 100, "else the checker had little to judge"
    assert again > 10
    assert refused > 3
    assert further > 2, "ranks go on where they were"


def test_seeds_server_that_is_looked_for_after_a_reset_goes_on() -> None:
    faults = Faults(stall=0.08, stall_s=0.4, reset=0.08)
    looked = [replay(seed, faults=faults).coordinator.looked for seed in range(12)]
    assert sum(looked) > 4


SCRIPT = (
    kill(worker=0, clock=2),
    stop(worker=1, seconds=0.05, clock=3),
    stop(shard=1, seconds=0.02, clock=3),
    stop(coordinator=True, seconds=0.7, clock=4),
    cut(worker=1, shard=0, seconds=0.05, both=False),
    cut(shards=(0, 1), seconds=0.03, worker=None, clock=4),
    cut(worker=2, coordinator=True, seconds=0.02, clock=1),
    slow(worker=2, factor=10),
    slow(worker=2, factor=3.0, shard=1, seconds=0.1, clock=1),
    join(clock=2),
    set_policy(BoundedStaleness(bound=2), clock=3),
    leave(worker=2, clock=8),
)


def test_script_happens_in_order_and_runs_again_from_its_text() -> None:
    lines: list[str] = []
    first = SimulatedCluster(7, Scenario(faults=Faults(), script=SCRIPT), lines.append)
    history = first.run()
    first.check()
    notes = [line.partition(" # ")[2] for line in lines if " # " in line]
    told = " ".join(notes)
    for part in (
        " is killed",
        "stands still for 0.050 s",
        "shard 1 stands still for 0.020 s",
        "coordinator stands still for 0.700 s",
        "worker 1 -> shard 0 is cut",
        "shard 0 <-> shard 1 is cut",
        "worker 2 <-> coordinator is cut",
        "worker 2 is slow by 10.0",
        "worker 2 <-> shard 1 is slow by 3.0",
        "there are to be 4 workers",
        "is to change the policy to BoundedStaleness",
        "is to leave",
    ):
        assert part in told, notes
    assert [policy for _, policy in history.policies] == [Sync(reduce="sum"), SCRIPT[-2].policy]
    again = eval(f"replay(7, {first.scenario!r})", dict(globals()))
    assert again.trace() == first.trace()


def test_killed_worker_dies_in_the_middle_of_its_step() -> None:
    script = (kill(worker=1, clock=7),)
    cluster = replay(3, consistency=Async(), faults=Faults(), restarts=False, script=script)
    victim = next(each for each in cluster.clients if each.rank == 1)
    assert victim.dead
    last = [call for call in cluster.history.calls if call.writer == victim.writer][-1]
    assert (last.clock, last.answered) == (7, None)
    assert (
        len([key for key in cluster.history.reached if key[1:] == (last.writer, last.number)]) < 2
    )


@pytest.mark.parametrize("policy", ["sync-backup", "async", "bounded-1"])
def test_straggler_holds_up_only_those_who_wait(policy: str) -> None:
    script = (slow(worker=2, factor=50),)
    cluster = replay(3, consistency=POLICIES[policy], faults=Faults(), script=script)
    ended = {c.rank: c for c in cluster.clients}
    behind = max(call.answered or 0 for call in cluster.history.calls if call.rank == 0)
    slowest = max(call.answered or 0 for call in cluster.history.calls if call.rank == 2)
    assert all(each.finished for each in ended.values())
    waits = policy == "bounded-1"
    first_of_slow = sorted(c.answered or 0 for c in cluster.history.calls if c.rank == 2)
    assert (behind > first_of_slow[len(first_of_slow) // 2]) is waits, (behind, slowest)


def test_log_shows_every_arrival() -> None:
    lines: list[str] = []
    replay(3, log=lines.append)
    assert any("'commit'" in line for line in lines)
    assert any("-> ['step'" in line for line in lines)


TRACE = """
from paramserve.consistency.built_in import Async, Sync
from paramserve_testing import replay
for seed in range(6):
    for policy in (Sync(reduce="sum"), Async()):
        print(replay(seed, consistency=policy).trace())
"""


def test_trace_same_seed_is_equal_under_two_hash_seeds() -> None:
    traces = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", TRACE],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        traces.append(done.stdout.split())
    assert traces[0] == traces[1]
    assert len(set(traces[0])) == 12, "other seeds and policies have other traces"
