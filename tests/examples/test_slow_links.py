"""The example of slow links: hosts in namespaces, so that it needs root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.network import hosts

import paramserve as ps
import slow_links

SMALL = ["--width", "32", "--layers", "1", "--every", "10", "--evaluate-every", "10"]


def test_without_root_it_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert slow_links.main([]) == 1
    assert "need root: start it with sudo" in " ".join(capsys.readouterr().out.split())


def test_text_is_there_without_a_file(tmp_path: Path) -> None:
    text = slow_links.read_text("")
    assert text.size > 300_000
    assert text.max() < 200
    (tmp_path / "text").write_text("abcab")
    assert slow_links.read_text(str(tmp_path / "text")).tolist() == [0, 1, 2, 0, 1]


def test_every_way_is_one_that_paramserve_has() -> None:
    for name, way in slow_links.ways(50, 4).items():
        assert isinstance(way.policy, ps.Policy), name
        own = getattr(way.policy, "steps_per_clock", 1)
        assert own == way.every, name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_local_steps_reach_the_same_with_a_fraction_of_the_bytes(tmp_path: Path) -> None:
    shaped = ("tbf", "rate", "1mbit", "burst", "32kb", "latency", "400ms")
    why = hosts.missing() or hosts.without_qdisc(*shaped)
    if why:
        pytest.skip(f"NOT TESTED: slow links: {why}")
    pytest.importorskip("matplotlib")
    ways = ["--ways", "int8,local", "--seconds", "6", "--mbit", "20"]
    assert slow_links.main([*SMALL, *ways, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "slow_links.png").stat().st_size > 10_000
    curves = json.loads((tmp_path / "slow_links.json").read_text())
    each = {name: curve[-1]["bytes"] / curve[-1]["steps"] for name, curve in curves.items()}
    assert each["local steps, int4"] < each["int8 each step"] / 5
    for curve in curves.values():
        assert curve[-1]["loss"] < curve[0]["loss"]
