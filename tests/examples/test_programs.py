"""Examples started as processes, by the command in their docstring, with small settings."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
from tests import programs
from tests.needs import needs
from tests.programs import run

import custom_rule


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, str]:
    return programs.alone(tmp_path)


def test_custom_rule_example_logs_weighs_and_clips(capfd: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("torch")  # the run's values are tensors then, and print as arrays still
    custom_rule.main(["--steps", "40", "--servers", "2"])
    output = capfd.readouterr().out
    lines = re.findall(r"worker (\d), clock (\d), staleness \d+: gradient \[(.*)\]", output)
    assert sorted((rank, clock) for rank, clock, _ in lines) == [
        (rank, clock) for rank in "01" for clock in "012"
    ]
    # Rank 0 wants 1, rank 1 wants -1: where they meet depends on how they take turns.
    assert abs(reached(output, "Weights(1, 1)")) < 1.0
    assert reached(output, "Weights(1, 0)") == pytest.approx(1.0 - 0.9**40)  # rank 0 alone counts
    # 80 steps of 0.1 * 0.1 / sqrt(3) each; unclipped, they would reach the goal.
    assert 0.2 < reached(output, "Clips(norm=0.1)") < 80 * 0.01 / 3**0.5 + 1e-6


def reached(output: str, name: str) -> float:
    """The first element of the vector that is printed behind a name."""
    found = re.search(rf"{re.escape(name)}:\s*\[\s*([-+.e\d]+)", output)
    assert found is not None, output
    return float(found[1])


def test_linear_regression_example_learns_both_ways(alone: dict[str, str]) -> None:
    output = run([sys.executable, "examples/linear_regression.py"], alone)
    rows = [line.split("│") for line in output.splitlines() if "sync" in line]
    assert [row[1].strip() for row in rows] == ["sync", "async"]
    for row in rows:
        assert float(row[2]) > 10 * float(row[3])


@pytest.mark.slow
def test_resume_example_ends_as_a_run_that_lost_no_server(alone: dict[str, str]) -> None:
    output = run([sys.executable, "examples/resume.py", "--data", "digits"], alone)
    assert "server 0 was killed by SIGKILL: the run goes on from the checkpoint" in output
    assert "the values are those of a run that lost no server" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_example_trains_with_rank_0_serving(alone: dict[str, str]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    free = ["--master-port", "0", "examples/torchrun_mnist.py", "--port", str(free_port())]
    output = run([*torchrun, *free, "--steps", "40", "--data", "digits"], alone)
    reached = dict(re.findall(r"worker (\d): (\d+\.\d+)% of the test images", output))
    assert set(reached) == {"0", "1"}
    assert all(float(share) > 20.0 for share in reached.values())  # ten classes: chance is 10%


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_placement_example_puts_workers_where_their_resource_is(alone: dict[str, str]) -> None:
    needs("ray")
    output = run([sys.executable, "examples/placement.py", "--steps", "3"], alone)
    trainers = set(re.findall(r"^node (\w+): \{.*'trainer'", output, re.MULTILINE))
    assert len(trainers) == 2
    workers = re.findall(r"^worker \d ran on node (\w+)$", output, re.MULTILINE)
    assert len(workers) == 2
    assert set(workers) <= trainers
    rooms = re.findall(r"^room for \{'CPU': 1.0\} on node (\w+)$", output, re.MULTILINE)
    assert len(set(rooms)) == len(rooms) == 2  # each server on a node of its own
    assert re.search(r"at the end: \[6\. 6\.", output)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mnist_example_runs_on_ray(alone: dict[str, str], tmp_path: Path) -> None:
    needs("ray")
    small = ["--sync-steps", "20", "--async-updates", "40", "--data", "digits"]
    places = ["--engine", "ray", "--out", str(tmp_path / "runs")]
    output = run([sys.executable, "examples/mnist.py", *small, *places], alone)
    assert re.search(r"sync .* 20 .* 40 ", output)
    assert re.search(r"async .* 40 .* 40 ", output)
    assert len(list((tmp_path / "runs").glob("*/accuracy.png"))) == 1


def free_port() -> int:
    """A port that no process listens at now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
