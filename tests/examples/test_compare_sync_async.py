"""examples/compare_sync_async.py: what is measured, what is made of it, and one real comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.suites import each_case

import compare_sync_async as compare
import racing
import report
from paramserve.consistency.registry import BUILT_IN
from paramserve.messages import Record


class Seen(NamedTuple):
    """A snapshot of values that are right in this share of all cases."""

    version: int
    state: Mapping[str, Any]


def seen(version: int, share: float) -> Any:
    return Seen(version, {"share": share})


def made(
    name: str, scenario: str = "even", seconds: float | None = 2.0, **told: Any
) -> report.Race:
    facts: dict[str, Any] = {
        "label": name,
        "target": 0.9,
        "updates": 100,
        "steps_per_second": 200.0,
        "staleness": (3.0, 4),
        "waiting": 0.25,
        "dropped": 7,
        "samples": {0: 300, 1: 100},
        "curve": [report.Point(0, 0.0, 0.1), report.Point(100, 2.0, 0.9)],
    }
    return report.Race(name=name, scenario=scenario, seconds=seconds, **{**facts, **told})


# --- the pace


def test_pace_is_the_batch_times_the_slowness() -> None:
    even, persistent = (racing.Pace(one, 0) for one in ("even", "persistent"))
    assert {even.seconds(rank, 4, 0, 128) for rank in range(4)} == {0.020}
    assert [persistent.seconds(rank, 4, 0, 128) for rank in range(4)] == [0.020] * 3 + [0.100]
    assert persistent.seconds(3, 4, 0, 32) == pytest.approx(0.025)


def test_pace_transient_draws_a_tenth_by_seed_rank_and_step() -> None:
    def slow(seed: int) -> list[tuple[int, int]]:
        pace = racing.Pace("transient", seed)
        each = [(rank, step) for rank in range(4) for step in range(250)]
        return [(rank, step) for rank, step in each if pace.seconds(rank, 4, step, 128) == 0.100]

    assert slow(1) == slow(1)
    assert slow(1) != slow(2)
    assert 60 < len(slow(1)) < 140  # of 1,000; five standard deviations are 47


# --- what the logs say


def record(time_s: float, rank: int, clock: int, **values: float) -> Record:
    return Record(time_s, rank, clock, values)


BEGAN = [record(10.1, 0, 0, samples=0), record(10.0, 1, 0, samples=0)]
STEPS = [
    record(11.0, 0, 1, samples=128, waited_s=0.0, computed_s=1.0),
    record(12.0, 0, 2, samples=128, waited_s=0.5, computed_s=0.5),
    record(12.5, 1, 1, samples=64, waited_s=0.5, computed_s=1.5),
    record(14.0, 1, 4, samples=64, waited_s=0.0, computed_s=1.0),  # clock 3 went by without it
]


def test_log_counts_from_the_common_first_moment() -> None:
    log = racing.Log([*BEGAN, *reversed(STEPS)])
    assert log.samples == {0: 256, 1: 128}
    assert log.steps_per_second == 4 / 4.0
    assert log.waiting == pytest.approx(1.0 / 5.0)


@each_case(
    ("version", "per_update", "seconds"),
    [
        (0, None, 0.0),
        (1, None, 1.0),  # the first worker that had finished the clock
        (3, None, 4.0),  # no rank logged clock 3: the first one past it
        (5, None, None),
        (2, 1.0, 2.0),
        (3, 1.0, 2.5),
        (1, 4.0, 4.0),
        (2, 4.0, None),
    ],
)
def test_log_version_is_dated_by_clock_or_by_steps(
    version: int, per_update: float | None, seconds: float | None
) -> None:
    assert racing.Log([*BEGAN, *STEPS]).reached(version, per_update) == seconds


@each_case("number", [513, 517, 538])  # 512 and 538 are evaluated in any case
def test_evaluate_finds_the_first_snapshot_at_the_target_with_few_evaluations(number: int) -> None:
    judged: list[int] = []

    def judge(snapshot: Any) -> float:
        judged.append(snapshot.version)
        return float(snapshot.state["share"])

    points = [(seen(10 * n, n / 1000), n * 0.1) for n in range(1000)]
    curve = racing.evaluate(points, number / 1000, judge)
    first = next(point for point in curve if point.accuracy >= number / 1000)
    assert (first.version, first.seconds) == (10 * number, pytest.approx(0.1 * number))
    assert len(judged) == len(set(judged)) < 2 * racing.POINTS
    assert [point.seconds for point in curve] == sorted(point.seconds for point in curve)


def test_evaluate_of_nothing_is_nothing() -> None:
    assert racing.evaluate([], 0.9, lambda one: 0.0) == []


def test_finish_is_some_time_after_the_target_was_seen_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(racing, "accuracy", lambda state, images, labels: state["share"])
    finish = racing.Finish(0.9, torch.zeros(1), torch.zeros(1))
    at = racing.LOOK_S
    shares = {0.0: 0.5, at: 0.95, 2 * at: 0.8, 3 * at: 0.9, 4 * at: 0.9}
    assert not any(finish.passed(seen(0, share), now) for now, share in shares.items())
    assert not finish.passed(seen(0, 0.9), 4 * at + 0.9 * racing.AFTER_S)
    assert finish.passed(seen(0, 0.9), 4 * at + racing.AFTER_S)


# --- what is made of it


def test_middle_of_the_rounds_counts_one_without_target_as_slowest() -> None:
    rounds = [made("sync", seconds=seconds) for seconds in (3.0, None, 1.0)]
    assert compare.middle(rounds).seconds == 3.0
    assert compare.middle([made("sync", seconds=None), made("sync")]).seconds is None


def test_findings_compare_with_sync() -> None:
    races = [
        made("sync", "even", 4.0),
        made("sync", "persistent", 20.0),
        made("async", "persistent", 5.0),
        made("bounded", "persistent", 19.0),
        made("balanced", "persistent", 5.0),
        made("leases", "persistent", 5.0, samples={0: 90, 1: 10}),
        made("sync", "transient", steps_per_second=80.0),
        made("bounded", "transient", steps_per_second=120.0),
    ]
    told = " ".join(compare.findings(races, "persistent"))
    assert "`async` was 4.00 times as fast as `Sync()`" in told
    assert "`bounded` was 1.05 times as fast" in told
    assert "took 1.25 times as long as `Sync()` with even workers" in told
    assert "the slow worker did 0.20 of an even share" in told
    assert "1.50 times the steps a second" in " ".join(compare.findings(races, "transient"))
    assert compare.findings(races, "even") == []


def test_findings_leave_out_what_was_not_reached() -> None:
    races = [made("sync", "persistent", 20.0), made("async", "persistent", None)]
    assert compare.findings(races, "persistent") == []


def test_place_replaces_what_is_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- compare:even -->\nold\n<!-- compare:even:end -->\nb\n")
    options = compare.parse(["--rounds", "3"])
    compare.write_page(page, "even", compare.place([made("sync")], "even", options))
    text = page.read_text()
    assert "old" not in text
    assert "| `sync` | 2.0 | 100 | 200 | 3.0 (4) | 25% | 7 | 75/25 |" in text
    assert "the middle one of 3 runs" in text
    assert text.startswith("a\n<!-- compare:even -->\n|")
    assert text.endswith("<!-- compare:even:end -->\nb\n")


def test_write_page_without_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no <!-- compare:even -->"):
        compare.write_page(page, "even", "")
    assert page.read_text() == "no marks\n"


def test_page_has_a_place_and_a_picture_for_every_scenario() -> None:
    text = compare.PAGE.read_text()
    for scenario in racing.SCENARIOS:
        for mark in (f"<!-- compare:{scenario} -->", f"<!-- compare:{scenario}:end -->"):
            assert text.count(mark) == 1, mark
        assert f"(consistency_{scenario}.png)" in text
        assert (compare.DOCS / f"consistency_{scenario}.png").stat().st_size > 10_000


def test_entrants_are_all_policies_each_with_a_colour() -> None:
    entrants = compare.entrants()
    kinds = {type(each.policy(0.01, 4)).__name__ for each in entrants}
    assert kinds == set(BUILT_IN)
    assert {each.name for each in entrants} == set(report.HUES)
    for each in entrants:
        each.policy(0.01, 4).check(4)


def test_unknown_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--policies", "sync,eventual"])
    assert "unknown: eventual; known: sync, backup" in capsys.readouterr().err


def test_race_that_did_not_reach_the_target_is_shown(tmp_path: Path) -> None:
    races = [made("sync"), made("async", seconds=None, updates=None, curve=[])]
    assert races[1].cells()[:2] == ("not reached", "-")
    saved = report.save_races(races, tmp_path / "out")
    assert (saved / "consistency_even.png").stat().st_size > 10_000
    assert [one["name"] for one in json.loads((saved / "races.json").read_text())] == [
        "sync",
        "async",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compare_trains_the_digits_with_one_slow_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    (docs / "page.md").write_text("<!-- compare:persistent --><!-- compare:persistent:end -->")
    monkeypatch.setattr(compare, "DOCS", docs)
    monkeypatch.setattr(compare, "PAGE", docs / "page.md")
    options = "--scenario persistent --policies sync,async --workers 2 --steps 600 --target 0.5"
    assert (
        compare.main([*options.split(), "--data", "digits", "--write-docs", "--out", str(out)]) == 0
    )
    (saved,) = out.iterdir()
    sync, free = json.loads((saved / "races.json").read_text())
    for race in (sync, free):
        assert race["seconds"] > 0, "the digits were not learned"
        assert race["curve"][-1][1] >= race["seconds"]
    done = sync["samples"].values()
    assert max(done) - min(done) <= 2 * racing.BATCH  # both go at the slow one's pace
    assert free["samples"]["1"] < 0.7 * free["samples"]["0"]  # and here it does about a fifth
    assert sync["staleness"] == [0.0, 0]
    assert free["staleness"][1] > 1
    assert "| `Async()` |" in (docs / "page.md").read_text()
    assert (docs / "consistency_persistent.png").exists()
    assert "Async() was" in capsys.readouterr().out
