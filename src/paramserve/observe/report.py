"""A run's report: its figures in a bounded size, as JSON and as an HTML page that loads nothing.

`RunReport` is what `report.json` holds. `Curves` bounds what workers log: of each curve it keeps
the lowest and the highest value of evenly sized buckets of points, so that peaks stay.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

import msgspec
from msgspec import Struct

from paramserve.errors import ParamServeError
from paramserve.messages import Record
from paramserve.observe.history import StepRecord, Steps
from paramserve.observe.status import GroupStatus, WorkerLoad

FORMAT = 1
POINTS_MAX = 2_000
"""Most points of one curve: more than a screen has columns."""
POINTS_ALL_MAX = 50_000
"""Most points of all curves of a page, at most some 35 bytes each: 2 MB."""
CURVES_MAX = 2_000
"""Most curves of one run; the next ones are left out, and counted."""
BINS_MAX = 32
"""Most bins of one histogram of staleness."""
EVENTS_MAX = 2_000
TEXT_MAX = 300
"""Characters of one name, or of what is told of one event."""


class Curve(Struct):
    """What a rank has logged under one name, in the order in which it did.

    Attributes:
        clocks: steps of the rank.
        times_s: seconds since the run's start.
        values: None: not finite.
        logged: points that these stand for.
        not_finite: how many of them were NaN or infinite.
    """

    name: str
    rank: int
    clocks: list[int]
    times_s: list[float]
    values: list[float | None]
    logged: int
    not_finite: int


class StepSummary(Struct):
    """The steps of one rank on one group.

    Attributes:
        recorded: steps that the histogram and `waited_s` are of, evenly spaced over the run.
        bin_width: versions; 1 where the staleness is small.
        counts: steps by the least staleness of their bin.
        dropped: of those recorded, steps whose gradient was not applied.
        waited_s: mean seconds that a step waited for its answer; None: not recorded.
        pushes, mean, max: of all pushes of the rank, as the servers counted them, and their
            staleness.
    """

    group: str
    rank: int
    recorded: int = 0
    bin_width: int = 1
    counts: dict[int, int] = {}
    dropped: int = 0
    waited_s: float | None = None
    pushes: int = 0
    mean: float = 0.0
    max: int = 0


class Event(Struct):
    """Something that happened to the run; None: not recorded.

    Attributes:
        kind: "death", "restart", "join", "retired", "rollback", "checkpoint", "policy", "failed".
        time_s: since the run's start.
        clock: steps of the rank.
    """

    kind: str
    text: str
    time_s: float | None = None
    rank: int | None = None
    clock: int | None = None

    def __post_init__(self) -> None:
        self.text = self.text[:TEXT_MAX]


class RunReport(Struct):
    """All that a report shows of one run.

    Attributes:
        run: `name`, `workers`, `servers`, `policy`, `seed`, as far as they are known.
        state: as of `RunStatus`.
        seconds: since the run's start.
        step_s: mean seconds from one step of a rank to its next, by rank; where it has logged at
            two clocks at least.
        dropped_records: records that were lost because workers logged too fast; None: not known.
        left_out: curves beyond `CURVES_MAX`.
        loads: by rank, what it had done with its time when it was last heard of; where the run had
            the reporter from its start.
    """

    run: dict[str, str]
    versions: dict[str, str]
    state: str
    seconds: float
    curves: list[Curve]
    steps: list[StepSummary]
    step_s: dict[int, float]
    events: list[Event]
    dropped_records: int | None = None
    left_out: int = 0
    format: int = FORMAT
    loads: dict[int, WorkerLoad] = {}


_Point = tuple[int, int, float, float]
"""Number in the curve, clock, seconds since the run's start, and value."""


class _Bucket:
    """Consecutive points: the lowest, the highest and the first that is not finite."""

    __slots__ = ("count", "high", "low", "odd")

    def __init__(self) -> None:
        self.count = 0
        self.low: _Point | None = None
        self.high: _Point | None = None
        self.odd: _Point | None = None

    def add(self, point: _Point) -> None:
        self.count += 1
        value = point[3]
        if not math.isfinite(value):
            self.odd = self.odd if self.odd is not None else point
            return
        if self.low is None or value < self.low[3]:
            self.low = point
        if self.high is None or value > self.high[3]:
            self.high = point

    def merge(self, later: _Bucket) -> None:
        count = self.count + later.count
        for point in later.points():
            self.add(point)
        self.count = count

    def points(self) -> list[_Point]:
        """Points, at most three, in the order in which they came."""
        return sorted({each for each in (self.low, self.high, self.odd) if each is not None})


class _Thinned:
    """One curve in so many buckets at most: when there are more, each two become one."""

    def __init__(self, buckets_max: int) -> None:
        self.logged = self.not_finite = 0
        self._max = buckets_max
        self._size = 1
        self._buckets = [_Bucket()]
        self._last: _Point | None = None

    def add(self, clock: int, time_s: float, value: float) -> None:
        self._last = point = self.logged, clock, time_s, value
        self.logged += 1
        self.not_finite += not math.isfinite(value)
        last = self._buckets[-1]
        if last.count == self._size:
            if len(self._buckets) == self._max:
                self._halve()
                last = self._buckets[-1]
            if last.count == self._size:
                self._buckets.append(last := _Bucket())
        last.add(point)

    def _halve(self) -> None:
        for first, second in zip(self._buckets[::2], self._buckets[1::2], strict=False):
            first.merge(second)
        self._buckets = self._buckets[::2]
        self._size *= 2

    def points(self) -> list[_Point]:
        """Points with the last one, which is the curve's present end."""
        points = [point for bucket in self._buckets for point in bucket.points()]
        if self._last is not None and (not points or points[-1] != self._last):
            points.append(self._last)
        return points


class Curves:
    """What the workers of a run have logged, in a bounded size.

    Args:
        started_s: of the run, seconds since the epoch; None: the first record's time.
    """

    def __init__(self, started_s: float | None = None) -> None:
        self.started_s = started_s
        self.left_out: set[tuple[str, int]] = set()
        self._curves: dict[tuple[str, int], _Thinned] = {}
        self._paces: dict[int, _Pace] = {}

    def extend(self, records: Iterable[Record]) -> None:
        """Records of `worker.log`; those of one rank come in the order in which it logged them."""
        for record in records:
            if self.started_s is None:
                self.started_s = record.time_s
            self._paces.setdefault(record.rank, _Pace()).add(record.clock, record.time_s)
            time_s = record.time_s - self.started_s
            for name, value in record.values.items():
                key = name, record.rank
                curve = self._curves.get(key)
                if curve is None:
                    if len(self._curves) == CURVES_MAX:
                        self.left_out.add(key)
                        continue
                    curve = self._curves[key] = _Thinned(POINTS_MAX // 2)
                curve.add(record.clock, time_s, value)

    def step_s(self) -> dict[int, float]:
        """Mean seconds from one step of a rank to its next, by rank."""
        return {rank: p.seconds / p.steps for rank, p in sorted(self._paces.items()) if p.steps}

    def by_name(self) -> list[Curve]:
        """The curves in the order of their names."""
        return [
            _curve(name, rank, each.points(), each.logged, each.not_finite)
            for (name, rank), each in sorted(self._curves.items())
        ]


class _Pace:
    """Seconds and steps between the clocks at which a rank has logged; where its clock falls, the
    run has gone back, and what that took is not counted."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self._before: tuple[int, float] | None = None

    def add(self, clock: int, time_s: float) -> None:
        if self._before is not None and clock == self._before[0]:
            return
        if self._before is not None and clock > self._before[0]:
            self.steps += clock - self._before[0]
            self.seconds += max(time_s - self._before[1], 0.0)
        self._before = clock, time_s


def _curve(name: str, rank: int, points: list[_Point], logged: int, not_finite: int) -> Curve:
    return Curve(
        name[:TEXT_MAX],
        rank,
        [clock for _, clock, _, _ in points],
        [round(time_s, 3) for _, _, time_s, _ in points],
        [float(f"{value:.6g}") if math.isfinite(value) else None for *_, value in points],
        logged,
        not_finite,
    )


def summaries(steps: Steps, groups: Mapping[str, GroupStatus]) -> list[StepSummary]:
    """The steps of each rank on each group, and its pushes as the servers counted them."""
    table: dict[tuple[str, int], StepSummary] = {}
    for group, by_rank in steps.items():
        largest = max(
            (each.staleness for records in by_rank.values() for each in records), default=0
        )
        width = 1
        while largest // width >= BINS_MAX:
            width *= 2  # so that the bins of one run fall into those of another
        for rank, records in by_rank.items():
            if records:
                table[group, rank] = _summary(group, rank, records, width)
    for group, status in groups.items():
        for rank, pushed in status.staleness_by_rank.items():
            each = table.setdefault((group, rank), StepSummary(group, rank))
            each.pushes, each.mean, each.max = pushed.pushes, pushed.mean, pushed.max
    return [table[key] for key in sorted(table)]


def _summary(group: str, rank: int, records: Sequence[StepRecord], width: int) -> StepSummary:
    counts: dict[int, int] = {}
    for each in records:
        low = each.staleness // width * width
        counts[low] = counts.get(low, 0) + 1
    dropped = sum(each.dropped for each in records)
    waited_s = sum(each.waited_s for each in records) / len(records)
    return StepSummary(group, rank, len(records), width, counts, dropped, waited_s)


def thinned(report: RunReport, points_max: int) -> RunReport:
    """Report with at most so many points in all its curves together, and two of each at least."""
    buckets = max(points_max // max(len(report.curves), 1) // 2, 1)
    curves = []
    for each in report.curves:
        if len(each.values) <= 2 * buckets:
            curves.append(each)
            continue
        fewer = _Thinned(buckets)
        for clock, time_s, value in zip(each.clocks, each.times_s, each.values, strict=True):
            fewer.add(clock, time_s, math.nan if value is None else value)
        points = fewer.points()
        curves.append(_curve(each.name, each.rank, points, each.logged, each.not_finite))
    return msgspec.structs.replace(report, curves=curves)


def page(reports: Mapping[str, RunReport]) -> str:
    """One HTML page of runs, by the names that it shows for them. It loads nothing, and executes
    its own script only: what comes from a run is data, and is shown as text."""
    each_max = POINTS_ALL_MAX // max(len(reports), 1)
    runs = [{"label": name, "report": thinned(each, each_max)} for name, each in reports.items()]
    data = msgspec.json.encode(runs).decode().replace("<", "\\u003c")
    template = files("paramserve.observe").joinpath("report.html").read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, _, after = template.replace("SCRIPT_DIGEST", f"sha256-{digest}").partition("RUN_DATA")
    return before + data + after


def to_json(report: RunReport) -> bytes:
    """Report as `report.json` holds it; numbers that are not finite are null."""
    return msgspec.json.encode(thinned(report, POINTS_ALL_MAX))


def read(path: str | os.PathLike[str]) -> RunReport:
    """A report that was written as JSON.

    Raises:
        OSError: the file cannot be read.
        ParamServeError: it is no report of a run, or one of another version.
    """
    with open(path, "rb") as file:
        data = file.read()
    try:
        report = msgspec.json.decode(data, type=RunReport)
        if report.format != FORMAT:
            raise ValueError(f"its format is {report.format}, this version reads {FORMAT}")
        for each in report.curves:
            if not len(each.clocks) == len(each.times_s) == len(each.values):
                raise ValueError(f"the lists of its curve {each.name!r} differ in length")
    except ValueError as error:
        raise ParamServeError(
            f"{os.fspath(path)} is no report of a run: {error}",
            fix="name the folder that ps.HTML(folder) wrote, of this version of paramserve",
        ) from None
    return report


def check_writable(path: str | os.PathLike[str]) -> None:
    """See that `write` can replace a file, which stays as it is.

    Raises:
        OSError: it cannot.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    new = f"{os.fspath(path)}.new"
    with open(new, "wb"):
        os.unlink(new)


def write(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace a file at once: who reads it meanwhile has the old one whole.

    Raises:
        OSError: it cannot be written; an old one is as it was, and nothing else is left.
    """
    new = f"{os.fspath(path)}.new"
    try:
        with open(new, "wb") as file:
            file.write(content)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
