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
    `name` and `value`. A file that is there is written anew.

    Example:
        ps.run(train, report_to=[ps.CSV("runs/loss.csv")])
        pandas.read_csv("runs/loss.csv").pivot(index="clock", columns=["name", "rank"])

    Args:
        path: of the file; its folder is made.
    Raises:
        OSError: of `ps.run`, before anything is started: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._file: TextIO | None = None
        self._rows: Any = None

    def open(self, run: RunInfo) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self._file = open(self.path, "w", newline="", encoding="utf-8")  # noqa: SIM115 - closed in close
        self._rows = csv.writer(self._file)
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
