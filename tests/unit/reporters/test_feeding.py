"""Reporters are fed once a second; one that raises or hangs is told of once and dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.messages import Record
from paramserve.observe.checkpoints import CheckpointStatus
from paramserve.observe.metrics import FAMILIES, Monotonic, samples
from paramserve.observe.status import (
    GroupStatus,
    RunStatus,
    SentStatus,
    ServerLoad,
    Staleness,
    TableStatus,
    WorkerLoad,
)
from paramserve.reporters import Feed, Report, RunInfo, feeding

INFO = RunInfo("train", 2, 1, "Async()", 1, {"python": "3"})


def status(steps: int, state: str = "running", **more: Any) -> RunStatus:
    group = GroupStatus(
        steps,
        steps // 2,
        steps,
        1,
        Staleness(steps, 0.5, 2),
        staleness_by_rank={0: Staleness(steps, 0.5, 2)},
        dropped_by_rank={1: 3},
        sent_by_rank={0: SentStatus(100, 400, 0.25)},
    )
    table = GroupStatus(1, 0, 0, 0, Staleness(0, 0.0, 0), table=TableStatus(5, 640, 9, 4, 2))
    groups = {"model": group, "users": table}
    return RunStatus(state, 1.5, {0: "running", 1: "dead"}, groups, {"loss": 0.5}, **more)


class Run:
    """What has a status."""

    def __init__(self) -> None:
        self.now = status(10)

    def status(self) -> RunStatus:
        return self.now


class Kept:
    """A reporter with one method, as a user writes it."""

    def __init__(self, act: Callable[[Report], None] | None = None) -> None:
        self.reports: list[Report] = []
        self.came = threading.Event()
        self.act = act

    def report(self, report: Report) -> None:
        self.reports.append(report)
        self.came.set()
        if self.act is not None:
            self.act(report)


class Hooked(Kept):
    def __init__(self, act: Callable[[Report], None] | None = None) -> None:
        super().__init__(act)
        self.calls: list[str] = []

    def open(self, run: RunInfo) -> None:
        self.calls.append(f"open {run.name}")

    def begin(self) -> None:
        self.calls.append("begin")

    def close(self) -> None:
        self.calls.append("close")


def fed(*reporters: Any, every_s: float = 0.01) -> tuple[Feed, list[str]]:
    told: list[str] = []
    feed = Feed(reporters, told.append, every_s)
    feed.open(INFO)
    return feed, told


def record(clock: int) -> Record:
    return Record(0.0, 0, clock, {"loss": float(clock)})


def test_records_come_once_and_in_order_and_the_last_report_says_so() -> None:
    kept, hooked = Kept(), Hooked()
    feed, told = fed(kept, hooked)
    run = Run()
    feed.extend([record(1), record(2)])
    feed.start(run)
    assert kept.came.wait(10)
    feed.extend([record(3)])
    run.now = status(20, "finished")
    feed.close()
    for each in (kept, hooked):
        clocks = [got.clock for report in each.reports for got in report.records]
        assert clocks == [1, 2, 3]
        assert [report.last for report in each.reports] == [
            *[False] * (len(each.reports) - 1),
            True,
        ]
        assert each.reports[-1].step == 20
    assert hooked.calls == ["open train", "begin", "close"]
    assert told == []


def test_run_that_ends_by_itself_has_its_last_report_without_close() -> None:
    closed = threading.Event()

    class Ends(Kept):
        def close(self) -> None:
            closed.set()

    kept, run = Ends(), Run()
    feed, _ = fed(kept)
    run.now = status(20, "finished")
    feed.start(run)
    assert closed.wait(10)
    assert [report.last for report in kept.reports] == [True]
    feed.close()


def test_one_that_raises_is_told_of_once_and_the_others_go_on() -> None:
    def wrong(report: Report) -> None:
        raise ValueError("no room")

    bad, good = Hooked(wrong), Kept()
    feed, told = fed(bad, good)
    feed.start(Run())
    assert bad.came.wait(10)
    while len(good.reports) < 3:
        good.came.clear()
        assert good.came.wait(10)
    feed.close()
    assert told == [
        "the reporter Hooked raised ValueError: no room; it is told nothing more, the run goes on"
    ]
    assert len(bad.reports) == 1
    assert bad.calls == ["open train", "begin", "close"]


def test_one_that_hangs_is_logged_once_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "HANG_S", 0.05)
    monkeypatch.setattr(feeding, "EVERY_S", 0.02)
    monkeypatch.setattr(feeding, "CLOSE_S", 0.1)
    released = threading.Event()

    def hang(report: Report) -> None:
        released.wait(10)

    hangs, good = Kept(hang), Kept()
    feed, told = fed(hangs, good)
    feed.start(Run())
    while not told:
        good.came.clear()
        assert good.came.wait(10)
    feed.close()
    released.set()
    assert len(told) == 1
    assert told[0].startswith("the reporter Kept has been at one report for more than 0.05 s;")


def test_one_that_cannot_open_raises_and_those_before_it_are_closed() -> None:
    class Refuses(Kept):
        def open(self, run: RunInfo) -> None:
            raise OSError("the folder is not there")

    first = Hooked()
    feed = Feed([first, Refuses()], print)
    with pytest.raises(OSError, match="the folder"):
        feed.open(INFO)
    assert first.calls == ["open train", "close"]


@each_case(
    ("wrong", "text"),
    [
        ([Kept], r"write Kept\(...\), and not Kept"),
        (["run.csv"], r"have a method report\(report\), not 'run.csv'"),
        ("run.csv", "takes a list of reporters"),
        (Kept(), "takes a list of reporters"),
    ],
)
def test_what_is_no_reporter_is_refused(wrong: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Feed(wrong, print)


# --- metrics -------------------------------------------------------------------------------------


def test_every_family_is_told_by_a_run_that_has_all() -> None:
    whole = status(
        4,
        checkpoints=CheckpointStatus(path="/runs/7", age_s=3.0, bytes=9, written=2),
        loads={0: WorkerLoad(8.0, 2.0, 0.5, 1 << 20, 0.25)},
        servers={1: ServerLoad(640, 0, 7, 3, 2, 1 << 21)},
    )
    told = list(samples(whole))
    assert {each.family for each in told} == set(FAMILIES)
    found = {(each.family.name, *(v for _, v in each.labels)): each.value for each in told}
    assert found["paramserve_steps", "model"] == 4.0
    assert found["paramserve_worker_waited_seconds", "0"] == 2.0
    assert found["paramserve_server_waiting_requests", "1"] == 3.0
    assert found["paramserve_workers", "dead"] == 1.0
    assert found["paramserve_dropped", "model", "1"] == 3.0
    assert found["paramserve_staleness_versions", "model", "0"] == 2.0
    assert found["paramserve_table_rows", "users"] == 5.0
    assert found["paramserve_logged", "loss"] == 0.5
    assert ("paramserve_table_rows", "model") not in found


def test_counters_never_fall_where_servers_begin_again() -> None:
    counters = Monotonic()

    def written(count: int) -> float:
        now = status(1, checkpoints=CheckpointStatus(written=count))
        told = counters.samples(now)
        return next(s.value for s in told if s.family.name == "paramserve_checkpoints")

    assert [written(n) for n in (5, 8, 3, 3, 6, 1)] == [5, 8, 11, 11, 14, 15]


def test_steps_of_a_checkpoint_that_a_run_goes_on_from_are_not_counted_twice() -> None:
    counters = Monotonic()

    def steps(now: RunStatus) -> float:
        return next(s.value for s in counters.samples(now) if s.family.name == "paramserve_steps")

    assert [steps(status(n)) for n in (9_000, 10_000, 9_900, 10_050)] == [
        9_000,
        10_000,
        10_000,
        10_150,
    ]


def test_gauges_fall() -> None:
    counters = Monotonic()
    values = [
        next(s.value for s in counters.samples(status(n)) if s.family.name == "paramserve_clock")
        for n in (8, 2)
    ]
    assert values == [4.0, 1.0]
