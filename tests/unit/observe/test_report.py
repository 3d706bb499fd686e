"""A run's report: what it keeps of the curves, and the page, as a browser draws it."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paramserve.errors import ParamServeError, WorkerFailed
from paramserve.launch.result import Restarted, Result
from paramserve.messages import Record
from paramserve.observe import report as module
from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.history import StepRecord
from paramserve.observe.report import Curves, RunReport, page, read, summaries, thinned, to_json
from paramserve.observe.status import GroupStatus, Staleness, WorkerLoad
from paramserve.reporters import RunInfo

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
HOSTILE = "</script><script>document.title='owned'</script><b onclick=x>loss & \u2028"
PAGE_BYTES_MAX = 3_000_000


def records(count: int, *, rank: int = 0, name: str = "loss") -> Iterator[Record]:
    noise = random.Random(rank)
    for n in range(count):
        yield Record(1e9 + n * 0.01, rank, n + 1, {name: 1 / (1 + n / 50) + noise.random() / 9})


def run_report(*found: Record, **more: Any) -> RunReport:
    curves = Curves()
    curves.extend(found)
    told = {"name": "train", "workers": "2", "servers": "1", "policy": "Async()", "seed": "7"}
    empty: dict[str, Any] = {"steps": [], "events": [], "step_s": curves.step_s()}
    return RunReport(told, {"python": "3"}, "finished", 9.0, curves.by_name(), **(empty | more))


def result() -> Result:
    """Of a run in which all came about."""
    error = WorkerFailed("worker 1 ended: killed by signal 9", applied="yes", fix="look at it")
    group = GroupStatus(
        90, 40, 80, 0, Staleness(80, 1.0, 6), staleness_by_rank={0: Staleness(40, 1.5, 6)}
    )
    steps = [StepRecord(n, n, n % 3, 0.004, n == 4) for n in range(1, 9)]
    return Result(
        returns={},
        metrics=[*records(50), *records(50, rank=1)],
        dropped_records=3,
        staleness={},
        failures={1: error},
        restarts=[Restarted(1, error, 20, 0)],
        seconds=9.0,
        seed=2**62 + 1,
        stopped=False,
        values={},
        groups={"model": group},
        steps={"model": {0: steps, 1: steps[:4]}},
        rollbacks=[Rollback(error, "runs/step-9", {"model": 12}, {"model": 9}, 3, 1.5)],
        checkpoints=CheckpointStatus(path="runs/step-40", age_s=2.0, bytes=100, written=4),
        run=RunInfo("train", 2, 1, "Async()", 2**62 + 1, {"python": "3.11", "torch": "2.6"}),
    )


def embedded(html: str) -> Any:
    """The data of a page, as a browser finds it: up to the first end tag of a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


# --- curves --------------------------------------------------------------------------------------


def test_curve_keeps_ends_order_and_peaks() -> None:
    for count in (1, 2, 1999, 2000, 2001, 2002, 5000, 34_567):
        values = [math.sin(n / 900) for n in range(count)]
        values[count // 3], values[count // 2] = 50.0, -50.0
        curves = Curves()
        curves.extend(Record(n * 0.5, 0, n, {"x": value}) for n, value in enumerate(values))
        (curve,) = curves.by_name()
        assert curve.logged == count
        assert len(curve.values) <= module.POINTS_MAX + 1
        assert count <= module.POINTS_MAX or len(curve.values) > module.POINTS_MAX // 3
        assert curve.clocks == sorted(set(curve.clocks))
        assert curve.clocks[-1] == count - 1
        kept = dict(zip(curve.clocks, curve.values, strict=True))
        assert kept[count // 2] == -50.0
        assert count < 3 or kept[count // 3] == 50.0
        assert all(kept[n] == pytest.approx(values[n], rel=1e-5) for n in kept)
        assert curve.times_s == [n * 0.5 for n in curve.clocks]


def test_every_bucket_of_a_curve_keeps_its_minimum_and_maximum() -> None:
    noise = random.Random(3)
    values = [noise.gauss(0, 1) for _ in range(40_000)]
    curves = Curves()
    curves.extend(Record(0.0, 0, n, {"x": value}) for n, value in enumerate(values))
    (curve,) = curves.by_name()
    size = 64  # the least power of two with 1,000 buckets at most
    for start in range(0, 40_000, size):
        part = values[start : start + size]
        kept = [
            value
            for n, value in zip(curve.clocks, curve.values, strict=True)
            if start <= n < start + size
        ]
        assert min(kept) == pytest.approx(min(part), rel=1e-5)  # type: ignore[type-var]
        assert max(kept) == pytest.approx(max(part), rel=1e-5)  # type: ignore[type-var]


def test_values_that_are_not_finite_are_gaps_and_are_counted() -> None:
    curves = Curves()
    values = [1.0, math.nan, 2.0, math.inf, *[math.nan] * 10_000]
    curves.extend(Record(float(n), 0, n, {"x": value}) for n, value in enumerate(values))
    (curve,) = curves.by_name()
    assert curve.not_finite == 10_002
    assert {1.0, 2.0, None} == {*curve.values}
    json.loads(
        to_json(run_report(*[Record(0.0, 0, 1, {"x": math.nan})])), parse_constant=pytest.fail
    )


def test_pace_leaves_out_where_the_run_went_back() -> None:
    curves = Curves()
    told = [(0.0, 10), (1.0, 20), (1.5, 20), (100.0, 12), (102.0, 22)]
    curves.extend(Record(time_s, 4, clock, {"x": 0.0}) for time_s, clock in told)
    assert curves.step_s() == {4: pytest.approx(3.0 / 20)}
    alone = Curves()
    alone.extend([Record(0.0, 0, 1, {"x": 0.0})])
    assert alone.step_s() == {}


def test_more_curves_than_the_most_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CURVES_MAX", 2)
    curves = Curves()
    curves.extend([Record(0.0, 0, n, dict.fromkeys("abcd", 1.0)) for n in range(3)])
    assert [each.name for each in curves.by_name()] == ["a", "b"]
    assert len(curves.left_out) == 2


def test_staleness_bins_fit_those_of_other_runs() -> None:
    steps = [StepRecord(n, n, n, 0.5, n == 7) for n in range(100)]
    groups = {
        "w": GroupStatus(
            1, 1, 1, 0, Staleness(9, 2.0, 5), staleness_by_rank={3: Staleness(9, 2.0, 5)}
        )
    }
    first, second = summaries({"w": {0: steps}}, groups)
    assert (first.bin_width, first.counts[0], first.counts[96]) == (4, 4, 4)
    assert (sum(first.counts.values()), first.dropped, first.waited_s) == (100, 1, 0.5)
    assert (second.rank, second.pushes, second.mean, second.max) == (3, 9, 2.0, 5)
    assert (second.recorded, second.waited_s) == (0, None)


# --- the page ------------------------------------------------------------------------------------


def test_result_report_has_what_the_run_has(tmp_path: Path) -> None:
    result().report(tmp_path / "new" / "run.html")
    (run,) = embedded((tmp_path / "new" / "run.html").read_text())
    told = run["report"]
    assert run["label"] == "train"
    assert told["run"] == {
        "name": "train",
        "workers": "2",
        "servers": "1",
        "policy": "Async()",
        "seed": "4611686018427387905",
    }
    assert told["versions"] == {"python": "3.11", "torch": "2.6"}
    assert [(each["name"], each["rank"], len(each["values"])) for each in told["curves"]] == [
        ("loss", 0, 50),
        ("loss", 1, 50),
    ]
    assert [each["counts"] for each in told["steps"]] == [
        {"0": 2, "1": 3, "2": 3},
        {"0": 1, "1": 2, "2": 1},
    ]
    assert told["step_s"] == {
        "0": pytest.approx(0.01, rel=1e-3),
        "1": pytest.approx(0.01, rel=1e-3),
    }
    assert [(each["kind"], each["time_s"]) for each in told["events"]] == [
        ("restart", None),
        ("death", None),
        ("rollback", None),
        ("checkpoint", 7.0),
    ]
    assert told["dropped_records"] == 3


def test_page_has_hostile_names_as_data_alone() -> None:
    report = run_report(*records(3, name=HOSTILE))
    html = page({HOSTILE: report})
    (run,) = embedded(html)
    assert run["label"] == HOSTILE
    assert run["report"]["curves"][0]["name"] == HOSTILE
    assert html.count("<script") == 2
    assert "<b onclick" not in html
    assert not re.search(r"""(src|href)=|https?://(?!www\.w3\.org/2000/svg)""", html)


def test_million_points_are_below_three_megabytes() -> None:
    curves = Curves()
    for rank in range(50):
        curves.extend(
            Record(1e9 + n / 7, rank, n, {"loss": -1 / (3 + n), "accuracy": n / 7})
            for n in range(10_000)
        )
    assert sum(each.logged for each in curves.by_name()) == 1_000_000
    report = msgspec.structs.replace(run_report(), curves=curves.by_name())
    assert len(page({"a": report}).encode()) < PAGE_BYTES_MAX
    assert len(page({"a": report, "b": report}).encode()) < PAGE_BYTES_MAX
    assert len(to_json(report)) < PAGE_BYTES_MAX


def test_fewer_points_keep_the_peaks() -> None:
    report = run_report(*records(4000))
    (before,), (after,) = report.curves, thinned(report, 100).curves
    assert len(after.values) <= 101
    assert after.logged == 4000
    numbers = [value for value in before.values if value is not None]
    assert {min(numbers), max(numbers)} <= {*after.values}


def test_report_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    report = run_report(*records(10))
    path.write_bytes(to_json(report))
    assert read(path) == report


def test_file_that_is_no_report_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "report.json", json.loads(to_json(run_report(*records(3))))
    uneven = {**whole["curves"][0], "clocks": [1, 2]}
    for change, why in (
        ({"format": 2}, "its format is 2"),
        ({"curves": [{"name": "x", "rank": 0}]}, "missing required field"),
        ({"curves": [uneven]}, "differ in length"),
        ({"run": {"seed": [1]}}, "Expected `str`"),
        (None, "truncated"),
    ):
        path.write_text("{" if change is None else json.dumps(whole | change))
        with pytest.raises(ParamServeError, match=why):
            read(path)


# --- in a browser --------------------------------------------------------------------------------


def opened(path: Path, tmp_path: Path) -> tuple[str, str]:
    """The document of a page once its script has run, and what the browser's console told."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"NOT CHECKED IN A BROWSER: none of {', '.join(BROWSERS)} is installed")
    alone = ("quic", "background-networking", "component-update", "sync", "gpu")
    options = ["--headless", "--no-sandbox", "--no-first-run", "--enable-logging=stderr"]
    options += [f"--disable-{each}" for each in alone]
    options += ["--virtual-time-budget=5000", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [browser, *options, profile, path.as_uri()], capture_output=True, text=True, timeout=60
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_browser_draws_every_part_without_an_error(tmp_path: Path) -> None:
    result().report(tmp_path / "a.html")
    (one,) = embedded((tmp_path / "a.html").read_text())
    first = msgspec.convert(one["report"], RunReport, strict=False)
    second = run_report(*records(3000), *records(5, name=HOSTILE))
    second = msgspec.structs.replace(second, loads={0: WorkerLoad(400.0, 100.0, 50.0, 1, 1.0)})
    (tmp_path / "two.html").write_text(page({"a": first, HOSTILE: second}))
    document, console = opened(tmp_path / "two.html", tmp_path)
    assert console == ""
    assert 'data-ready="' in document  # the script has come to its end
    assert 'data-drawn="3"' in document
    assert len(re.findall(r'<path d="M[^"]+L[^"]+" class="curve"', document)) == 3
    assert "<title>owned" not in document
    assert "<b onclick" not in document
    assert document.count("<circle") == 1
    assert len(re.findall(r"<rect[^>]*><title>", document)) == 6  # bars of the histogram
    assert "2,000 of 3,000" not in document
    assert re.search(r"[\d,]+ of 3,100 points are drawn", document)
    assert "4611686018427387905" in document
    times = document[document.index("of it encoded") :].partition("</table>")[0]
    assert re.findall(r'class="number">([^<]*)<', times)[-4:] == [
        "10.0 ms",
        "2.50 ms",
        "25%",
        "1.25 ms",
    ]


USED = """<script>
SVGElement.prototype.setPointerCapture = () => {};  // there is no real pointer
const told = [], drawn = () => document.body.dataset.drawn;
const texts = document.getElementById("curves").getElementsByTagName("text");
const labels = () => [...texts].map((each) => each.textContent);
const happens = (kind, part) => {
  const svg = document.querySelector("#curves svg"), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent(kind, { clientX: box.left + part * box.width }));
};
document.querySelector("#legend button").click();
told.push(drawn());
happens("pointermove", 0.5);
told.push(document.querySelector(".tip").textContent);
document.querySelector("#legend button").click();
told.push(drawn());
const before = labels().join();
happens("pointerdown", 0.4); happens("pointermove", 0.6); happens("pointerup", 0.6);
told.push(labels().join() !== before);
document.getElementById("whole").click();
told.push(labels().join() === before);
document.getElementById("metric").value = "0";
document.getElementById("metric").onchange();
told.push(drawn());
document.body.dataset.told = JSON.stringify(told);
</script></body>"""


def test_browser_hides_zooms_and_changes_the_metric(tmp_path: Path) -> None:
    logged = [*records(50), *records(50, rank=1), Record(1e9, 0, 1, {"accuracy": 0.5})]
    html = re.sub(r"<meta http-equiv[^>]*>", "", page({"a": run_report(*logged)}))
    (tmp_path / "used.html").write_text(html.replace("</body>", USED))
    document, console = opened(tmp_path / "used.html", tmp_path)
    assert console == ""
    found = re.search(r'data-told="([^"]*)"', document)
    assert found is not None
    hidden, tip, shown, zoomed, whole, other = json.loads(found[1].replace("&quot;", '"'))
    assert (hidden, shown, zoomed, whole, other) == ("1", "2", True, True, "1")
    assert re.fullmatch(r"at 2\d\.?\d*rank 1: 0\.\d+ at step 2\d", tip)
