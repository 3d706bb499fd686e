"""examples/mnist.py runs from end to end on a small data set and writes what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mnist


@pytest.mark.slow
@pytest.mark.timeout(300)  # twelve processes import torch; on a busy machine that takes a while
def test_mnist_example_digits_learns_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--data digits --sync-steps 60 --async-updates 120 --batch-size 32 --lr 0.02"
    assert mnist.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert (folder / "accuracy.png").stat().st_size > 10_000
    runs = json.loads((folder / "curves.json").read_text())
    assert list(runs) == ["sync", "async"]
    for run in runs.values():
        assert run["accuracy"] > 0.6  # guessing gives 0.1
        versions = [version for version, _, _ in run["curve"]]
        assert versions == sorted(set(versions))
        assert versions
    output = capsys.readouterr().out
    assert "steps per second" in output
    assert str(folder.name) in output.replace("\n", "")
