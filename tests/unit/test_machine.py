"""What a process may use: quotas and limits of its cgroups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.suites import each_case

from paramserve import machine

ALLOWED = len(os.sched_getaffinity(0))


def given(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> None:
    """A cgroup file system with these files, and this process in it."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    monkeypatch.setattr(machine, "CGROUPS", root)
    monkeypatch.setattr(machine, "OWN_CGROUPS", root / "own")


@each_case(
    ("own", "files", "quota"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "50000 100000\n", "a/b/cpu.max": "max 100000\n"}, 0.5),
        (
            "3:cpu,cpuacct:/box\n0::/\n",
            {"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        (
            "3:cpu:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("0::/\n", {"cpu.max": "what\n"}, None),
    ],
)
def test_cores_are_within_the_quota_of_every_cgroup_around(
    own: str,
    files: dict[str, str],
    quota: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given(monkeypatch, tmp_path, own, files)
    assert machine.cpu_quota() == quota
    expected = ALLOWED if quota is None else min(ALLOWED, max(1, -int(-quota // 1)))
    assert machine.cores() == expected


def test_memory_is_what_is_left_of_the_least_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given(monkeypatch, tmp_path, "0::/a\n", {"memory.max": "max\n", "memory.current": "1\n"})
    free = machine.memory_bytes()
    assert free is not None
    assert free > 1 << 20
    given(monkeypatch, tmp_path, "0::/a\n", {"a/memory.max": "4096\n", "a/memory.current": "96\n"})
    assert machine.memory_bytes() == 4000


def test_without_cgroups_all_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "none")
    assert machine.cpu_quota() is None
    assert machine.cores() == ALLOWED
