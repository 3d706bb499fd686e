"""What workers log, and a run's metrics, as TensorBoard's event files."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from paramserve.observe.report import check_writable
from paramserve.reporters.base import Report, Reporter, RunInfo
from paramserve.reporters.feeding import missing


class TensorBoard(Reporter):
    """Write event files that TensorBoard shows: `tensorboard --logdir <folder>`.

    What workers log is in `<folder>/rank<rank>` over each worker's own clock, so that one name of
    all workers is one chart. The run's metrics, as steps and staleness, are in `<folder>` over the
    steps of all workers together.

    Example:
        ps.run(train, report_to=[ps.TensorBoard("runs/first")])

    Args:
        folder: is made. Runs that are to be compared have folders beside each other.
    Raises:
        ParamServeError: of `ps.run`, before anything is started: torch or tensorboard is missing.
        OSError: the same: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self._writers: dict[str, Any] = {}
        self._kind: Any = None
        self._about = ""

    def open(self, run: RunInfo) -> None:
        try:
            self._kind = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise missing("tensorboard", "TensorBoard", error) from None
        os.makedirs(self.folder, exist_ok=True)
        check_writable(os.path.join(self.folder, "events"))
        self._about = "\n".join(f"    {name}: {each}" for name, each in run.flat().items())

    def begin(self) -> None:
        self._writer("").add_text("run", self._about)

    def _writer(self, below: str) -> Any:
        if below not in self._writers:
            self._writers[below] = self._kind(os.path.join(self.folder, below))
        return self._writers[below]

    def report(self, report: Report) -> None:
        for record in report.records:
            writer = self._writer(f"rank{record.rank}")
            for name, value in record.values.items():
                writer.add_scalar(name, value, record.clock, walltime=record.time_s)
        whole = self._writer("")
        for family, labels, value in report.samples:
            tag = "/".join((family.name, *(each for _, each in labels)))
            whole.add_scalar(tag, value, report.step, walltime=report.time_s)
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
