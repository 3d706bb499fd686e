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


@pytest.mark.parametrize("show_rank", [True, False])
def test_lines_of_workers_are_whole_and_say_whose_they_are(
    capfd: pytest.CaptureFixture[str], show_rank: bool
) -> None:
    result = ps.run(
        talks, workers=2, on_worker_death="continue", timeout_s=100, show_rank=show_rank
    )
    assert list(result.failures) == [1]
    out, error = capfd.readouterr()
    labels = {rank: f"[rank {rank}] " * show_rank for rank in (0, 1)}
    expected = [
        f"{labels[rank]}rank {rank} step {step} " for rank in (0, 1) for step in range(STEPS)
    ]
    expected += [f"{labels[0]}only-once", f"{labels[1]}last word"]
    expected += [f"{label}from C" for label in labels.values()]
    assert sorted(out.splitlines()) == sorted(expected)
    assert sorted(error.splitlines()) == sorted(
        [f"{label}past Python" for label in labels.values()] + [f"{labels[0]}to stderr"]
    )
