"""Runs contestants in clean processes, in turn, and says what the figures are worth.

A contestant is a function `"module:name"` that takes a workload and a scratch folder and returns
named figures. It runs in a session of processes of its own, with one thread for each process and
the niceness of this one, and no process of it is alive when the next one begins (Linux only).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.processes import session
from benchmarks.table import Report, Row, machine

ROOT = Path(__file__).resolve().parent.parent
CONTESTANT_TIMEOUT_S = 400.0
GRACE_S = 10.0
"""Ray's processes end by themselves some seconds after their driver."""
LOG_LINES = 30
"""Most lines of output of a contestant that failed."""

ONE_THREAD = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMBA", "NUMEXPR")
}
_QUIET_RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",
    "RAY_AUTH_MODE": "disabled",
}
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch asks for huge pages as numpy does by itself: random rows of 2 GB come twice as fast."""
_KEPT_BUFFERS = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
}
"""Without these two, malloc maps and unmaps the buffer of every large message: 20% fewer calls a
second by RPC with 1 MB and 4 workers."""
_RPC = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **_KEPT_BUFFERS}
ON_RAY = ("benchmarks.rival_ray", "benchmarks.ours_ray", "benchmarks.tables_ray")
ENVIRONMENTS = {
    **dict.fromkeys(ON_RAY, _QUIET_RAY),
    "benchmarks.rival_rpc": _RPC,
    "benchmarks.tables_ray": _QUIET_RAY | _KEPT_BUFFERS,
    "benchmarks.tables_redis": _KEPT_BUFFERS,
    "benchmarks.tables_rpc": _RPC | _HUGE_PAGES,
    "benchmarks.tables_kernels": _HUGE_PAGES,
}
"""What a rival's processes need to be fast and quiet. Ray's HOME and niceness: `_environment`."""

_ON_TORCH = tuple(
    f"benchmarks.{name}"
    for name in ("rival_rpc", "tables_rpc", "tables_kernels", "tables_movielens")
)
NEEDS = {**dict.fromkeys(ON_RAY, "ray"), **dict.fromkeys(_ON_TORCH, "torch")}
"""Packages without which a rival is left out."""

_CHILD = """\
import importlib, pathlib, pickle, sys
target, load, scratch = pickle.load(sys.stdin.buffer)
module, name = target.split(":")
found = getattr(importlib.import_module(module), name)(load, pathlib.Path(scratch))
pathlib.Path(scratch, "figures").write_bytes(pickle.dumps(found))
"""

Figures = dict[str, float]


class ContestantFailed(Exception):
    """A contestant raised, hung or was killed; the text holds the end of its output."""


def run_contestant(target: str, load: Any, *, timeout_s: float = CONTESTANT_TIMEOUT_S) -> Figures:
    """Run one contestant and end every process that it started.

    Raises:
        ContestantFailed: no figures.
    """
    # Not under TMPDIR: the path of a Unix socket ends at 107 bytes and Ray's are long.
    scratch = Path(tempfile.mkdtemp(prefix="psb", dir="/tmp"))
    try:
        with (scratch / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD],
                cwd=ROOT,
                env=_environment(target, scratch),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                _wait(process, pickle.dumps((target, load, str(scratch))), timeout_s)
            finally:
                _end_session(process)
        return _figures(target, scratch, process.returncode)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(target: str, scratch: Path) -> dict[str, str]:
    module = target.split(":")[0]
    found = {**os.environ, **ONE_THREAD, **ENVIRONMENTS.get(module, {})}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if module in ON_RAY:
        # Read by the raylet: so much nicer are its workers than itself, and it is as nice as this.
        found["RAY_worker_niceness"] = "0"
        found["HOME"] = str(scratch)
        (scratch / "ray_bootstrap_config.yaml").write_text("{}\n")
    return found


def _wait(process: subprocess.Popen[bytes], message: bytes, timeout_s: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(message, timeout=timeout_s)


def _figures(target: str, scratch: Path, status: int | None) -> Figures:
    path = scratch / "figures"
    if status == 0 and path.exists():
        found: Figures = pickle.loads(path.read_bytes())
        return found
    lines = (scratch / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    raise ContestantFailed(f"{target} ended with {status}:\n" + "\n".join(lines))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Give the session's processes time to end by themselves if its leader did, then kill."""
    deadline = time.monotonic() + (GRACE_S if process.poll() == 0 else 0.0)
    while session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    while members := session(process.pid):
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.01)
    process.wait()


@dataclass
class Contest:
    """Contestants by label, measured in turn so that a slow minute hits all of them.

    Attributes:
        failures: what went wrong, by contestant and round.
    """

    rounds: int
    console: Console
    only: frozenset[str] = frozenset()
    failures: list[str] = field(default_factory=list)

    def run(self, title: str, contestants: Mapping[str, str], load: Any) -> Measured:
        """Run `{label: "module:function"}` on one workload, `rounds` times each."""
        found: dict[str, list[Figures]] = {label: [] for label in contestants}
        for number in range(self.rounds):
            for label, target in contestants.items():
                if self._left_out(label, target):
                    continue
                began = time.monotonic()
                try:
                    found[label].append(run_contestant(target, load))
                except ContestantFailed as failed:
                    self.failures.append(f"{title}, {label}, round {number + 1}: {failed}")
                    self.console.print(self.failures[-1], style="red", markup=False)
                seconds = time.monotonic() - began
                self.console.print(
                    f"{title}: {label}, round {number + 1} of {self.rounds}, {seconds:.1f} s",
                    style="dim",
                    highlight=False,
                )
        return Measured(found)

    def _left_out(self, label: str, target: str) -> bool:
        if self.only and label not in self.only:
            return True
        needed = NEEDS.get(target.split(":")[0])
        return needed is not None and importlib.util.find_spec(needed) is None


@dataclass(frozen=True)
class Measured:
    """Figures of each round, by contestant."""

    rounds: Mapping[str, Sequence[Figures]]

    def samples(self, figure: str | Mapping[str, str]) -> dict[str, list[float]]:
        """One figure of every contestant that has it.

        Args:
            figure: its name, or for each label another name.
        """
        found = {}
        for label, rounds in self.rounds.items():
            name = figure if isinstance(figure, str) else figure.get(label, "")
            if values := [one[name] for one in rounds if name in one]:
                found[label] = values
        return found

    def median(self, label: str, figure: str) -> float | None:
        """Over the rounds; None if there is none."""
        values = self.samples(figure).get(label)
        return median(values) if values else None


Measure = Callable[[Contest, bool], list[Row]]
"""Runs one benchmark; the flag asks for the tiny preset."""


def options(argv: Sequence[str] | None, about: str | None) -> argparse.Namespace:
    """What every benchmark's command line has."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--tiny", action="store_true", help="small sizes, one round: does it run?")
    parser.add_argument("--rounds", type=int, help="default 3, or 1 with --tiny")
    parser.add_argument("--only", default="", help="contestants, as ours,floor,ray,rpc")
    parser.add_argument("--out", type=Path, help="folder for bench.json and bench.md")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None, about: str | None, measures: Sequence[Measure]) -> int:
    """Measure, print the table, write it where `--out` says. 1 if a contestant failed."""
    chosen = options(argv, about)
    rounds = chosen.rounds if chosen.rounds is not None else 1 if chosen.tiny else 3
    before = machine()
    console = Console(stderr=True)
    contest = Contest(rounds, console, frozenset(filter(None, chosen.only.split(","))))
    rows: list[Row] = []
    for measure in measures:
        rows += measure(contest, chosen.tiny)
    report = Report(rows, before, rounds, chosen.tiny, contest.failures)
    report.show()
    if chosen.out is not None:
        report.write(chosen.out)
    return 1 if contest.failures else 0
