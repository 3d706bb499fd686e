"""The benchmarks run from end to end at tiny sizes. Nothing here judges speed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.needs import needs

from benchmarks import (
    bench_checkpoints,
    bench_dense_100mb,
    bench_large_step,
    bench_latency,
    bench_memory,
    bench_mnist,
    bench_policies,
    bench_ray_engine,
    bench_start,
    bench_tcp,
    bench_waiting,
    ours_policies,
    push_pull,
    run_all,
)


def rows_of(bench: ModuleType, folder: Path) -> list[dict[str, Any]]:
    assert bench.main(["--tiny", "--out", str(folder)]) == 0
    record = json.loads((folder / "bench.json").read_text())
    assert record["failures"] == []
    assert (folder / "bench.md").read_text().startswith("| workload | ours |")
    rows: list[dict[str, Any]] = record["rows"]
    return rows


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("bench", [bench_dense_100mb, bench_latency, bench_mnist])
def test_bench_with_rivals_tiny_measures_every_contestant(
    bench: ModuleType, tmp_path: Path
) -> None:
    needs("ray")
    for row in rows_of(bench, tmp_path):
        if "overlap" not in row["workload"]:  # the rivals' loops have no such option
            assert {"ours", "floor", "ray", "rpc"} <= set(row["medians"]), row["workload"]
        assert all(value > 0 for value in row["medians"].values())
        assert all(bar["met"] is not None for bar in row["judged"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bench_of_checkpoints_tiny_measures_all(tmp_path: Path) -> None:
    rows = rows_of(bench_checkpoints, tmp_path)
    assert all(row["medians"].get("ours") is not None for row in rows)


@pytest.mark.parametrize(
    "bench",
    [
        bench_memory,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (bench_large_step, bench_tcp)),
    ],
)
def test_bench_without_rivals_tiny_measures_ours_and_floor(
    bench: ModuleType, tmp_path: Path
) -> None:
    for row in rows_of(bench, tmp_path):
        assert {"ours", "floor"} <= set(row["medians"])


def test_push_pull_tiny_prints_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    push_pull.main(["--tiny"])
    told = capsys.readouterr().out
    assert "8 KB" in told
    assert "of two memcpys" in told


@pytest.mark.slow
def test_bench_policies_tiny_measures_every_policy_beside_async(tmp_path: Path) -> None:
    rows = rows_of(bench_policies, tmp_path)
    calls = [row for row in rows if "push_pull" in row["workload"]]
    both = [*ours_policies.NO_WAITS, *ours_policies.ALONE]
    assert [row["workload"].rpartition(", ")[2] for row in calls] == [
        *both,
        *ours_policies.NO_WAITS,
    ]
    assert all(set(row["medians"]) == {"ours", "base"} for row in calls)
    assert all(value > 0 for row in rows for value in row["medians"].values())
    # Async() is what the others are compared with; every other row has a bar, and an answer to it.
    assert sum(not row["judged"] for row in rows) == 2
    assert all(bar["met"] is not None for row in rows for bar in row["judged"])


@pytest.mark.slow
def test_bench_waiting_tiny_measures_both_extremes(tmp_path: Path) -> None:
    rows = rows_of(bench_waiting, tmp_path)
    assert all({"ours", "off", "always"} == set(row["medians"]) for row in rows)
    assert all(value > 0 for row in rows for value in row["medians"].values())
    assert [bar["met"] is not None for row in rows for bar in row["judged"]] == [True]


@pytest.mark.slow
def test_bench_start_tiny_measures_every_contestant(tmp_path: Path) -> None:
    needs("ray")
    empty, many, stepped, defined = rows_of(bench_start, tmp_path)
    assert set(empty["medians"]) == {"ours", "floor", "ray"}
    assert set(many["medians"]) == set(stepped["medians"]) == {"ours", "floor"}
    assert set(defined["medians"]) == {"ours"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_bench_ray_engine_tiny_measures_every_contestant(tmp_path: Path) -> None:
    needs("ray")
    training, start = rows_of(bench_ray_engine, tmp_path)
    assert set(training["medians"]) == {"ours", "local", "ray"}
    assert set(start["medians"]) == {"ours"}


def test_run_all_has_every_benchmark() -> None:
    files = {path.stem for path in Path(run_all.__file__).parent.glob("bench_*.py")}
    assert {one.__name__.rpartition(".")[2] for one in run_all.BENCHMARKS} == files
