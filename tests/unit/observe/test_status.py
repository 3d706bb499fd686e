"""A run's numbers, joined over shards and ranks."""

from __future__ import annotations

from paramserve.messages import GroupReport, ServerBeat
from paramserve.observe.status import RunStatus, Staleness, by_group, by_rank


def shard(number: int, version: int, *ranks: tuple[int, int, int, int]) -> ServerBeat:
    """A shard at `version`; each of `ranks` is (rank, pushes, sum, largest) and is live."""
    clocks = tuple((rank, pushes) for rank, pushes, _, _ in ranks)
    return ServerBeat(number, (GroupReport("model", version, clocks, 0, ranks),))


def test_group_counts_as_far_as_its_slowest_shard() -> None:
    beats = [shard(0, 12, (0, 6, 4, 2), (1, 6, 8, 3)), shard(1, 10, (0, 5, 4, 2), (1, 5, 6, 3))]
    group = by_group(beats)["model"]
    assert (group.version, group.clock, group.steps) == (10, 5, 10)
    assert group.staleness == Staleness(pushes=10, mean=1.0, max=3)


def test_group_steps_count_workers_that_have_left() -> None:
    report = GroupReport("model", 9, ((1, 5),), 2, ((0, 4, 0, 0), (1, 5, 0, 0)))
    group = by_group([ServerBeat(0, (report,))])["model"]
    assert (group.clock, group.steps, group.skipped) == (5, 9, 2)


def test_group_without_live_workers_has_its_version_as_clock() -> None:
    report = GroupReport("model", 9, (), 0, ())
    assert by_group([ServerBeat(0, (report,))])["model"].clock == 9


def test_push_counts_once_with_the_mean_staleness_of_its_shards() -> None:
    beats = [shard(0, 4, (0, 2, 2, 1), (1, 2, 0, 0)), shard(1, 4, (0, 2, 6, 5), (1, 2, 0, 0))]
    assert by_rank(beats) == {0: Staleness(2, 2.0, 5), 1: Staleness(2, 0.0, 0)}


def test_nothing_reported_gives_nothing() -> None:
    assert by_group([]) == {}
    assert by_rank([ServerBeat(0, ())]) == {}


def test_progress_says_how_far_the_run_got() -> None:
    groups = by_group([shard(0, 181, (0, 181, 0, 0), (1, 182, 0, 0))])
    status = RunStatus("running", 3.25, {0: "running", 1: "dead"}, groups, {})
    assert status.progress() == "after 3.2 s: model at clock 181 (version 181), 1 of 2 workers"


def test_progress_before_the_first_step_says_so() -> None:
    status = RunStatus("starting", 0.5, {0: "starting"}, {}, {})
    assert status.progress() == "after 0.5 s: no step was finished, 0 of 1 workers"
