"""Real processes under a nemesis: whatever happens, counts are exact or an error names the cause.

Each seed is a run and a list of disturbances. A failure tells both; that seed again:
`PARAMSERVE_NEMESIS=7 pytest tests/faults/test_nemesis.py`, several with commas.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from tests.faults.drivers import ROOT
from tests.faults.leftovers import folders
from tests.faults.nemesis import (
    GOES_ON_S,
    MARKER,
    STARTS_WITHIN_S,
    Event,
    Nemesis,
    left_of,
    plan,
)
from tests.faults.nemesis_victims import ANSWERED, LOGGED, SENT, Config, Outcome

NAMED = os.environ.get("PARAMSERVE_NEMESIS", "")
SEEDS = [int(seed) for seed in NAMED.split(",")] if NAMED else [0, 1, 2, 3, 24]
"""Each has another end. Seed 4 has two pauses of 5 s, seed 24 one."""
MORE_SEEDS = [] if NAMED else list(range(100, 112))
EVENTS = 5
MORE_EVENTS = 20
ENDS_WITHIN_S = 15.0
"""All processes after their driver; longer than a killed one may take to be gone."""
STARTS_S = 1.5
"""A signal while a run starts comes within this time."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", SEEDS)
def test_run_under_a_nemesis_counts_exactly_or_names_the_cause(seed: int, tmp_path: Path) -> None:
    suffer(seed, EVENTS, tmp_path)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_signal_while_a_run_starts_leaves_nothing(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    number = rng.choice((signal.SIGINT, signal.SIGALRM, signal.SIGTERM))
    after_s = rng.uniform(0.0, STARTS_S)

    def strike(driver: subprocess.Popen[str], nemesis: Nemesis) -> None:
        nemesis.until((tmp_path / "began").exists, "the driver does not begin")
        time.sleep(after_s)
        driver.send_signal(number)

    told, _ = driven(Config(2, 2, "sync", "continue"), tmp_path, strike)
    if number == signal.SIGTERM:
        assert told == ""
    else:
        expected = {signal.SIGINT: "KeyboardInterrupt", signal.SIGALRM: "Alarm"}[number]
        assert msgspec.json.decode(told, type=Outcome).error == expected, (number, after_s)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", MORE_SEEDS)
def test_long_run_under_a_nemesis(seed: int, tmp_path: Path) -> None:
    suffer(seed, MORE_EVENTS, tmp_path)


def suffer(seed: int, count: int, folder: Path) -> None:
    """Start the run of a seed, let everything happen to it and check what is left."""
    config, (*disturbances, end) = plan(seed, count)
    done: list[Event] = []
    nemeses: list[Nemesis] = []

    def disturb(driver: subprocess.Popen[str], nemesis: Nemesis) -> None:
        nemeses.append(nemesis)
        nemesis.goes_on(STARTS_WITHIN_S)
        for event in disturbances:
            done.append(event)
            nemesis.do(event)
            nemesis.goes_on()
        done.append(end)
        nemesis.do(end)

    try:
        told, errors = driven(config, folder, disturb)
        check(end, config, nemeses[0], told, errors)
    except BaseException as error:
        error.add_note(f"seed {seed}: {config}")
        error.add_note("\n".join(f"  {n}. {event}" for n, event in enumerate(done, 1)))
        raise


def driven(
    config: Config,
    folder: Path,
    disturb: Callable[[subprocess.Popen[str], Nemesis], None],
) -> tuple[str, str]:
    """What a driver prints whose run is disturbed in this way; nothing of it is left."""
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.nemesis_victims", str(folder)],
        cwd=ROOT,
        env={**os.environ, MARKER: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        nemesis = Nemesis(psutil.Process(driver.pid), folder, config)
        try:
            disturb(driver, nemesis)
            told, errors = driver.communicate(timeout=GOES_ON_S)
        except BaseException as error:
            driver.kill()
            error.add_note("".join(driver.communicate()))
            raise
        finally:
            nemesis.release()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while (left := left_of(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes that the run has left behind: {left}"
    assert folders() == set()
    return told, errors


def check(end: Event, config: Config, nemesis: Nemesis, told: str, errors: str) -> None:
    """What must hold when everything has ended in this way."""
    assert "Traceback" not in errors, errors
    if end.kind == "kill driver":
        assert told == ""
        return
    outcome = msgspec.json.decode(told, type=Outcome)
    if end.kind == "kill server":
        (victim,) = end.whom
        assert outcome.error == "ServerGone", outcome
        assert f"{victim} was killed by SIGKILL" in outcome.text
        return
    expected = {"finish": "", "interrupt": "KeyboardInterrupt", "alarm": "Alarm"}[end.kind]
    assert outcome.error == expected, outcome
    if config.deaths == "continue":
        assert set(outcome.failures) == {str(rank) for rank in nemesis.killed}
        assert all("SIGKILL" in failure for failure in outcome.failures.values())
    assert outcome.values is not None
    board = nemesis.board
    for rank, (smallest, largest) in enumerate(outcome.values):
        assert smallest == largest, f"worker {rank}: some servers have {smallest}, others {largest}"
        assert board[rank, ANSWERED] <= smallest <= board[rank, SENT], f"worker {rank}: {board}"
    if end.kind == "finish" and not nemesis.killed and not outcome.restarts:
        assert np.array_equal(board[:, ANSWERED], board[:, SENT])
        assert outcome.records == board[:, LOGGED].sum()
