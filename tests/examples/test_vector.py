"""examples/vector.py: what the driver sees are the pushes so far, and at the end no one is lost."""

from __future__ import annotations

import re

import pytest

import vector


def test_vector_example_counts_every_push_once(capsys: pytest.CaptureFixture[str]) -> None:
    vector.main(["--steps", "15"])
    output = capsys.readouterr().out
    runs = re.split(r"two workers, servers: [12]\n", output)[1:]
    assert len(runs) == 2
    for run in runs:
        *seen, end = re.findall(r"(?:after (\d+) pushes|at the end): .*?\[([^]]*)\]", run)
        for version, values in seen:
            assert numbers(values) == [int(version)] * 10
        assert seen  # the driver looked while they ran
        assert numbers(end[1]) == [30] * 10


def numbers(values: str) -> list[float]:
    return [float(value) for value in values.replace(",", " ").split()]
