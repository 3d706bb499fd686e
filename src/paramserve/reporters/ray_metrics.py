"""A run's metrics among those of a Ray cluster."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from paramserve.observe.metrics import Labels, Sample
from paramserve.reporters.base import Report, Reporter, RunInfo
from paramserve.reporters.feeding import missing

RUN = "run"
"""The tag that says which run it is: Ray has the metrics of all of them in one place."""


class RayMetrics(Reporter):
    """Put a run's metrics among those of the Ray cluster, by `ray.util.metrics`.

    Each of Ray's nodes shows them to Prometheus at its `metrics_export_port`, with the names of
    `ps.Prometheus` behind "ray_"; Ray's own dashboard needs `pip install "ray[default]"`. The
    process that called `ps.run` has to be connected to Ray, as with `engine=ps.OnRay()`.

    Example:
        ps.run(train, engine=ps.OnRay(), report_to=[ps.RayMetrics()])

    Args:
        run: what this run's metrics are tagged with; None: the name of the training function.
    Raises:
        ParamServeError: of `ps.run`, before anything is started: ray is missing.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = run
        self._tag = ""
        self._kinds: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, Labels], float] = {}
        """Ray's counters are told by how much they grow."""

    def open(self, run: RunInfo) -> None:
        try:
            metrics = import_module("ray.util.metrics")
        except ImportError as error:
            raise missing("ray", "RayMetrics", error) from None
        self._kinds = {"counter": metrics.Counter, "gauge": metrics.Gauge}
        self._metrics, self._counted = {}, {}
        self._tag = self.run if self.run is not None else run.name

    def report(self, report: Report) -> None:
        for sample in report.samples:
            self._record(sample)

    def _record(self, sample: Sample) -> None:
        family, labels, value = sample
        tags = {RUN: self._tag, **dict(labels)}
        metric = self._metrics.get(family.name)
        if metric is None:
            kind = self._kinds[family.kind]
            metric = kind(family.name, description=family.help, tag_keys=tuple(tags))
            self._metrics[family.name] = metric
        if family.kind == "gauge":
            metric.set(value, tags=tags)
            return
        grown = value - self._counted.get((family.name, labels), 0.0)
        if grown > 0.0:  # Ray refuses to add nothing
            metric.inc(grown, tags=tags)
            self._counted[family.name, labels] = value
