"""Where a run is reported to: `ps.run(..., report_to=[ps.CSV("loss.csv")])`."""

from __future__ import annotations

from paramserve.reporters.base import Report as Report
from paramserve.reporters.base import Reporter as Reporter
from paramserve.reporters.base import RunInfo as RunInfo
from paramserve.reporters.base import versions as versions
from paramserve.reporters.csv import CSV as CSV
from paramserve.reporters.feeding import Feed as Feed
from paramserve.reporters.html import HTML as HTML
from paramserve.reporters.prometheus import Prometheus as Prometheus
from paramserve.reporters.ray_metrics import RayMetrics as RayMetrics
from paramserve.reporters.tensorboard import TensorBoard as TensorBoard
from paramserve.reporters.trackers import MLflow as MLflow
from paramserve.reporters.trackers import WandB as WandB
