"""The reporter that writes a run's report, and the command that shows several."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.suites import each_case
from tests.unit.reporters.test_feeding import INFO, record, status
from tests.unit.reporters.test_reporters import reported

from paramserve.cli import main
from paramserve.observe.checkpoints import CheckpointStatus
from paramserve.observe.history import StepRecord
from paramserve.observe.report import write
from paramserve.observe.status import RunStatus, WorkerLoad
from paramserve.reporters import HTML, Feed, Report, html
from paramserve.reporters.html import changes


def data(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text())


def test_report_has_what_was_logged_and_how_it_ended(tmp_path: Path) -> None:
    reported(HTML(tmp_path / "new" / "a"))
    told = data(tmp_path / "new" / "a")
    assert (told["state"], told["run"]["policy"], told["run"]["seed"]) == (
        "finished",
        "Async()",
        "1",
    )
    curves = {(each["name"], each["rank"]): each for each in told["curves"]}
    assert curves["loss", 0]["values"] == [1.0, 2.0]
    assert curves["bad", 1]["values"] == [None, None]
    assert told["steps"][0]["pushes"] == 20
    assert (tmp_path / "new" / "a" / "report.html").read_text().count("RUN_DATA") == 0
    assert sorted(os.listdir(tmp_path / "new" / "a")) == ["report.html", "report.json"]


def test_it_is_there_from_the_start_and_written_anew_every_thirty_seconds(tmp_path: Path) -> None:
    reporter = HTML(tmp_path)
    reporter.open(INFO)
    reporter.begin()
    assert data(tmp_path)["state"] == "starting"
    found = []
    for time_s in (1000.0, 1029.0, 1030.0, 1059.0, 1061.0):
        reporter.report(Report(status(5), (), [record(int(time_s))], time_s=time_s))
        found.append(sum(each["logged"] for each in data(tmp_path)["curves"]))
    assert found == [0, 0, 3, 3, 5]
    reporter.report(Report(status(6, "failed"), (), [record(9)], True, 1062.0))
    assert sum(each["logged"] for each in data(tmp_path)["curves"]) == 6


def test_what_a_worker_did_with_its_time_stays_when_it_has_left(tmp_path: Path) -> None:
    reporter = HTML(tmp_path)
    reporter.open(INFO)
    load = WorkerLoad(8.0, 2.0, 0.5, 1 << 20, 1.0)
    reporter.report(Report(status(5, loads={0: load}), (), [], time_s=1000.0))
    reporter.report(Report(status(6, "finished"), (), [], True, 1001.0))
    assert data(tmp_path)["loads"]["0"]["waited_s"] == 2.0


def test_folder_that_cannot_be_written_raises_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    for folder in (tmp_path / "file" / "a", tmp_path / "taken"):
        with pytest.raises(OSError):
            HTML(folder).open(INFO)


def test_report_of_a_run_before_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    reported(HTML(tmp_path))
    before = (tmp_path / "report.json").read_bytes()
    HTML(tmp_path).open(INFO)
    assert (tmp_path / "report.json").read_bytes() == before
    for _ in range(2):
        resumed = HTML(tmp_path)
        resumed.open(replace(INFO, resumed=True))
        resumed.begin()
        assert (tmp_path / "report-1.json").read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "report-1.html",
        "report-1.json",
        "report-2.html",
        "report-2.json",
        "report.html",
        "report.json",
    ]


def test_report_that_cannot_be_written_leaves_nothing_beside_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "report.json").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", fail_as_on_a_full_disk)
    with pytest.raises(OSError):
        write(tmp_path / "report.json", b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def fail_as_on_a_full_disk(*paths: object) -> None:
    raise OSError(errno.ENOSPC, "no space")


def test_last_report_alone_has_the_steps(tmp_path: Path) -> None:
    class Ended:
        def status(self) -> RunStatus:
            return status(8, "finished")

    told: list[str] = []
    feed = Feed([HTML(tmp_path)], told.append, 0.01)
    feed.open(INFO)
    feed.start(Ended(), steps=lambda: {"model": {0: [StepRecord(1, 1, 2, 0.25, False)]}})
    feed.close()
    (steps,) = data(tmp_path)["steps"]
    assert (steps["counts"], steps["waited_s"]) == ({"2": 1}, 0.25)
    assert told == []


def test_events_are_what_differs_between_two_looks() -> None:
    def look(seconds: float, workers: dict[int, str], **more: Any) -> RunStatus:
        return RunStatus("running", seconds, workers, {}, {}, **more)

    saved = CheckpointStatus(path="runs/step-4", age_s=0.5, bytes=9, written=1)
    looks = [
        look(0.0, {0: "starting", 1: "starting"}),
        look(1.0, {0: "running", 1: "running"}),
        look(2.0, {0: "running", 1: "dead"}, checkpoints=saved),
        look(3.0, {0: "running", 1: "dead"}, checkpoints=saved),
        look(4.0, {0: "running", 1: "running", 2: "starting"}, checkpoints=saved),
        look(5.0, {0: "returned", 1: "running", 2: "retired"}, checkpoints=saved),
    ]
    before, found = None, []
    for now in looks:
        found += [(each.kind, each.rank, each.time_s) for each in changes(before, now)]
        before = now
    assert found == [
        ("death", 1, 2.0),
        ("checkpoint", None, 1.5),
        ("restart", 1, 4.0),
        ("join", 2, 4.0),
        ("retired", 2, 5.0),
    ]


def test_events_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "EVENTS_MAX", 3)
    reporter = HTML(tmp_path)
    reporter.open(INFO)
    for n in range(10):
        now = RunStatus("running", float(n), {0: ("dead", "running")[n % 2]}, {}, {})
        reporter.report(Report(now, (), [], n == 9))
    assert [each["time_s"] for each in data(tmp_path)["events"]] == [7.0, 8.0, 9.0]


# --- the command ---------------------------------------------------------------------------------


def test_command_shows_two_runs_in_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "ab":
        reported(HTML(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert '[{"label":"a","report":{' in text
    assert ',{"label":"b","report":{' in text
    (tmp_path / "a" / "report.html").unlink()
    assert main(["report", "a"]) == 0
    assert capsys.readouterr().out == "a/report.html\n"
    assert (tmp_path / "a" / "report.html").is_file()


@each_case(
    ("args", "why"),
    [
        (["c"], "c has no report.json"),
        (["a", "a"], "named twice"),
        (["damaged"], "is no report of a run"),
        ([], "Missing argument"),
    ],
)
def test_command_refuses_what_has_no_report(
    args: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reported(HTML(tmp_path / "a"))
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "report.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *args]) != 0
    assert why in capsys.readouterr().err
