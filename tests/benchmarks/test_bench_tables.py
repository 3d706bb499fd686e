"""The benchmark of tables runs from end to end at tiny sizes. Nothing here judges speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.needs import needs

from benchmarks import bench_tables, tables_redis


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bench_tables_tiny_measures_every_contestant(tmp_path: Path) -> None:
    needs("ray")
    assert bench_tables.main(["--tiny", "--rows", "10000", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["failures"] == []
    rows = record["rows"]
    redis = {"redis"} if tables_redis.server_program() is not None else set()
    rivals = {"ours", "ray", "rpc", *redis}
    assert [set(row["medians"]) for row in rows] == [
        {"ours", "floor"},  # index and gather beside index_select
        {*rivals, "floor"},  # pull
        {*rivals, "floor"},  # push
        {*rivals, "floor"},  # push, several on their way
        {"ours", "floor"},  # row-wise
        rivals,  # few keys
        *[{"ours"}] * 7,  # look-up, insert, longest request (2), memory, arenas, size
        {"ours", "floor"},  # DLRM
    ]
    assert all(value > 0 for row in rows for value in row["medians"].values())
    for row in rows:
        for bar in row["judged"]:
            assert bar["met"] is not None or ("Redis" in bar["bar"] and not redis)
    assert all((tables_redis.NAME in row["notes"]) == ("ray" in row["medians"]) for row in rows)
