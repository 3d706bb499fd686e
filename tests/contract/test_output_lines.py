"""What workers print, by any means, comes as whole lines with the rank in front."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import pytest

import paramserve as ps

STEPS = 50


def talks(worker: ps.Worker) -> None:
    """Print in pieces, past Python and from C; rank 1 dies in the middle of a line."""
    worker.print0("only", "once", sep="-")
    for step in range(STEPS):
        for piece in ("rank", worker.rank, "step", step):
            print(piece, end=" ", flush=True)
        print()
    os.write(2, b"past ")
    os.write(2, b"Python\n")
    ctypes.CDLL(None).puts(b"from C")
    if worker.rank == 1:
        os.write(1, b"last word")
        os.kill(os.getpid(), signal.SIGKILL)
    print("to stderr", file=sys.stderr)


def test_lines_of_workers_are_whole_and_say_whose_they_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    result = ps.run(talks, workers=2, on_worker_death="continue", timeout_s=100)
    assert list(result.failures) == [1]
    out, error = capfd.readouterr()
    expected = [
        f"[rank {rank}] rank {rank} step {step} " for rank in (0, 1) for step in range(STEPS)
    ]
    expected += ["[rank 0] only-once", "[rank 0] from C", "[rank 1] from C", "[rank 1] last word"]
    assert sorted(out.splitlines()) == sorted(expected)
    told = ["[rank 0] past Python", "[rank 0] to stderr", "[rank 1] past Python"]
    assert sorted(error.splitlines()) == told


def test_lines_are_as_they_were_printed_where_the_engine_shows_no_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ps.run(lambda worker: worker.print0("epoch 3"), engine=ps.Local(show_rank=False))
    assert capfd.readouterr().out == "epoch 3\n"
