"""Clean processes for contestants, and the arithmetic of the table."""

from __future__ import annotations

import os

import psutil
import pytest
import torch
from tests.suites import each_case

import mnist
from benchmarks import harness, table, workloads

THESE = "tests.benchmarks.contestants"


def test_contestant_leaves_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 0.1)
    found = harness.run_contestant(f"{THESE}:leaves_a_process", None)
    assert not runs(int(found["pid"]))


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be collected by its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_contestant_raises_failure_shows_its_output() -> None:
    with pytest.raises(harness.ContestantFailed, match="this contestant cannot"):
        harness.run_contestant(f"{THESE}:raises", None)


def test_contestant_has_one_thread_and_our_niceness() -> None:
    found = harness.run_contestant(f"{THESE}:tells_settings", None)
    assert found == {"threads": 1.0, "niceness": os.getpriority(os.PRIO_PROCESS, 0)}


def row(better: str, bar: table.Bar, **values: float) -> table.Row:
    samples = {label: [value] for label, value in values.items()}
    return table.Row("w", "u", better, samples, (bar,))


@each_case(
    ("better", "bar", "ours", "other", "met"),
    [
        ("more", table.Bar("times", 4, "ray"), 40.0, 10.0, True),
        ("more", table.Bar("times", 4, "ray"), 39.0, 10.0, False),
        ("less", table.Bar("times", 10, "ray"), 1.0, 10.0, True),
        ("less", table.Bar("times", 10, "ray"), 1.1, 10.0, False),
        ("more", table.Bar("share", 0.6, "ray"), 6.1, 10.0, True),
        ("more", table.Bar("share", 0.6, "ray"), 5.9, 10.0, False),
        ("less", table.Bar("share", 0.6, "ray"), 10.0, 6.1, True),
        ("less", table.Bar("share", 0.6, "ray"), 10.0, 5.9, False),
        ("less", table.Bar("cost", 2.5, "ray"), 24.0, 10.0, True),
        ("less", table.Bar("cost", 2.5, "ray"), 26.0, 10.0, False),
        ("less", table.Bar("most", 180), 180.0, 1.0, True),
        ("less", table.Bar("most", 180), 181.0, 1.0, False),
    ],
)
def test_bar_is_met_by_ratio_of_medians(
    better: str, bar: table.Bar, ours: float, other: float, met: bool
) -> None:
    assert row(better, bar, ours=ours, ray=other).judge(bar)[2] is met


def test_bar_without_rival_is_not_judged() -> None:
    bar = table.Bar("times", 4, "ray")
    assert row("more", bar, ours=1.0).judge(bar)[2] is None


def test_markdown_has_ratios_and_no_bars() -> None:
    bars = (table.Bar("most", 180), table.Bar("times", 4, "ray"))
    one = table.Row("w", "u", "more", {"ours": [40.0], "ray": [10.0]}, bars)
    found = table.Report([one], table.machine(), 2, False, [])
    lines = found.markdown().splitlines()
    assert lines[0] == "| workload | ours | Ray | RPC | floor | ratio |"
    assert lines[2].endswith(" | 40.0 | 10.0 |  |  | 4x Ray |")


def test_convnet_is_the_one_of_the_example() -> None:
    ours, example = workloads.convnet(), mnist.ConvNet()
    ours.load_state_dict(dict(zip(ours.state_dict(), example.state_dict().values(), strict=True)))
    images = torch.rand(4, 1, 28, 28)
    assert torch.equal(ours(images), example(images))


def test_trainer_gradients_are_those_of_the_model() -> None:
    load = workloads.Mnist(images=256, batch_size=128)
    trainer = workloads.Trainer(load, 0)
    trainer.backward()
    found = [p.grad for p in trainer.model.parameters()]
    flat = torch.cat([one.flatten() for one in found if one is not None])
    assert torch.equal(flat, trainer.gradients)
    assert trainer.gradients.abs().sum() > 0
