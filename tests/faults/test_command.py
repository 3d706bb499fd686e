"""The command `paramserve`, in processes of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.faults.leftovers import folders
from tests.suites import each_case

from paramserve.cli import main

COMMAND = (sys.executable, "-c", "import sys; from paramserve.cli import main; sys.exit(main())")
SCRIPT = """
import argparse
import sys

import numpy as np

import paramserve as ps
from beside import ONES  # a module that lies beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--pipe")
options = parser.parse_args()


class Counter:
    step = np.ones(3)


def train(worker):
    worker.client.define("w", np.zeros(3), rule=ps.Add())
    for step in range(options.steps):
        worker.client.push_pull({"w": Counter.step * ONES}, tick=True)
        worker.log(loss=1.0 / (step + 1))
    return sys.argv[1:], worker.client.pull("w").tolist()


def forever(worker):
    train(worker)
    if worker.rank == 0:
        open(options.pipe, "w").close()
    while True:
        worker.client.push_pull({"w": Counter.step}, tick=True)


def broken(worker):
    raise LookupError("no data")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("ONES = 1.0\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def call(*args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_run_trains_and_passes_the_scripts_arguments_on(script: Path) -> None:
    policy = ("--consistency", "sync:sum", "--workers", 2, "--servers", 2)
    out = script.with_name("model.pt")
    options = (*policy, "--save", out, "--", "--steps", 5)
    done = call("run", "script.py:train", *options, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert torch.load(out, weights_only=True)["w"].tolist() == [10.0] * 3
    assert done.stdout.splitlines() == [
        *(f"worker {rank} returned (['--steps', '5'], [10.0, 10.0, 10.0])" for rank in range(2)),
        f"paramserve: 1 tensors of 'default' are in {out}",
    ]
    assert "finished" in done.stderr or "steps" in done.stderr


def test_run_failure_is_told_with_the_traceback_and_exit_code_1(script: Path) -> None:
    done = call("run", f"{script}:broken", "--show", "none")
    assert done.returncode == 1
    assert done.stderr.startswith("paramserve: WorkerFailed: worker 0 raised LookupError: no data")
    assert "script.py" in done.stderr
    assert "cli.py" not in done.stderr


@each_case(
    ("args", "text"),
    [
        (["script.py"], "is not SCRIPT:FUNCTION"),
        (["missing.py:train"], "there is no file missing.py"),
        (["script.py:train", "--workers", "0"], "--workers"),
        (["script.py:train", "--servers", "-1"], "--servers"),
        (["script.py:train", "--consistency", "eventual"], "--consistency"),
        (["script.py:train", "--wrokers", "2"], "--wrokers"),
        (
            ["script.py:train", "--save", "missing/model.pt"],
            "missing/model.pt cannot be written: No",
        ),
    ],
)
def test_run_wrong_argument_is_told_with_exit_code_2(
    script: Path,
    args: list[str],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(script.parent)
    assert main(["run", *args]) == 2
    assert text in capsys.readouterr().err


def test_run_of_a_function_that_is_not_there_tells_those_that_are(script: Path) -> None:
    done = call("run", "script.py:missing", cwd=script.parent)
    assert done.returncode == 2
    assert "it has Counter, train, forever, broken" in done.stderr


def test_run_ctrl_c_gives_130_and_one_line_within_2_s(script: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [*COMMAND, "run", f"{script}:forever", "--workers", "2", "--show", "none"]
    running = subprocess.Popen(
        [*command, "--", "--pipe", str(pipe)], stderr=subprocess.PIPE, text=True
    )
    with running:
        pipe.read_text()
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        _, told = running.communicate()
        assert time.monotonic() - began < 2.0
    assert running.returncode == 130
    assert re.fullmatch(r"paramserve: interrupted, last heard after .* 2 of 2 workers\n", told)
    assert folders() == set()


def test_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"paramserve, version \d+\.\d+\.\d+\n", capsys.readouterr().out)
