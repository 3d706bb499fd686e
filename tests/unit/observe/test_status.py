"""A run's numbers, joined over shards and ranks."""

from __future__ import annotations

from typing import Any

from tests.suites import each_case

from paramserve.config import ConsistencySpec
from paramserve.messages import (
    GroupPolicy,
    GroupReport,
    LeaseReport,
    Member,
    OwnSpeed,
    SentGradients,
    ServerBeat,
    Status,
    TableReport,
)
from paramserve.observe.progress import Progress
from paramserve.observe.status import (
    RunStatus,
    SentStatus,
    SpeedStatus,
    Staleness,
    TableStatus,
    by_group,
    by_rank,
    drops_by_rank,
    of_cluster,
    samples_by_rank,
)


def shard(number: int, version: int, *ranks: tuple[int, int, int, int]) -> ServerBeat:
    """A shard at `version`; each of `ranks` is (rank, pushes, sum, largest) and is live."""
    clocks = tuple((rank, pushes) for rank, pushes, _, _ in ranks)
    return ServerBeat(number, (GroupReport("model", version, clocks, 0, ranks),))


def test_group_counts_as_far_as_its_slowest_shard() -> None:
    beats = [shard(0, 12, (0, 6, 4, 2), (1, 6, 8, 3)), shard(1, 10, (0, 5, 4, 2), (1, 5, 6, 3))]
    group = by_group(beats)["model"]
    assert (group.version, group.clock, group.steps) == (10, 5, 10)
    assert group.staleness == Staleness(pushes=10, mean=1.0, max=3)


def test_group_has_what_each_rank_sent_of_it() -> None:
    sent = [
        (0, SentGradients("model", 10, 40, 0.5)),
        (2, SentGradients("model", 5, 20, 0.25)),
        (0, SentGradients("other", 1, 4, 0.0)),
    ]
    group = by_group([shard(0, 12, (0, 6, 4, 2))], sent)["model"]
    assert group.sent_by_rank == {0: SentStatus(10, 40, 0.5), 2: SentStatus(5, 20, 0.25)}
    assert (group.sent_bytes, group.plain_bytes) == (15, 60)
    assert by_group([shard(0, 12, (0, 6, 4, 2))])["model"].sent_bytes == 0


def test_group_has_how_fast_each_rank_steps() -> None:
    speeds = [(0, OwnSpeed("model", 2.5, 12)), (1, OwnSpeed("other", 0.5, 2))]
    group = by_group([shard(0, 12, (0, 6, 4, 2))], (), speeds)["model"]
    assert group.speed_by_rank == {0: SpeedStatus(2.5, 12)}


def test_group_steps_are_those_that_were_made_and_no_clocks_before_a_rank_came() -> None:
    """Rank 2 came at clock 430, rank 1 came back at 12 where it had been at 7."""
    report = GroupReport(
        "model",
        900,
        ((0, 440), (1, 15), (2, 433)),
        0,
        ((0, 440, 0, 0), (1, 10, 0, 0), (2, 3, 0, 0)),
        passed=((1, 5), (2, 430)),
    )
    assert by_group([ServerBeat(0, (report,))])["model"].steps == 440 + 10 + 3


def test_group_steps_count_workers_that_have_left() -> None:
    report = GroupReport("model", 9, ((1, 5),), 2, ((0, 4, 0, 0), (1, 5, 0, 0)))
    group = by_group([ServerBeat(0, (report,))])["model"]
    assert (group.clock, group.steps, group.skipped) == (5, 9, 2)


def test_group_without_live_workers_keeps_the_clock_of_the_last_one() -> None:
    report = GroupReport("model", 18, (), 0, (), clock=9)
    group = by_group([ServerBeat(0, (report,))])["model"]
    assert (group.clock, group.version) == (9, 18)


@each_case("live", [((0, 0), (1, 0)), ()], ids=["live", "left"])
def test_group_that_is_pushed_by_hand_has_a_version_and_no_clock(
    live: tuple[tuple[int, int], ...],
) -> None:
    report = GroupReport("names", 192, live, 0, ((0, 96, 0, 0), (1, 96, 0, 0)))
    groups = by_group([ServerBeat(0, (report,))])
    status = RunStatus("running", 3.25, {}, groups, {})
    assert groups["names"].clock == 0
    assert status.progress() == "after 3.2 s: names: 192 steps (version 192)"
    assert "workers" not in Progress().line(status)


def test_push_counts_once_with_the_mean_staleness_of_its_shards() -> None:
    beats = [shard(0, 4, (0, 2, 2, 1), (1, 2, 0, 0)), shard(1, 4, (0, 2, 6, 5), (1, 2, 0, 0))]
    assert by_rank(beats) == {0: Staleness(2, 2.0, 5), 1: Staleness(2, 0.0, 0)}


def test_nothing_reported_gives_nothing() -> None:
    assert by_group([]) == {}
    assert by_rank([ServerBeat(0, ())]) == {}


def test_progress_says_how_far_the_run_got() -> None:
    groups = by_group([shard(0, 181, (0, 181, 0, 0), (1, 182, 0, 0))])
    status = RunStatus("running", 3.25, {0: "running", 1: "dead"}, groups, {})
    assert status.progress() == "after 3.2 s: model: 363 steps (version 181), 1 of 2 workers"
    assert "model: 363 steps" in Progress().line(status), "in the same unit"


UNTRAINED = ("model.buffers", "model.rank3.buffers", "model.frozen.buffers", "users (labels)")


def test_progress_is_that_of_groups_that_steps_train() -> None:
    each = by_group([shard(0, 181, (0, 181, 0, 0))])["model"]
    groups = dict.fromkeys(("model", *UNTRAINED), each)
    status = RunStatus("running", 3.25, {0: "running"}, groups, {})
    assert status.progress() == "after 3.2 s: model: 181 steps (version 181), 1 of 1 workers"
    told = Progress().line(status) + Progress().by_worker(status)
    assert "model" in told
    assert not any(name in told for name in UNTRAINED)
    only = RunStatus("running", 3.25, {0: "running"}, dict.fromkeys(UNTRAINED, each), {})
    assert "no step was finished" in only.progress()


def test_progress_of_a_group_that_was_only_assigned_tells_its_version() -> None:
    groups = by_group([ServerBeat(0, (GroupReport("names", 1, (), 0, ()),))])
    assert "names at version 1" in RunStatus("running", 3.25, {}, groups, {}).progress()


def test_progress_before_the_first_step_says_so() -> None:
    status = RunStatus("starting", 0.5, {0: "starting"}, {}, {})
    assert status.progress() == "after 0.5 s: no step was finished, 0 of 1 workers"


def report(version: int, **told: Any) -> GroupReport:
    return GroupReport("model", version, ((0, 6), (1, 5)), 0, (), policy="Async", **told)


def test_group_tells_its_policy_and_what_waits_or_was_dropped() -> None:
    beats = [
        ServerBeat(0, (report(9, dropped=((1, 3),), buffered=2, kept_bytes=100),)),
        ServerBeat(1, (report(8, dropped=((0, 1), (1, 2)), buffered=1, kept_bytes=40),)),
    ]
    group = by_group(beats)["model"]
    assert group.policy == "Async"
    assert (group.buffered, group.kept_bytes) == (2, 140)
    # Each shard drops by itself: a gradient counts as dropped where most were.
    assert group.dropped_by_rank == {0: 1, 1: 3}
    assert group.dropped == 4


def test_table_is_that_of_all_shards_together() -> None:
    parts = [TableReport(10, 1000, 8, 15, 5, 2), TableReport(20, 3000, 8, 20, 4, 1)]
    stale = ((0, 4, 6, 3),)
    beats = [
        ServerBeat(n, (GroupReport("users", 4, ((0, 4),), 0, stale, table=part), report(9)))
        for n, part in enumerate(parts)
    ]
    groups = by_group(beats)
    assert groups["users"].table == TableStatus(30, 4000, 35, 9, 3)
    assert groups["users"].staleness_by_rank == {0: Staleness(4, 1.5, 3)}
    assert groups["model"].table is None


def test_drops_are_added_over_the_groups() -> None:
    other = GroupReport("other", 3, (), 0, (), dropped=((1, 5), (2, 1)))
    beats = [ServerBeat(0, (report(9, dropped=((1, 3),)), other))]
    assert drops_by_rank(beats) == {1: 8, 2: 1}


@each_case(("clock", "told"), [(6, "Buffered from clock 6"), (5, "")])
def test_group_tells_a_change_of_policy_until_it_holds(clock: int, told: str) -> None:
    change = GroupPolicy(0, 1, clock, ConsistencySpec("Buffered", {"size": 4}))
    beats = [ServerBeat(0, (report(9, changes=(change,)),))]  # its slowest worker is at clock 5
    assert by_group(beats)["model"].coming == told


def test_progress_does_not_wait_for_workers_that_retired() -> None:
    states = {0: "running", 1: "retiring", 2: "retired", 3: "dead"}
    assert RunStatus("running", 1.0, states, {}, {}).staffing == (1, 2)


def test_samples_are_those_in_the_values_over_all_loaders() -> None:
    first = LeaseReport("train", ((0, 600, 512), (1, 100, 96)))
    second = LeaseReport("more", ((1, 50, 48), (2, 50, 0)))
    assert samples_by_rank([first, second]) == {0: 512, 1: 144, 2: 0}


@each_case(
    ("state", "found"), [("dead", "finished"), ("restarting", "running"), ("live", "running")]
)
def test_cluster_with_a_rank_that_restarts_is_not_finished(state: str, found: str) -> None:
    told = Status(0, (Member(0, 1, 1, "left"), Member(1, 2, 1, state)), (), (), (), 0)
    assert of_cluster(told, {}).state == found
