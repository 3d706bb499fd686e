"""What workers log, and a run's metrics, sent to experiment trackers."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from paramserve.reporters.base import Report, Reporter, RunInfo
from paramserve.reporters.feeding import missing

METRICS_MAX = 1_000
"""Most metrics of one call of MLflow's `log_batch`."""
KEY_MAX = 250
"""Letters of a metric's name in MLflow."""


def _numbers(report: Report) -> dict[str, float]:
    """The run's metrics, with labels as parts of the names: they say which group and rank."""
    return {
        "/".join((family.name, *(each for _, each in labels))): value
        for family, labels, value in report.samples
    }


class WandB(Reporter):
    """Log a run to Weights & Biases.

    What a worker logs as `loss` is `rank0/loss` over `rank0/clock`, and so for each rank; the run's
    metrics are over the steps of all workers together.

    Example:
        ps.run(train, report_to=[ps.WandB(project="digits")])

    Args:
        options: of `wandb.init`, as project=, name=, mode="offline".
    Raises:
        ParamServeError: of `ps.run`, before anything is started: wandb is missing. What
            `wandb.init` raises, as where no user is logged in.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._run: Any = None
        self._ranks: set[int] = set()

    def open(self, run: RunInfo) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError as error:
            raise missing("wandb", "WandB", error) from None
        config = run.flat() | self.options.get("config", {})
        self._run = wandb.init(**{"name": run.name} | self.options | {"config": config})
        self._run.define_metric("paramserve/*", step_metric="paramserve/steps")

    def report(self, report: Report) -> None:
        # One of each rank together: W&B takes as long for one name as for many.
        rows = list[dict[str, float]]()
        counts = Counter[int]()
        for record in report.records:
            rank, nth = f"rank{record.rank}", counts[record.rank]
            counts[record.rank] += 1
            if record.rank not in self._ranks:
                self._ranks.add(record.rank)
                self._run.define_metric(f"{rank}/*", step_metric=f"{rank}/clock")
            if nth == len(rows):
                rows.append({})
            values = {f"{rank}/{name}": value for name, value in record.values.items()}
            rows[nth] |= {f"{rank}/clock": record.clock, **values}
        for row in rows:
            self._run.log(row)
        numbers = {
            f"paramserve/{name.removeprefix('paramserve_')}": value
            for name, value in _numbers(report).items()
        }
        self._run.log({**numbers, "paramserve/steps": report.step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


class MLflow(Reporter):
    """Log a run to MLflow.

    What a worker logs as `loss` is the metric `rank0/loss` with the worker's clock as its step; the
    run's metrics have the steps of all workers together. Letters that MLflow takes in no name
    become "_": `acc@1` is `rank0/acc_1`.

    Example:
        ps.run(train, report_to=[ps.MLflow("digits", tracking_uri="sqlite:///mlflow.db")])

    Args:
        experiment: name of the experiment; it is made if there is none.
        tracking_uri: of the store or server; None: MLflow's own setting.
        run_name: None: the training function's.
    Raises:
        ParamServeError: of `ps.run`, before anything is started: mlflow is missing. What MLflow
            raises where its server does not answer.
    """

    def __init__(
        self, experiment: str, *, tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.run_name = run_name
        self._client: Any = None
        self._metric: Any = None
        self._experiment: Any = None
        self._run: RunInfo | None = None
        self._run_id = ""

    def open(self, run: RunInfo) -> None:
        try:
            tracking = import_module("mlflow.tracking")
            entities = import_module("mlflow.entities")
        except ImportError as error:
            raise missing("mlflow-skinny", "MLflow", error) from None
        self._client, self._metric = tracking.MlflowClient(self.tracking_uri), entities.Metric
        self._run = run
        self._experiment = self._client.get_experiment_by_name(self.experiment)

    def begin(self) -> None:
        assert self._run is not None
        experiment = self._experiment
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(self.experiment)
        )
        name = self.run_name if self.run_name is not None else self._run.name
        self._run_id = self._client.create_run(number, run_name=name).info.run_id
        for key, value in self._run.flat().items():
            self._client.log_param(self._run_id, key, value)

    def report(self, report: Report) -> None:
        metrics = list(self._metrics(report))
        for at in range(0, len(metrics), METRICS_MAX):
            self._client.log_batch(self._run_id, metrics=metrics[at : at + METRICS_MAX])
        if report.last:
            done = report.status.state == "finished"
            self._client.set_terminated(self._run_id, "FINISHED" if done else "FAILED")

    def _metrics(self, report: Report) -> Iterator[Any]:
        for record in report.records:
            for name, value in record.values.items():
                at = round(record.time_s * 1000)
                key = _key(f"rank{record.rank}/{name}")
                yield self._metric(key, value, at, record.clock)
        for name, value in _numbers(report).items():
            yield self._metric(_key(name), value, round(report.time_s * 1000), report.step)


def _key(name: str) -> str:
    """A name as MLflow takes it: others' letters become "_", and its end is cut off.
    Source: mlflow.utils.validation, `_VALID_PARAM_AND_METRIC_NAMES`, `MAX_ENTITY_KEY_LENGTH`, and
    `path_not_unique`, which takes a name for a path."""
    whole = "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name)
    return posixpath.normpath(whole[:KEY_MAX]).strip("/.")
