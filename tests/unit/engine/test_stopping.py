"""A process that is asked to end ends, whatever it is just executing."""

from __future__ import annotations

import subprocess
import sys

from paramserve.engine.child import EXIT_TERMINATED

PROGRAM = """
import os, signal, time
from paramserve.engine.child import Stopping, stop_on_sigterm

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):  # the signal is handled in here
            pass
        print("finalized", flush=True)

stop_on_sigterm(Stopping())
{call}
time.sleep(20)
print("goes on")
"""


def ended(call: str) -> tuple[int, str, str]:
    code = [sys.executable, "-c", PROGRAM.format(call=call)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_signal_ends_a_process_in_order() -> None:
    assert ended("os.kill(os.getpid(), signal.SIGTERM)") == (EXIT_TERMINATED, "", "")


def test_signal_that_comes_in_a_finalizer_is_not_lost() -> None:
    assert ended("Late()") == (EXIT_TERMINATED, "finalized\n", "")
