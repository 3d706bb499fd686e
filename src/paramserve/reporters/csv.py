"""What workers log, as rows of a file that every program reads."""

from __future__ import annotations

import csv
import os
from typing import Any, TextIO

from paramserve.reporters.base import Report, Reporter, RunInfo

COLUMNS = ("time_s", "rank", "clock", "name", "value")


class CSV(Reporter):
    """Write what workers log to a CSV file: a row for each number.

    The columns are `time_s` (seconds since the epoch), `rank`, `clock` (steps of that worker),
    `name` and `value`. A file that is there is written anew once the run has been started; a run
    that goes on from a checkpoint (`resume=`) adds its rows. Steps that are made again, behind a
    checkpoint, have rows again: the last ones count.

    Example:
        ps.run(train, report_to=[ps.CSV("runs/loss.csv")])
        rows = pandas.read_csv("runs/loss.csv")
        rows = rows.drop_duplicates(["clock", "name", "rank"], keep="last")
        rows.pivot(index="clock", columns=["name", "rank"])

    Args:
        path: of the file; its folder is made.
    Raises:
        OSError: of `ps.run`, before anything is started: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._file: TextIO | None = None
        self._rows: Any = None
        self._new = False
        """Whether this run has made the file, and has not begun."""
        self._resumed = False

    def open(self, run: RunInfo) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._new, self._resumed = not os.path.exists(self.path), run.resumed
        self._file = open(self.path, "a", newline="", encoding="utf-8")  # noqa: SIM115 - closed in close
        self._rows = csv.writer(self._file)

    def begin(self) -> None:
        assert self._file is not None
        self._new = False
        if not self._resumed:
            self._file.truncate(0)
        if self._file.seek(0, os.SEEK_END) == 0:
            self._rows.writerow(COLUMNS)
        self._file.flush()

    def report(self, report: Report) -> None:
        assert self._file is not None
        for time_s, rank, clock, values in (
            (each.time_s, each.rank, each.clock, each.values) for each in report.records
        ):
            self._rows.writerows((time_s, rank, clock, name, repr(x)) for name, x in values.items())
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            if self._new:
                self._new = False
                os.unlink(self.path)
