"""Each reporter's output, read back by the program that it is for."""

from __future__ import annotations

import csv
import math
import os
import socket
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.contract.role_cluster import wait_until
from tests.suites import each_case
from tests.unit.reporters.test_feeding import INFO, record, status

from paramserve.errors import ParamServeError
from paramserve.messages import Record
from paramserve.observe.metrics import Monotonic
from paramserve.observe.status import GroupStatus, RunStatus, Staleness
from paramserve.reporters import (
    CSV,
    MLflow,
    Prometheus,
    RayMetrics,
    Report,
    TensorBoard,
    WandB,
    trackers,
)
from paramserve.reporters import prometheus as module


def reported(reporter: Any, *, steps: int = 10) -> None:
    """All that a reporter is called with in a short run."""
    reporter.open(INFO)
    if hasattr(reporter, "begin"):
        reporter.begin()
    counters = Monotonic()
    for number in (1, 2):
        now = status(number * steps, "finished" if number == 2 else "running")
        came = [record(number), Record(7.0, 1, number, {"loss": 2.0, "bad": math.nan})]
        reporter.report(Report(now, counters.samples(now), came, number == 2))
    reporter.close()


def test_csv_has_a_row_for_each_number(tmp_path: Path) -> None:
    reported(CSV(tmp_path / "new" / "loss.csv"))
    with open(tmp_path / "new" / "loss.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert rows[0] == {"time_s": "0.0", "rank": "0", "clock": "1", "name": "loss", "value": "1.0"}
    assert [row["value"] for row in rows if row["name"] == "bad"] == ["nan", "nan"]


def test_csv_that_cannot_be_written_raises_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        CSV(tmp_path / "file" / "loss.csv").open(INFO)


def test_csv_of_a_run_before_stays_until_the_new_one_has_begun(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    reported(CSV(path))
    before = path.read_text()
    refused = CSV(path)
    refused.open(INFO)
    refused.close()
    assert path.read_text() == before
    other = CSV(tmp_path / "other.csv")
    other.open(INFO)
    other.close()
    assert not (tmp_path / "other.csv").exists()
    reported(CSV(path))
    assert path.read_text() == before
    resumed = CSV(path)
    resumed.open(replace(INFO, resumed=True))
    resumed.begin()
    resumed.report(Report(status(30), (), [record(9)]))
    resumed.close()
    assert path.read_text() == f"{before}0.0,0,9,loss,9.0\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_its_files_back(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reported(TensorBoard(tmp_path))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def events(below: str, tag: str) -> list[tuple[int, float]]:
        found = EventAccumulator(str(tmp_path / below))
        found.Reload()
        return [(each.step, each.value) for each in found.Scalars(tag)]

    assert events("rank0", "loss") == [(1, 1.0), (2, 2.0)]
    assert events("rank1", "loss") == [(1, 2.0), (2, 2.0)]
    assert events("", "paramserve_steps/model") == [(10, 10.0), (20, 20.0)]


class RayMetric:
    """As those of `ray.util.metrics`, which take numbers and give none back."""

    made: ClassVar[dict[str, RayMetric]] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert name not in self.made, "Ray is told of each once"
        self.made[name] = self
        self.tag_keys = tag_keys
        self.told: list[tuple[float, dict[str, str]]] = []

    def _take(self, value: float, tags: dict[str, str]) -> None:
        assert tuple(tags) == self.tag_keys
        self.told.append((value, tags))


class RayGauge(RayMetric):
    set = RayMetric._take


class RayCounter(RayMetric):
    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0.0, "as Ray has it"
        self._take(value, tags)


def test_ray_is_told_by_how_much_counters_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = SimpleNamespace(Counter=RayCounter, Gauge=RayGauge)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", metrics)
    monkeypatch.setattr(RayMetric, "made", {})
    reported(RayMetrics())
    steps = RayMetric.made["paramserve_steps"].told
    assert steps == [(10.0, {"run": "train", "group": "model"})] * 2
    clocks = RayMetric.made["paramserve_run_seconds"].told
    assert clocks == [(1.5, {"run": "train"})] * 2
    skipped = RayMetric.made["paramserve_skipped"].told
    assert len(skipped) == 1, "it did not grow"


def test_ray_that_is_missing_raises_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.util.metrics", None)
    with pytest.raises(ParamServeError, match="ray"):
        RayMetrics().open(INFO)


# --- Prometheus ----------------------------------------------------------------------------------


def scraped(reporter: Prometheus) -> str:
    with urllib.request.urlopen(f"http://{reporter.address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_parses_what_is_served() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    reporter = Prometheus(port=0)
    reporter.open(INFO)
    now = status(10)
    reporter.report(Report(now, Monotonic().samples(now), [], False))
    families = {each.name: each for each in text_string_to_metric_families(scraped(reporter))}
    reporter.close()
    assert families["paramserve_steps"].type == "counter"
    steps, _ = families["paramserve_steps"].samples
    assert steps.name == "paramserve_steps_total"
    assert (steps.labels, steps.value) == ({"group": "model"}, 10.0)
    assert families["paramserve_workers"].type == "gauge"
    assert {each.labels["state"] for each in families["paramserve_workers"].samples} >= {"dead"}
    assert all(each.documentation for each in families.values())
    with pytest.raises(OSError):
        scraped(reporter)  # it has ended


def test_a_port_in_use_names_its_owner_and_the_next_free_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ParamServeError, match=rf"port {port}: in use") as found:
            Prometheus(port).open(INFO)
        if "process" in str(found.value):  # where it can be known
            assert f"by process {os.getpid()} (" in str(found.value)
        monkeypatch.setattr(module, "PORT", port)
        reporter = Prometheus()
        reporter.open(INFO)
        assert int(reporter.address.rpartition(":")[2]) > port
        reporter.close()


def test_metrics_are_for_this_host_alone_unless_told() -> None:
    reporter = Prometheus(port=0)
    reporter.open(INFO)
    assert reporter.address.startswith("127.0.0.1:")
    reporter.close()


def test_idle_and_slow_connections_keep_no_scrape_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    reporter = Prometheus(0)
    reporter.open(INFO)
    server = reporter._server
    assert server is not None
    idle = []
    try:
        host, port = reporter.address.split(":")
        for _ in range(module.CONNECTIONS_MAX + 4):
            before = [*server._opened]
            idle.append(socket.create_connection((host, int(port)), 10))
            idle[-1].sendall(b"GET /metr")
            # One of more at a time than the system queues is tried again after a second.
            wait_until(lambda before=before: [*server._opened] != before)
            assert len(server._opened) <= module.CONNECTIONS_MAX
        assert (
            urllib.request.urlopen(f"http://{reporter.address}/metrics", timeout=10).status == 200
        )
        assert [each.recv(1) for each in idle[:5]] == [b""] * 5, "the oldest were ended"
        assert len(server._opened) < module.CONNECTIONS_MAX
        monkeypatch.setattr(module, "REQUEST_S", 0.0)
        assert [each.recv(1) for each in idle] == [b""] * len(idle), "they took too long"
    finally:
        for each in idle:
            each.close()
        reporter.close()


def test_server_that_cannot_accept_waits_between_its_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = list[float]()
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waited.append))
    server = module.MetricsServer("127.0.0.1", 0, None)
    try:
        server.socket.close()  # accept raises, as without a free descriptor
        for _ in range(2):
            server._handle_request_noblock()  # type: ignore[attr-defined]  # the loop calls it
    finally:
        server.server_close()
    assert waited == [module.POLL_S] * 2


def test_a_scrape_of_64_workers_takes_less_than_the_promise() -> None:
    ranks = {rank: Staleness(100, 1.5, 4) for rank in range(64)}
    group = GroupStatus(9, 3, 9, 0, Staleness(6400, 1.5, 4), staleness_by_rank=ranks)
    now = RunStatus("running", 1.0, dict.fromkeys(range(64), "running"), {"model": group}, {})
    reporter = Prometheus(port=0)
    reporter.open(INFO)
    reporter.report(Report(now, Monotonic().samples(now), [], False))
    scraped(reporter)
    took = []
    for _ in range(20):
        began = time.perf_counter()
        scraped(reporter)
        took.append(time.perf_counter() - began)
    reporter.close()
    assert min(took) < 0.02  # the promise is 5 ms: other programs may run here


# --- trackers ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_parameters_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = str(tmp_path / "store")
    reported(MLflow("digits", tracking_uri=uri))
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert run.data.params["workers"] == "2"
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "rank0/loss")
    assert [(each.step, each.value) for each in history] == [(1, 1.0), (2, 2.0)]
    assert run.data.metrics["paramserve_steps/model"] == 20.0


@each_case(
    ("name", "key"),
    [
        ("rank0/acc@1", "rank0/acc_1"),
        ("rank0/größe µ", "rank0/größe µ"),
        ("rank0//../a", "a"),
        ("x" * 300, "x" * 250),
        ("rank0/{a}\n", "rank0/_a__"),
    ],
)
def test_mlflow_takes_every_name(name: str, key: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    assert trackers._key(name) == key
    _validate_metric_name(trackers._key(name))


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    reported(WandB(project="digits"))
    import wandb

    wandb.teardown()  # its own process, which ends with this one else
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    for told in (b"rank0/loss", b"rank1/clock", b"steps/model"):
        assert told in data


@each_case(
    ("reporter", "package"),
    [
        (TensorBoard("runs/x"), "torch.utils.tensorboard"),
        (Prometheus(), "prometheus_client"),
        (WandB(), "wandb"),
        (MLflow("x"), "mlflow.tracking"),
    ],
    ids=["TensorBoard", "Prometheus", "WandB", "MLflow"],
)
def test_a_missing_package_is_told_with_what_to_install(
    reporter: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ParamServeError, match="pip install"):
        reporter.open(INFO)


def test_wandb_is_told_of_each_rank_in_one_row() -> None:
    rows: list[dict[str, float]] = []
    told = WandB()
    told._run = SimpleNamespace(log=rows.append, define_metric=lambda *_, **__: None)
    logged = [(0, 1), (0, 2), (1, 1), (0, 3), (1, 2)]
    records = [Record(0.0, rank, clock, {"loss": rank + clock / 8}) for rank, clock in logged]
    told.report(Report(status(10), [], records))
    first, second, third, _ = rows
    assert first == {"rank0/clock": 1, "rank0/loss": 0.125, "rank1/clock": 1, "rank1/loss": 1.125}
    assert second == {"rank0/clock": 2, "rank0/loss": 0.25, "rank1/clock": 2, "rank1/loss": 1.25}
    assert third == {"rank0/clock": 3, "rank0/loss": 0.375}
