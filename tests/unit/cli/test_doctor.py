"""`paramserve doctor` says what is slower, missing or wrong, and what to do."""

from __future__ import annotations

import importlib
import json
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.suites import each_case

from paramserve import __version__, kernel_folder
from paramserve.cli import cli
from paramserve.cli.doctor import Finding, clock_finding, version_finding
from paramserve.kernel_folder import Choice

doctor: Any = importlib.import_module("paramserve.cli.doctor")
"""The module: the package's name `doctor` is the command."""


def asked(*arguments: str) -> tuple[Result, dict[str, dict[str, str]]]:
    done = CliRunner().invoke(cli, ["doctor", "--json", *arguments])
    return done, {each["what"]: each for each in json.loads(done.stdout)}


def test_this_machine_is_looked_at_whole() -> None:
    done, found = asked()
    assert done.exit_code == 0, done.output
    looked_at = {"python", "cores", "memory", "open files", "/dev/shm", "shared arenas"}
    looked_at |= {"wake-up of a thread", "clock source", "loopback", "kernel cache", "torch", "ray"}
    assert looked_at <= found.keys()
    assert all(each["advice"] for each in found.values() if each["verdict"] != "ok")
    shown = CliRunner().invoke(cli, ["doctor"]).output
    assert all(what in shown for what in looked_at)


CASES: list[tuple[Callable[[], Finding], str, Any, str, str]] = [
    (doctor._cores, "cores", lambda: 1, "slower", "take turns on one core"),
    (doctor._memory, "memory_bytes", lambda: 1 << 20, "slower", "use fewer workers"),
    (doctor._memory, "memory_bytes", lambda: None, "ok", ""),
    (doctor._clock, "CLOCK_SOURCE", Path("/none"), "ok", ""),
    (doctor._wakeups, "WAKE_S_SLOW", 0.0, "slower", "halt idle cores"),
    (doctor._shared_memory, "SHARED_MIN", 1 << 62, "slower", "--shm-size"),
]


@each_case(("look", "name", "value", "verdict", "advice"), CASES)
def test_what_is_short_is_told_with_what_to_do(
    look: Callable[[], Finding],
    name: str,
    value: Any,
    verdict: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, name, value)
    found = look()
    assert found.verdict == verdict
    assert advice in found.advice
    assert bool(found.advice) == (verdict != "ok")


def test_clock_that_is_read_by_a_system_call_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").write_text("hpet\n")
    monkeypatch.setattr(doctor, "CLOCK_SOURCE", tmp_path / "source")
    assert doctor._clock().verdict == "slower"


def test_kernels_that_are_kept_nowhere_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = iter([Choice(None, ("/a: belongs to user 7",)), Choice(tmp_path, ("/b: others",))])
    monkeypatch.setattr(kernel_folder, "choose", lambda: next(choices))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/b")
    nowhere, elsewhere = doctor._kernels(), doctor._kernels()
    assert (nowhere.verdict, elsewhere.verdict) == ("slower", "differs")
    assert "/a: belongs to user 7" in nowhere.found
    assert "compiles anew" in nowhere.advice
    assert all("only this user can write to" in each.advice for each in (nowhere, elsewhere))


def test_few_open_files_are_wrong_and_end_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    done, found = asked()
    assert done.exit_code == 1
    assert found["open files"]["advice"] == "ulimit -n 4096"


def test_missing_package_is_told_with_what_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"no-such-package": "nothing"})
    (found,) = doctor._packages()
    assert found.verdict == "missing"
    assert found.advice == "for nothing: pip install no-such-package"


def test_token_that_others_may_read_is_wrong(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 64)
    token.chmod(0o604)
    done, found = asked("--token-file", str(token))
    assert done.exit_code == 1
    assert f"chmod 600 {token}" in found["token file"]["advice"]
    token.chmod(0o600)
    done, found = asked("--token-file", str(token))
    assert (done.exit_code, found["token file"]["verdict"]) == (0, "ok")


def test_cluster_that_is_not_there_is_wrong() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done, found = asked("--address", f"127.0.0.1:{port}")
    assert done.exit_code == 1
    assert found["reachable"]["verdict"] == "wrong"
    assert "paramserve serve" in found["reachable"]["advice"]


def test_clock_that_is_surely_off_is_told() -> None:
    for there_s, verdict, words in (
        (100.1, "ok", "0.000 s behind this one, give or take 0.100 s"),
        (101.1, "ok", "1.000 s ahead of this one"),
        (101.3, "differs", "1.200 s ahead of this one"),
        (40.1, "differs", "60.000 s behind this one"),
    ):
        finding = clock_finding(there_s, 100.0, 100.2)
        assert finding.verdict == verdict
        assert words in finding.found
        assert bool(finding.advice) == (verdict == "differs")


def test_another_version_is_told() -> None:
    assert version_finding({"paramserve": __version__, "python": "3.12"}).verdict == "ok"
    other = version_finding({"paramserve": "9.9", "python": "3.12"})
    assert (other.verdict, "9.9" in other.found) == ("differs", True)
    assert __version__ in other.advice
