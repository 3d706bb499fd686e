"""examples/sharded_100mb.py runs every K with every N; it checks the values itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.suites import each_case

import paramserve as ps
import sharded_100mb

SMALL = "--megabytes 1 --steps 2 --workers 2"


@each_case(
    ("option", "servers", "name", "policy"),
    [("", [1, 3], "async", ps.Async), ("--sync", [2], "sync", ps.Sync)],
)
def test_sharded_example_measures_every_pair(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    servers: list[int],
    name: str,
    policy: type,
) -> None:
    real, asked = ps.run, []

    def run(*args: Any, **kwargs: Any) -> ps.Result:
        asked.append(type(kwargs["consistency"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(ps, "run", run)
    counts = ",".join(map(str, servers))
    assert sharded_100mb.main(f"{SMALL} --servers {counts} {option}".split()) == 0
    output = capsys.readouterr().out
    assert f"1 MB of float64, {name}, 2 steps of each worker" in output
    assert asked == [policy] * len(servers)
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    assert [(int(row[0]), int(row[1])) for row in rows] == [(count, 2) for count in servers]
    for row in rows:
        updates_per_s, gb_per_s = float(row[2].replace(",", "")), float(row[3])
        assert updates_per_s > 0
        assert gb_per_s == pytest.approx(updates_per_s * 2e6 / 1e9, abs=0.006)


class LostOne:
    """What a run of one worker leaves that should have made three pushes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.returns = {0: (0.0, 1.0)}

    def state_dict(self, name: str) -> dict[str, np.ndarray]:
        return {"vector": np.full(125_000, 2.0)}


def test_sharded_example_lost_push_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps, "run", LostOne)
    options = "--megabytes 1 --steps 2 --servers 1 --workers 1"
    with pytest.raises(AssertionError, match="not 3 everywhere"):
        sharded_100mb.main(options.split())
